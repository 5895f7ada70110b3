// Owners of the objects of libibverbs and librdmacm. Every error names the call, the device and the
// way out.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/error.h"
#include "transport/memory_device.h"

namespace phub {

template <auto kDestroy>
struct VerbsDeleter {
  template <typename T>
  void operator()(T* object) const {
    kDestroy(object);
  }
};
using VerbsPd = std::unique_ptr<ibv_pd, VerbsDeleter<ibv_dealloc_pd>>;
using VerbsMr = std::unique_ptr<ibv_mr, VerbsDeleter<ibv_dereg_mr>>;
using VerbsCq = std::unique_ptr<ibv_cq, VerbsDeleter<ibv_destroy_cq>>;
using VerbsSrq = std::unique_ptr<ibv_srq, VerbsDeleter<ibv_destroy_srq>>;
using VerbsCompChannel = std::unique_ptr<ibv_comp_channel, VerbsDeleter<ibv_destroy_comp_channel>>;
using VerbsEventChannel =
    std::unique_ptr<rdma_event_channel, VerbsDeleter<rdma_destroy_event_channel>>;

// A connection with its queue pair, which goes with it. Acknowledge its events before.
struct VerbsIdDeleter {
  void operator()(rdma_cm_id* id) const {
    if (id->qp != nullptr) rdma_destroy_qp(id);
    rdma_destroy_id(id);
  }
};
using VerbsId = std::unique_ptr<rdma_cm_id, VerbsIdDeleter>;

inline const char* device_name(ibv_context* context) {
  return ibv_get_device_name(context->device);
}

// "ibv_create_cq of 4096 entries on mlx5_0: Cannot allocate memory", Error(kFull).
[[noreturn]] void fail_verbs(ibv_context* context, const std::string& call, int error);

// `access`: IBV_ACCESS_…; 0 for memory that is only sent from.
VerbsMr register_memory(ibv_pd* pd, std::span<const std::byte> memory, int access);

// Memory of a device as the kernel's DMA buffer, which peers address as if it began at `memory`.
// Throws Error(kInvalid) if the NIC, its driver or the library cannot.
VerbsMr register_dma_buf(ibv_pd* pd, const DmaBuf& buffer, std::span<const std::byte> memory,
                         int access);
// The reason why no memory of a GPU can be registered with the NIC, whatever the GPU; empty: it
// can. Asks the driver.
std::string dma_buf_problem(ibv_context* context);

// Throws Error(kFull) with the way out when `bytes` more of locked memory exceed the limit of this
// process. `what` names their user.
void check_locked_memory(uint64_t bytes, const std::string& what);

void make_nonblocking(int fd);

// Before anything else of libibverbs and librdmacm, which it opens: throws Error(kUnavailable) if
// they are not there (library.h). Then a process may fork() (a data loader does) without its
// children taking registered pages away from the NIC. If a kernel copies such pages at the fork
// this changes nothing; else children do not see registered memory at all. Any thread, any number
// of times.
void prepare_verbs();
// For people, where that failed: "; fork() is not safe: …". Usually empty.
std::string fork_problem();

}  // namespace phub
