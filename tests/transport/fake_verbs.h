// Stands in for libibverbs and librdmacm: devices whose completions, events and failures a test
// decides. Linked into a test, its functions come before those of the libraries. A worker that
// connects is answered at once, by nobody. What nobody tests (who transfers bytes) is not here.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "transport/verbs/devices.h"

namespace phub::fake {

struct Cq : ibv_cq {
  std::deque<ibv_wc> completions;
};

struct Device {
  explicit Device(std::string name);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // A port of the device, as choose_verbs_ports() would find it.
  VerbsPort port();
  void raise(ibv_event_type type, ibv_qp* qp = nullptr);
  void raise(ibv_event_type type, ibv_cq* cq);

  ibv_device device = {};
  ibv_context context = {};
  std::deque<ibv_async_event> events;
  std::function<void()> before_poll;  // of a completion queue
  std::function<void()> during_accept;
  int poll_result = 0;  // negative: what polls return
  int notify_error = 0, receive_error = 0, send_error = 0, accept_error = 0;
  int dma_buf_error = 0;  // of registering one
  std::vector<Cq*> cqs;   // alive
  std::vector<ibv_qp*> qps;
  std::deque<uint64_t> signaled;  // sends that are to have a completion
  uint32_t next_qp_num = 100;
  uint32_t receives_posted = 0;
};

// What the application and the libraries did, of all devices.
struct Calls {
  int fork_inits = 0, registrations = 0, registrations_before_fork_init = 0;
  int accepted = 0, rejected = 0, disconnected = 0;
  std::string last_rejection;
  struct DmaBuffer {
    uint64_t offset = 0;
    size_t bytes = 0;
    uint64_t address = 0;  // that peers know it by
    int access = 0;
  };
  std::vector<DmaBuffer> dma_bufs;  // registered
};
Calls& calls();

// An arrival on a queue pair: 32 bits behind a write.
void arrive(ibv_qp* qp, uint32_t imm);
// A completed send.
void complete_send(ibv_qp* qp, uint64_t wr_id);

// A request to connect to who listens on the device, with its private data; who accepts it makes a
// queue pair.
void request_connection(Device& device, std::vector<std::byte> private_data);
// An event of an accepted connection, or (without one) of who listens on the device.
void connection_event(Device& device, rdma_cm_event_type type, ibv_qp* qp = nullptr);

}  // namespace phub::fake
