// The box's side of one job over shared memory, and the life of its incarnations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/nic.h"
#include "transport/shm_endpoint.h"
#include "transport/shm_format.h"
#include "transport/shm_memory.h"

namespace phub {

class ShmBoxLink;

// What the NIC and its links share. Control thread only.
struct ShmRegistry {
  std::string address;             // of the Unix socket
  ShmFd epoll;                     // of the NIC; an event's data is an id
  std::vector<ShmBoxLink*> links;  // from their first rank on
  uint64_t next_id = 1;            // of connections, for the lifetime of the NIC
};

// Everything that one incarnation of a rank has: all of it is new with the incarnation, so that
// what an older one still holds leads nowhere.
struct ShmIncarnation {
  uint64_t id = 0;  // of its connection, in the NIC's epoll
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string ticket;
  bool ticket_used = false;

  uint64_t gradients_offset = 0;
  ShmMemory gradients;  // read-only here
  ShmMemory rings;
  std::vector<ShmQueue> queues;  // by core

  // Wakes the worker. A pipe, not an eventfd: its ends are two open files, so a worker that makes
  // its end blocking and never reads cannot block a core's write. Both ends stay open here, so that
  // a dead worker is no SIGPIPE.
  ShmFd wake_read, wake_write;
  std::vector<ShmFd> doorbells;  // by core: eventfds that the worker writes; never read

  ShmFd socket;                        // once connected
  ShmFd process;                       // readable when the worker's process has ended
  std::atomic<uint32_t> attached = 0;  // cores
};

// The endpoint of a core: at the box, queue pair == rank.
class ShmCoreEndpoint final : public ShmEndpoint {
 public:
  ShmCoreEndpoint(const ShmBoxLink& link, uint32_t core, uint32_t max_ranks);
  void attach(uint32_t rank, uint32_t incarnation) override;
  void detach(uint32_t rank) override;

 private:
  const ShmBoxLink& link_;
  const uint32_t core_;
  std::vector<ShmIncarnation*> attached_;  // by rank
};

class ShmBoxLink final : public BoxLink {
 public:
  ShmBoxLink(ShmRegistry& registry, const LinkLayout& layout);
  ~ShmBoxLink() override;

  std::span<std::byte> egress() override;
  Endpoint& endpoint(uint32_t core) override;
  Offer admit(uint32_t rank, uint32_t incarnation) override;
  std::span<const std::byte> ingress(uint32_t rank) override;
  Rest revoke(uint32_t rank) override;
  void close() override;
  bool slots_belong_to_worker() const override { return true; }

  // For the cores' endpoints: the present incarnation of the rank, or nullptr. Any thread.
  ShmIncarnation* present(uint32_t rank) const;

  // For the NIC. The incarnation that the ticket, or the connection, belongs to, or nullptr.
  // The time that find_ticket takes does not depend on the ticket's digits.
  ShmIncarnation* find_ticket(std::string_view ticket);
  ShmIncarnation* find_connection(uint64_t id);
  // Answers a worker that showed its ticket: sizes, offsets and descriptors. From then on
  // the ticket is used and the socket is the incarnation's. Throws Error when they cannot be sent.
  void welcome(ShmIncarnation& incarnation, ShmFd& socket);

 private:
  std::unique_ptr<ShmIncarnation> make(uint32_t rank, uint32_t incarnation) const;
  void make_rings(ShmIncarnation& made) const;
  void list();  // in the registry, before a rank is kept: what throws leaves no rank behind

  ShmRegistry& registry_;
  bool listed_ = false;  // in the registry
  const LinkLayout layout_;
  ShmMemory results_;
  std::vector<std::unique_ptr<ShmCoreEndpoint>> endpoints_;
  std::vector<std::unique_ptr<ShmIncarnation>> incarnations_;  // by rank
  std::vector<std::atomic<ShmIncarnation*>> present_;          // the same, for the cores
};

}  // namespace phub
