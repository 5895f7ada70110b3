#include "transport/ofi/library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <rdma/fabric.h>

#include <array>
#include <cstdlib>
#include <utility>

// What phub calls: result, name, parameters, and how they are handed on. The compiler holds them
// against the headers.
#define PHUB_OFI_CALLS(CALL)                                                                  \
  CALL(int, fi_getinfo,                                                                       \
       (uint32_t a, const char* b, const char* c, uint64_t d, const fi_info* e, fi_info** f), \
       (a, b, c, d, e, f))                                                                    \
  CALL(void, fi_freeinfo, (fi_info * a), (a))                                                 \
  CALL(fi_info*, fi_dupinfo, (const fi_info* a), (a))                                         \
  CALL(int, fi_fabric, (fi_fabric_attr * a, fid_fabric * *b, void* c), (a, b, c))             \
  CALL(const char*, fi_strerror, (int a), (a))                                                \
  CALL(uint32_t, fi_version, (), ())

namespace phub {
namespace {

#define PHUB_OFI_NAME(RESULT, NAME, PARAMETERS, ARGUMENTS) #NAME,
constexpr std::array kOfiCalls = {PHUB_OFI_CALLS(PHUB_OFI_NAME)};
#undef PHUB_OFI_NAME

// What libfabric takes from its environment alone, when it is opened. What is set already stays.
constexpr std::array<std::pair<const char*, const char*>, 9> kOfiEnvironment = {{
    // A library of PSM that it is linked to would take SIGTERM, SIGINT and others for itself, and
    // end the process when one comes.
    {"IPATH_NO_BACKTRACE", "1"},
    // ofi_rxm has buffers for messages, 70 MB for each endpoint, and no messages come here. Both
    // ends need the same BUFFER_SIZE.
    {"FI_OFI_RXM_BUFFER_SIZE", "1024"},
    {"FI_OFI_RXM_RX_SIZE", "64"},
    {"FI_OFI_RXM_TX_SIZE", "64"},
    {"FI_OFI_RXM_MSG_RX_SIZE", "16"},
    {"FI_OFI_RXM_MSG_TX_SIZE", "128"},
    {"FI_OFI_RXM_USE_SRX", "0"},
    // An endpoint here has one peer. For 256 of them ofi_rxm wants a completion queue of more
    // entries than soft-RoCE has.
    {"FI_UNIVERSE_SIZE", "4"},
    // A registration that is closed ends at once, and no call of the C library is intercepted.
    {"FI_MR_CACHE_MAX_COUNT", "0"},
}};

// Open for the life of the process.
class Fabrics {
 public:
  Fabrics() : handle_(open()) {
    if (handle_ == nullptr) problem_ = dlerror();
    for (const char* call : kOfiCalls) {
      if (problem_.empty() && find(call) == nullptr) {
        problem_ = fmt::format("libfabric.so.1 here has no {}", call);
      }
    }
    if (!problem_.empty()) {
      problem_ += ": install libfabric 1.14 or later (libfabric1), or use the transport tcp";
    }
  }

  const std::string& problem() const { return problem_; }
  void* find(const char* call) const { return dlsym(handle_, call); }

 private:
  static void* open() {
    for (const auto& [name, value] : kOfiEnvironment) setenv(name, value, /*replace=*/0);
    return dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  }

  std::string problem_;
  void* const handle_;
};

const Fabrics& fabrics() {
  static const auto* const opened = new Fabrics;  // objects at the end of a process need it
  return *opened;
}

}  // namespace

const std::string& ofi_library_problem() { return fabrics().problem(); }

}  // namespace phub

// Weak, so that a test may have its own.
#define PHUB_OFI_FORWARD(RESULT, NAME, PARAMETERS, ARGUMENTS)                                  \
  extern "C" __attribute__((weak)) RESULT NAME PARAMETERS {                                    \
    static const auto call = reinterpret_cast<decltype(&(NAME))>(phub::fabrics().find(#NAME)); \
    return call ARGUMENTS;                                                                     \
  }
PHUB_OFI_CALLS(PHUB_OFI_FORWARD)
