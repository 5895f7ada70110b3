// The box's side of one job over shared memory, and the life of its incarnations.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/admission.h"
#include "transport/sealed_memory.h"
#include "transport/shm/endpoint.h"
#include "transport/shm/format.h"
#include "transport/transport.h"

namespace phub {

class ShmBoxLink;

// Everything that one incarnation of a rank has: all of it is new with the incarnation, so that the
// handles of an older one lead nowhere.
struct ShmIncarnation final : Incarnation {
  uint64_t gradients_offset = 0;
  SealedMemory gradients;  // read-only here
  SealedMemory rings;
  std::vector<ShmQueue> queues;  // by core

  // Wakes the worker. A pipe, not an eventfd: its ends are two open files, so a worker that makes
  // its end blocking and never reads cannot block a core's write. Both ends stay open here, so that
  // a dead worker is no SIGPIPE.
  Fd wake_read, wake_write;
  std::vector<Fd> doorbells;  // by core: eventfds that the worker writes; never read

  Fd socket;   // once connected
  Fd process;  // readable when the worker's process has ended
};

// The endpoint of a core, which has one queue.
class ShmCoreEndpoint final : public ShmEndpoint, public BoxEndpoint {
 public:
  ShmCoreEndpoint(ShmBoxLink& link, uint32_t core, uint32_t max_ranks);
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

 private:
  ShmBoxLink& link_;
  const uint32_t core_;
};

class ShmBoxLink final : public AdmissionLink {
 public:
  ShmBoxLink(Admissions& admissions, const std::string& address, const LinkLayout& layout);
  ~ShmBoxLink() override { revoke_all(); }

  std::span<std::byte> results() override;
  BoxEndpoint& endpoint(uint32_t core) override;
  std::span<const std::byte> slots(uint32_t rank) override;
  bool slots_belong_to_worker() const override { return true; }

  // Answers a worker that showed its ticket: sizes, offsets and descriptors. From then on the
  // socket is the incarnation's. Throws Error when the ticket was used, or they cannot be sent.
  void welcome(ShmIncarnation& incarnation, Fd& socket);

 private:
  std::unique_ptr<Incarnation> make(uint32_t rank) override;
  Offer open(Incarnation& incarnation) override;
  void disconnect(Incarnation& incarnation) override;
  HeldMemory memory_of(Incarnation& incarnation) override;
  void make_rings(ShmIncarnation& made) const;
  void send_welcome(const ShmIncarnation& incarnation, int socket) const;
  void watch_process(ShmIncarnation& incarnation, uint64_t id) const;

  const std::string address_;  // the path of the Unix socket
  const LinkLayout layout_;
  SealedMemory results_;
  std::vector<std::unique_ptr<ShmCoreEndpoint>> endpoints_;
};

}  // namespace phub
