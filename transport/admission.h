// Admission at the box, the same for every transport: incarnations of ranks, their tickets, and
// which of them the cores have attached.
//
//   control thread                           core
//   admit(): memory, queue pairs, ticket ──▶ attach(): polls the incarnation
//   a worker shows the ticket: its
//   connection is handed to the core
//   revoke(), reconnect() ◀───────────────── detach(): nothing of it arrives any more
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/fd.h"
#include "transport/greeting.h"
#include "transport/transport.h"

namespace phub {

class AdmissionLink;

// The box's part of one incarnation of a rank; each transport adds its own. Control thread only,
// except for `attached` and for members that the transport hands over to the cores.
struct Incarnation {
  Incarnation() = default;
  Incarnation(const Incarnation&) = delete;
  Incarnation& operator=(const Incarnation&) = delete;
  virtual ~Incarnation() = default;

  AdmissionLink* link = nullptr;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string ticket;
  std::vector<uint64_t> socket_ids;    // ids of the connections that showed the ticket
  bool ended = false;                  // the end of a connection was reported
  std::atomic<uint32_t> attached = 0;  // cores
};

// The state that a transport and its links share. Control thread only.
struct Admissions {
  Fd epoll;  // an event's data is the id of a connection
  uint64_t next_id = 1;
  std::vector<AdmissionLink*> links;  // from their first rank on
  std::function<std::string()> new_ticket = make_ticket;

  // The incarnation that has the ticket, in a time that does not depend on the ticket's digits.
  // Throws Error(kUnauthorized).
  Incarnation& find_ticket(std::string_view ticket) const;
  // Throws Error when the kernel has no room for another watch.
  void watch(int fd, uint64_t id, uint32_t events) const;
  // Gives a watched socket to the incarnation: from now on each event of it is the end of the
  // connection. It gets a new id, which is returned; pending events with the old id are ignored.
  uint64_t adopt(Incarnation& incarnation, int socket, uint32_t events);
  // Reports the end of the connection with this id, once for an incarnation.
  void end_connection(uint64_t id, std::vector<TransportEvent>& out) const;
};

// Makes the event of a refusal, for the server's log. `peer`: "from 10.0.0.2:4711", "of process
// 123".
TransportEvent refusal_event(std::string_view transport, std::string_view peer, ErrorCode code,
                             std::string_view reason);

// The box's side of a job: the life of its incarnations.
class AdmissionLink : public BoxLink {
 public:
  Offer admit(uint32_t rank, uint32_t incarnation) final;
  HeldMemory revoke(uint32_t rank) final;
  void use_ticket(std::string ticket) final { next_ticket_ = std::move(ticket); }
  void close() override;

  // A core's endpoint calls these on its thread, for the incarnation that it attaches, until it
  // detaches.
  Incarnation& attach(uint32_t rank, uint32_t incarnation);
  Incarnation& attached(uint32_t rank) const;
  void detach(uint32_t rank);

  // Control thread.
  uint32_t max_ranks() const { return static_cast<uint32_t>(incarnations_.size()); }
  Incarnation* current(uint32_t rank) const { return incarnations_[rank].get(); }
  void report_end(Incarnation& incarnation, std::vector<TransportEvent>& out);

 protected:
  AdmissionLink(Admissions& admissions, uint32_t max_ranks);
  ~AdmissionLink() override;
  void revoke_all();  // for the destructors of links, not ours: disconnect() is theirs

  // The memory of a new incarnation. An exception leaves nothing behind.
  virtual std::unique_ptr<Incarnation> make(uint32_t rank) = 0;
  // Queue pairs that nobody has connected yet, and where to connect them; admit() adds the ticket.
  virtual Offer open(Incarnation& incarnation) = 0;
  // Closes the connections of an incarnation that no core has attached.
  virtual void disconnect(Incarnation& incarnation) = 0;
  // Returns its memory, for revoke().
  virtual HeldMemory memory_of(Incarnation& /*incarnation*/) { return nullptr; }

  // For reconnect() of transports that can: new queue pairs and a new ticket, the same memory.
  Offer open_again(uint32_t rank);

  Admissions& admissions_;

 private:
  Offer open_with_ticket(Incarnation& incarnation);

  bool listed_ = false;                                     // in admissions_
  std::string next_ticket_;                                 // empty: a new one
  std::vector<std::unique_ptr<Incarnation>> incarnations_;  // by rank
  std::vector<std::atomic<Incarnation*>> present_;          // the same, for the cores
};

}  // namespace phub
