#include "transport/switch/library.h"

#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <array>

// As transport/ofi/library.cc does it.
#define PHUB_BPF_CALLS(CALL)                                                                   \
  CALL(bpf_object*, bpf_object__open_mem,                                                      \
       (const void* a, size_t b, const bpf_object_open_opts* c), (a, b, c))                    \
  CALL(int, bpf_object__load, (bpf_object * a), (a))                                           \
  CALL(void, bpf_object__close, (bpf_object * a), (a))                                         \
  CALL(bpf_map*, bpf_object__find_map_by_name, (const bpf_object* a, const char* b), (a, b))   \
  CALL(bpf_program*, bpf_object__find_program_by_name, (const bpf_object* a, const char* b),   \
       (a, b))                                                                                 \
  CALL(int, bpf_map__set_max_entries, (bpf_map * a, __u32 b), (a, b))                          \
  CALL(int, bpf_map__fd, (const bpf_map* a), (a))                                              \
  CALL(int, bpf_map_update_elem, (int a, const void* b, const void* c, __u64 d), (a, b, c, d)) \
  CALL(int, bpf_map_lookup_elem, (int a, const void* b, void* c), (a, b, c))                   \
  CALL(int, bpf_program__fd, (const bpf_program* a), (a))                                      \
  CALL(bpf_link*, bpf_program__attach_xdp, (const bpf_program* a, int b), (a, b))              \
  CALL(int, bpf_link__destroy, (bpf_link * a), (a))                                            \
  CALL(int, bpf_prog_test_run_opts, (int a, bpf_test_run_opts* b), (a, b))                     \
  CALL(int, libbpf_num_possible_cpus, (), ())                                                  \
  CALL(libbpf_print_fn_t, libbpf_set_print, (libbpf_print_fn_t a), (a))

namespace phub {
namespace {

#define PHUB_BPF_NAME(RESULT, NAME, PARAMETERS, ARGUMENTS) #NAME,
constexpr std::array kBpfCalls = {PHUB_BPF_CALLS(PHUB_BPF_NAME)};
#undef PHUB_BPF_NAME

// Open for the life of the process.
class Library {
 public:
  Library() : handle_(dlopen("libbpf.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) problem_ = dlerror();
    for (const char* call : kBpfCalls) {
      if (problem_.empty() && find(call) == nullptr) {
        problem_ = fmt::format("libbpf.so.1 here has no {}", call);
      }
    }
    if (!problem_.empty()) problem_ += ": install libbpf 1.1 or later (libbpf1)";
  }

  const std::string& problem() const { return problem_; }
  void* find(const char* call) const { return dlsym(handle_, call); }

 private:
  std::string problem_;
  void* const handle_;
};

const Library& library() {
  static const auto* const opened = new Library;  // objects at the end of a process need it
  return *opened;
}

}  // namespace

const std::string& bpf_library_problem() { return library().problem(); }

}  // namespace phub

#define PHUB_BPF_FORWARD(RESULT, NAME, PARAMETERS, ARGUMENTS)                                  \
  extern "C" RESULT NAME PARAMETERS {                                                          \
    static const auto call = reinterpret_cast<decltype(&(NAME))>(phub::library().find(#NAME)); \
    return call ARGUMENTS;                                                                     \
  }
PHUB_BPF_CALLS(PHUB_BPF_FORWARD)
