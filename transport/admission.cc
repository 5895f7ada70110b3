#include "transport/admission.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/error.h"

namespace phub {

Incarnation& Admissions::find_ticket(std::string_view ticket) const {
  Incarnation* found = nullptr;
  for (const AdmissionLink* link : links) {
    for (uint32_t rank = 0; rank < link->max_ranks(); ++rank) {
      Incarnation* candidate = link->current(rank);
      if (candidate != nullptr && same_ticket(candidate->ticket, ticket)) found = candidate;
    }
  }
  if (found == nullptr) {
    fail(ErrorCode::kUnauthorized,
         "no incarnation has this ticket (it was replaced, or its job is gone); join again");
  }
  return *found;
}

void Admissions::watch(int fd, uint64_t id, uint32_t events) const {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail_system("epoll_ctl of a transport", errno);
  }
}

uint64_t Admissions::adopt(Incarnation& incarnation, int socket, uint32_t events) {
  const uint64_t id = next_id++;
  epoll_event event = {};
  event.events = events | EPOLLONESHOT;
  event.data.u64 = id;
  if (epoll_ctl(epoll.get(), EPOLL_CTL_MOD, socket, &event) != 0) {
    fail_system(fmt::format("epoll_ctl of rank {}", incarnation.rank), errno);
  }
  incarnation.socket_ids.push_back(id);
  return id;
}

void Admissions::end_connection(uint64_t id, std::vector<TransportEvent>& out) const {
  for (AdmissionLink* link : links) {
    for (uint32_t rank = 0; rank < link->max_ranks(); ++rank) {
      Incarnation* candidate = link->current(rank);
      if (candidate == nullptr) continue;
      const auto& ids = candidate->socket_ids;
      if (std::find(ids.begin(), ids.end(), id) != ids.end()) link->report_end(*candidate, out);
    }
  }
}

TransportEvent refusal_event(std::string_view transport, std::string_view peer, ErrorCode code,
                             std::string_view reason) {
  return {.kind = TransportEvent::kRefused,
          .reason = fmt::format("{}: a connection {} was refused: {}: {}", transport, peer,
                                name_of(code), reason)};
}

AdmissionLink::AdmissionLink(Admissions& admissions, uint32_t max_ranks)
    : admissions_(admissions), incarnations_(max_ranks), present_(max_ranks) {}

AdmissionLink::~AdmissionLink() { AdmissionLink::close(); }

void AdmissionLink::revoke_all() {
  for (uint32_t rank = 0; rank < max_ranks(); ++rank) {
    if (incarnations_[rank] != nullptr) revoke(rank);
  }
}

void AdmissionLink::close() {
  if (std::exchange(listed_, false)) std::erase(admissions_.links, this);
}

Offer AdmissionLink::admit(uint32_t rank, uint32_t incarnation) {
  if (rank >= max_ranks()) {
    fail(ErrorCode::kInvalid, "rank {}: this job has memory for {} ranks", rank, max_ranks());
  }
  PHUB_CHECK(incarnations_[rank] == nullptr);
  std::unique_ptr<Incarnation> admitted = make(rank);
  admitted->link = this;
  admitted->rank = rank;
  admitted->incarnation = incarnation;
  Offer offer = open_with_ticket(*admitted);
  if (!listed_) admissions_.links.push_back(this);
  listed_ = true;
  present_[rank].store(admitted.get(), std::memory_order_release);
  incarnations_[rank] = std::move(admitted);
  return offer;
}

Offer AdmissionLink::open_with_ticket(Incarnation& incarnation) {
  Offer offer = open(incarnation);
  offer.ticket = std::exchange(next_ticket_, {});
  if (offer.ticket.empty()) offer.ticket = admissions_.new_ticket();
  incarnation.ticket = offer.ticket;
  incarnation.ended = false;
  return offer;
}

Offer AdmissionLink::open_again(uint32_t rank) {
  PHUB_CHECK(rank < max_ranks() && incarnations_[rank] != nullptr);
  Incarnation& incarnation = *incarnations_[rank];
  PHUB_CHECK(incarnation.attached.load(std::memory_order_acquire) == 0);
  incarnation.ticket.clear();
  incarnation.socket_ids.clear();
  disconnect(incarnation);
  return open_with_ticket(incarnation);
}

BoxLink::HeldMemory AdmissionLink::revoke(uint32_t rank) {
  PHUB_CHECK(rank < max_ranks() && incarnations_[rank] != nullptr);
  Incarnation& incarnation = *incarnations_[rank];
  PHUB_CHECK(incarnation.attached.load(std::memory_order_acquire) == 0);
  present_[rank].store(nullptr, std::memory_order_relaxed);
  disconnect(incarnation);
  HeldMemory held = memory_of(incarnation);
  incarnations_[rank].reset();
  return held;
}

Incarnation& AdmissionLink::attach(uint32_t rank, uint32_t incarnation) {
  Incarnation& present = attached(rank);
  PHUB_CHECK(present.incarnation == incarnation);
  present.attached.fetch_add(1, std::memory_order_release);
  return present;
}

Incarnation& AdmissionLink::attached(uint32_t rank) const {
  PHUB_CHECK(rank < present_.size());
  Incarnation* present = present_[rank].load(std::memory_order_acquire);
  PHUB_CHECK(present != nullptr);
  return *present;
}

// The release pairs with the acquire in revoke(), which then sees all that the core has done.
void AdmissionLink::detach(uint32_t rank) {
  attached(rank).attached.fetch_sub(1, std::memory_order_release);
}

void AdmissionLink::report_end(Incarnation& incarnation, std::vector<TransportEvent>& out) {
  if (std::exchange(incarnation.ended, true)) return;
  out.push_back({TransportEvent::kDisconnected, this, incarnation.rank, incarnation.incarnation});
}

}  // namespace phub
