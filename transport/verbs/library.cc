#include "transport/verbs/library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <array>
#include <cerrno>
#include <string_view>
#include <type_traits>

#undef ibv_query_port

// What phub calls: result, name, parameters, and how they are handed on. The compiler holds them
// against the headers.
#define PHUB_VERBS_CALLS(CALL)                                                                     \
  CALL(int, ibv_fork_init, (), ())                                                                 \
  CALL(const char*, ibv_get_device_name, (ibv_device * a), (a))                                    \
  CALL(int, ibv_query_device, (ibv_context * a, ibv_device_attr * b), (a, b))                      \
  CALL(int, ibv_query_port, (ibv_context * a, uint8_t b, _compat_ibv_port_attr * c), (a, b, c))    \
  CALL(int, ibv_query_gid, (ibv_context * a, uint8_t b, int c, ibv_gid* d), (a, b, c, d))          \
  CALL(int, ibv_get_async_event, (ibv_context * a, ibv_async_event * b), (a, b))                   \
  CALL(void, ibv_ack_async_event, (ibv_async_event * a), (a))                                      \
  CALL(ibv_pd*, ibv_alloc_pd, (ibv_context * a), (a))                                              \
  CALL(int, ibv_dealloc_pd, (ibv_pd * a), (a))                                                     \
  CALL(ibv_mr*, ibv_reg_mr, (ibv_pd * a, void* b, size_t c, int d), (a, b, c, d))                  \
  CALL(ibv_mr*, ibv_reg_mr_iova2, (ibv_pd * a, void* b, size_t c, uint64_t d, unsigned e),         \
       (a, b, c, d, e))                                                                            \
  CALL(ibv_mr*, ibv_reg_dmabuf_mr, (ibv_pd * a, uint64_t b, size_t c, uint64_t d, int e, int f),   \
       (a, b, c, d, e, f))                                                                         \
  CALL(int, ibv_dereg_mr, (ibv_mr * a), (a))                                                       \
  CALL(ibv_comp_channel*, ibv_create_comp_channel, (ibv_context * a), (a))                         \
  CALL(int, ibv_destroy_comp_channel, (ibv_comp_channel * a), (a))                                 \
  CALL(ibv_cq*, ibv_create_cq, (ibv_context * a, int b, void* c, ibv_comp_channel* d, int e),      \
       (a, b, c, d, e))                                                                            \
  CALL(int, ibv_destroy_cq, (ibv_cq * a), (a))                                                     \
  CALL(int, ibv_get_cq_event, (ibv_comp_channel * a, ibv_cq * *b, void** c), (a, b, c))            \
  CALL(void, ibv_ack_cq_events, (ibv_cq * a, unsigned b), (a, b))                                  \
  CALL(ibv_srq*, ibv_create_srq, (ibv_pd * a, ibv_srq_init_attr * b), (a, b))                      \
  CALL(int, ibv_destroy_srq, (ibv_srq * a), (a))                                                   \
  CALL(int, ibv_modify_qp, (ibv_qp * a, ibv_qp_attr * b, int c), (a, b, c))                        \
  CALL(int, ibv_query_qp, (ibv_qp * a, ibv_qp_attr * b, int c, ibv_qp_init_attr* d), (a, b, c, d)) \
  CALL(ibv_context**, rdma_get_devices, (int* a), (a))                                             \
  CALL(rdma_event_channel*, rdma_create_event_channel, (), ())                                     \
  CALL(void, rdma_destroy_event_channel, (rdma_event_channel * a), (a))                            \
  CALL(int, rdma_get_cm_event, (rdma_event_channel * a, rdma_cm_event * *b), (a, b))               \
  CALL(int, rdma_ack_cm_event, (rdma_cm_event * a), (a))                                           \
  CALL(const char*, rdma_event_str, (rdma_cm_event_type a), (a))                                   \
  CALL(int, rdma_create_id, (rdma_event_channel * a, rdma_cm_id * *b, void* c, rdma_port_space d), \
       (a, b, c, d))                                                                               \
  CALL(int, rdma_destroy_id, (rdma_cm_id * a), (a))                                                \
  CALL(int, rdma_set_option, (rdma_cm_id * a, int b, int c, void* d, size_t e), (a, b, c, d, e))   \
  CALL(int, rdma_bind_addr, (rdma_cm_id * a, sockaddr * b), (a, b))                                \
  CALL(__be16, rdma_get_src_port, (rdma_cm_id * a), (a))                                           \
  CALL(int, rdma_listen, (rdma_cm_id * a, int b), (a, b))                                          \
  CALL(int, rdma_resolve_addr, (rdma_cm_id * a, sockaddr * b, sockaddr * c, int d), (a, b, c, d))  \
  CALL(int, rdma_resolve_route, (rdma_cm_id * a, int b), (a, b))                                   \
  CALL(int, rdma_create_qp, (rdma_cm_id * a, ibv_pd * b, ibv_qp_init_attr * c), (a, b, c))         \
  CALL(void, rdma_destroy_qp, (rdma_cm_id * a), (a))                                               \
  CALL(int, rdma_connect, (rdma_cm_id * a, rdma_conn_param * b), (a, b))                           \
  CALL(int, rdma_accept, (rdma_cm_id * a, rdma_conn_param * b), (a, b))                            \
  CALL(int, rdma_reject, (rdma_cm_id * a, const void* b, uint8_t c), (a, b, c))                    \
  CALL(int, rdma_disconnect, (rdma_cm_id * a), (a))

#undef ibv_reg_mr

namespace phub {
namespace {

#define PHUB_NAME(RESULT, NAME, PARAMETERS, ARGUMENTS) #NAME,
constexpr std::array kCalls = {PHUB_VERBS_CALLS(PHUB_NAME)};
#undef PHUB_NAME
constexpr std::string_view kMayBeMissing = "ibv_reg_dmabuf_mr";  // before rdma-core 34

// Both, for the life of the process.
class Libraries {
 public:
  Libraries() : verbs_(open("libibverbs.so.1")), rdmacm_(open("librdmacm.so.1")) {
    for (const char* call : kCalls) {
      if (problem_.empty() && call != kMayBeMissing && find(call) == nullptr) {
        problem_ = fmt::format("libibverbs.so.1 and librdmacm.so.1 here have no {}", call);
      }
    }
    if (!problem_.empty()) {
      problem_ +=
          ": install rdma-core 28 or later (libibverbs1, ibverbs-providers, librdmacm1), "
          "or use the transport tcp";
    }
  }

  const std::string& problem() const { return problem_; }
  // Null: neither has it.
  void* find(const char* call) const {
    void* found = verbs_ == nullptr ? nullptr : dlsym(verbs_, call);
    return found != nullptr || rdmacm_ == nullptr ? found : dlsym(rdmacm_, call);
  }

 private:
  void* open(const char* name) {
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr && problem_.empty()) problem_ = dlerror();
    return handle;
  }

  std::string problem_;
  void* const verbs_;
  void* const rdmacm_;
};

const Libraries& libraries() {
  static const auto* const opened = new Libraries;  // objects at the end of a process need them
  return *opened;
}

// What a call returns that the libraries do not have.
template <typename Result>
Result missing() {
  errno = ENOSYS;
  if constexpr (std::is_integral_v<Result>) return static_cast<Result>(ENOSYS);
  if constexpr (std::is_pointer_v<Result>) return nullptr;
}

}  // namespace

const std::string& verbs_library_problem() { return libraries().problem(); }

}  // namespace phub

// Weak, so that a test may have its own.
#define PHUB_FORWARD(RESULT, NAME, PARAMETERS, ARGUMENTS)                                        \
  extern "C" __attribute__((weak)) RESULT NAME PARAMETERS {                                      \
    static const auto call = reinterpret_cast<decltype(&(NAME))>(phub::libraries().find(#NAME)); \
    if (call == nullptr) return phub::missing<RESULT>();                                         \
    return call ARGUMENTS;                                                                       \
  }
PHUB_VERBS_CALLS(PHUB_FORWARD)
