// A worker without manners: speaks the socket's protocol by hand, holds the descriptors and writes
// what it likes into the shared memory. For tests of what the box puts up with.
#pragma once

#include <poll.h>
#include <sys/mman.h>

#include <cstring>
#include <span>
#include <vector>

#include "transport/sealed_memory.h"
#include "transport/shm/format.h"
#include "transport/shm/socket.h"
#include "transport/transport.h"

namespace phub {

class RawWorker {
 public:
  // REQUIRES: the NIC has not accepted yet; handle its events between this and receive().
  explicit RawWorker(const Offer& offer) : socket_(connect_to(offer.address, 1000)) {
    ShmHello hello;
    std::memcpy(hello.ticket.data(), offer.ticket.data(), hello.ticket.size());
    send_message(socket_.get(), std::as_bytes(std::span(&hello, 1)));
  }
  ~RawWorker() {
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  }

  // Takes the answer; false if there is none within a second.
  bool receive() {
    pollfd readable = {socket_.get(), POLLIN, 0};
    if (::poll(&readable, 1, 1000) != 1) return false;
    UnixMessage received = receive_message(socket_.get(), 1 << 16);
    if (received.error != 0 || received.bytes.empty()) return false;
    greeting_ = parse_shm_greeting(received.bytes);
    fds_ = std::move(received.fds);
    rings_bytes_ = greeting_.welcome.rings_file_bytes;
    void* rings = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fds_[2].get(), 0);
    rings_ = rings == MAP_FAILED ? nullptr : static_cast<std::byte*>(rings);
    return rings_ != nullptr;
  }

  int socket() const { return socket_.get(); }
  const ShmGreeting& greeting() const { return greeting_; }
  const Fd& results() const { return fds_[0]; }
  const Fd& gradients() const { return fds_[1]; }
  const Fd& rings() const { return fds_[2]; }
  const Fd& wake() const { return fds_[3]; }
  const Fd& doorbell(uint32_t queue) const { return fds_[kShmFixedFds + queue]; }
  ShmRing& to_box(uint32_t queue) { return ring(greeting_.queues[queue].to_box_offset); }
  ShmRing& to_worker(uint32_t queue) { return ring(greeting_.queues[queue].to_worker_offset); }

 private:
  ShmRing& ring(uint64_t offset) { return *reinterpret_cast<ShmRing*>(rings_ + offset); }

  Fd socket_;
  ShmGreeting greeting_;
  std::vector<Fd> fds_;
  std::byte* rings_ = nullptr;
  size_t rings_bytes_ = 0;
};

}  // namespace phub
