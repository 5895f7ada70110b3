#include "transport/ofi/box.h"

#include <sys/epoll.h>

#include <utility>

#include "transport/error.h"
#include "transport/tcp/socket.h"

namespace phub {

void OfiCoreEndpoint::attach(uint32_t rank, uint32_t incarnation) {
  link_.attach(rank, incarnation);
  for (uint32_t q = 0; q < queues_; ++q) {
    list({q, rank});
    connection_announced({q, rank});  // if it is there already
  }
}

void OfiCoreEndpoint::connection_announced(QueuePair pair) {
  const OfiConnected connected = link_.connected(pair.rank, first_queue_ + pair.queue);
  if (connected.socket >= 0) open(pair, connected);
}

void OfiCoreEndpoint::detach(uint32_t rank) {
  for (uint32_t q = 0; q < queues_; ++q) {
    close({q, rank});
    link_.fence(rank, first_queue_ + q);
  }
  link_.detach(rank);
}

OfiBoxLink::OfiBoxLink(Admissions& admissions, const OfiPlaces& places,
                       std::shared_ptr<const BoxMemory> memory, const LinkLayout& layout)
    : AdmissionLink(admissions, checked(layout, "ofi").max_ranks),
      places_(places),
      layout_(layout),
      queues_(static_cast<uint32_t>(layout.queue_chunks.size())),
      memory_(std::move(memory)) {
  if (queues_ > kOfiMaxQueues) {
    fail(ErrorCode::kInvalid, "ofi job: {} queues, at most {} are possible", queues_,
         kOfiMaxQueues);
  }
  open_domains();
  uint32_t queue = 0;
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    const uint32_t first = queue;
    while (queue < queues_ && layout_.core_of(queue) == core) ++queue;
    endpoints_.push_back(std::make_unique<OfiCoreEndpoint>(*this, first, queue - first, layout_));
  }
}

// A provider may move the bytes of all endpoints of a domain whenever one of them is polled. So
// each core gets domains of its own, except where a domain's registrations lock memory.
void OfiBoxLink::open_domains() {
  for (uint32_t core = 0; core < layout_.cores; ++core) {
    auto& of_core = domains_.emplace_back();
    for (size_t place = 0; place < places_.hosts.size(); ++place) {
      const bool shares = core > 0 && !domains_[0][place]->registers_freely();
      of_core.push_back(
          shares ? domains_[0][place]
                 : std::make_shared<const OfiDomain>(places_.provider, places_.hosts[place]));
    }
  }
}

BoxEndpoint& OfiBoxLink::endpoint(uint32_t core) {
  PHUB_CHECK(core < endpoints_.size());
  return *endpoints_[core];
}

std::unique_ptr<Incarnation> OfiBoxLink::make(uint32_t) {
  return std::make_unique<OfiIncarnation>();
}

// Neighbouring queues of a rank, and equal queues of neighbouring ranks, get different addresses.
Offer OfiBoxLink::open(Incarnation& opened) {
  auto& incarnation = static_cast<OfiIncarnation&>(opened);
  Offer offer = {.transport = "ofi"};
  std::vector<OfiConnection> queues(queues_);
  for (uint32_t q = 0; q < queues_; ++q) {
    const size_t place = place_of(incarnation.rank, q);
    queues[q].pair =
        std::make_unique<OfiPair>(domains_[layout_.core_of(q)][place], memory_->results(),
                                  memory_->slots(incarnation.rank), layout_.queue_chunks[q]);
    offer.queues.push_back({.address = places_.addresses[place], .provider = places_.provider});
  }
  incarnation.queues = std::move(queues);
  return offer;
}

std::span<const std::byte> OfiBoxLink::slots(uint32_t rank) {
  PHUB_CHECK(rank < layout_.max_ranks && current(rank) != nullptr);
  return memory_->slots(rank);
}

// Closing a socket removes it from both epolls: nobody else has it open. The slots stay.
void OfiBoxLink::disconnect(Incarnation& incarnation) {
  static_cast<OfiIncarnation&>(incarnation).queues.clear();
}

OfiConnected OfiBoxLink::connected(uint32_t rank, uint32_t queue) const {
  OfiConnection& connection = static_cast<OfiIncarnation&>(attached(rank)).queues[queue];
  if (!connection.handed_over.load(std::memory_order_acquire)) return {};
  return {connection.socket.get(), connection.pair.get()};
}

void OfiBoxLink::fence(uint32_t rank, uint32_t queue) const {
  static_cast<OfiIncarnation&>(attached(rank)).queues[queue].pair->close();
}

void OfiBoxLink::welcome(OfiIncarnation& incarnation, const OfiHello& hello, Fd& socket) {
  check_ofi_hello(hello, layout_);
  const uint32_t queue = hello.queue - layout_.first_queue;
  OfiConnection& connection = incarnation.queues[queue];
  if (connection.socket) {
    fail(ErrorCode::kUnauthorized, "rank {}: this ticket was used already for queue {}; join again",
         incarnation.rank, hello.queue);
  }
  tune(socket.get());
  connection.pair->connect(hello.results);
  OfiCoreEndpoint& core = *endpoints_[layout_.core_of(queue)];
  const QueuePair pair = core.pair_of(incarnation.rank, queue);
  core.watch(socket.get(), pair);
  // The socket stays open until revoke() or reconnect(), which the cores come before.
  admissions_.adopt(incarnation, socket.get(), EPOLLRDHUP);
  OfiWelcome answer;
  answer.rank = incarnation.rank;
  answer.incarnation = incarnation.incarnation;
  answer.slots = connection.pair->here();
  const int error = send_greeting(socket.get(), std::as_bytes(std::span(&answer, 1)));
  if (error != 0) fail_system(fmt::format("answering rank {}", incarnation.rank), error);

  connection.socket = std::move(socket);
  connection.handed_over.store(true, std::memory_order_release);
  core.announce(connection.socket.get(), pair);
}

}  // namespace phub
