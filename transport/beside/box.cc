// The box's side: two transports, two links of each job, and one memory.
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/beside/endpoint.h"
#include "transport/beside/transport.h"
#include "transport/box_memory.h"
#include "transport/error.h"
#include "transport/tcp/transport.h"

namespace phub {
namespace {

class BesideBoxEndpoint final : public BesideEndpoint, public BoxEndpoint {
 public:
  BesideBoxEndpoint(BoxEndpoint& near, BoxEndpoint& network)
      : BesideEndpoint(near, network), box_near_(near), box_network_(network) {}
  void attach(uint32_t rank, uint32_t incarnation) override {
    box_network_.attach(rank, incarnation);
    box_near_.attach(rank, incarnation);
  }
  void detach(uint32_t rank) override {
    box_near_.detach(rank);
    box_network_.detach(rank);
  }

 private:
  BoxEndpoint& box_near_;
  BoxEndpoint& box_network_;
};

class BesideTransport final : public Transport {
 public:
  BesideTransport(std::unique_ptr<Transport> near, std::unique_ptr<Transport> network);

  std::string_view name() const override { return network_->name(); }
  std::string describe() const override {
    return network_->describe() + "; memory to workers of this host that choose auto";
  }
  std::vector<NicPort> ports() const override { return network_->ports(); }
  uint64_t nic_bytes_per_s() const override { return network_->nic_bytes_per_s(); }
  Windows windows() const override { return network_->windows(); }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override;
  int event_fd() const override { return epoll_.get(); }
  void handle_events(std::vector<TransportEvent>& out) override;

  void add(BoxLink* inner, BoxLink* outer) {
    const std::lock_guard lock(mutex_);
    outer_[inner] = outer;
  }
  void remove(BoxLink* inner) {
    const std::lock_guard lock(mutex_);
    outer_.erase(inner);
  }

 private:
  const std::unique_ptr<Transport> near_, network_;
  Fd epoll_;
  std::mutex mutex_;                    // guards the next one
  std::map<BoxLink*, BoxLink*> outer_;  // of both transports' links
};

class BesideBoxLink final : public BoxLink {
 public:
  BesideBoxLink(BesideTransport& transport, std::unique_ptr<BoxLink> near,
                std::unique_ptr<BoxLink> network, const LinkLayout& layout)
      : transport_(transport),
        near_(std::move(near)),
        network_(std::move(network)),
        ended_(layout.max_ranks) {
    transport_.add(near_.get(), this);
    transport_.add(network_.get(), this);
    for (uint32_t core = 0; core < layout.cores; ++core) {
      endpoints_.push_back(
          std::make_unique<BesideBoxEndpoint>(near_->endpoint(core), network_->endpoint(core)));
    }
  }
  ~BesideBoxLink() override {
    transport_.remove(near_.get());
    transport_.remove(network_.get());
  }
  BesideBoxLink(const BesideBoxLink&) = delete;
  BesideBoxLink& operator=(const BesideBoxLink&) = delete;

  std::span<std::byte> results() override { return network_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override { return *endpoints_[core]; }
  void prepare(uint32_t rank) override { network_->prepare(rank); }
  Offer admit(uint32_t rank, uint32_t incarnation) override {
    Offer offer = network_->admit(rank, incarnation);
    near_->use_ticket(offer.ticket);
    try {
      add_near(offer, near_->admit(rank, incarnation));
    } catch (...) {
      network_->revoke(rank);
      throw;
    }
    return offer;
  }
  void use_ticket(std::string ticket) override { network_->use_ticket(std::move(ticket)); }
  std::span<const std::byte> slots(uint32_t rank) override { return network_->slots(rank); }
  HeldMemory revoke(uint32_t rank) override {
    return std::make_shared<std::pair<HeldMemory, HeldMemory>>(near_->revoke(rank),
                                                               network_->revoke(rank));
  }
  void close() override {
    near_->close();
    network_->close();
  }
  bool slots_belong_to_worker() const override { return false; }
  bool can_reconnect() const override { return network_->can_reconnect(); }
  Offer reconnect(uint32_t rank) override {
    Offer offer = network_->reconnect(rank);
    near_->use_ticket(offer.ticket);
    add_near(offer, near_->reconnect(rank));
    ended_[rank] = 0;
    return offer;
  }

  // Whether this is the first end of one of the incarnation's connections.
  bool ends(uint32_t rank, uint32_t incarnation) {
    const bool first = incarnation > ended_[rank];
    ended_[rank] = std::max(ended_[rank], incarnation);
    return first;
  }

 private:
  static void add_near(Offer& offer, const Offer& near) {
    for (size_t q = 0; q < offer.queues.size(); ++q) offer.queues[q].near = near.queues[q].near;
  }

  BesideTransport& transport_;
  const std::unique_ptr<BoxLink> near_, network_;
  std::vector<uint32_t> ended_;  // by rank: the latest incarnation that had an end; control thread
  std::vector<std::unique_ptr<BesideBoxEndpoint>> endpoints_;  // by core
};

BesideTransport::BesideTransport(std::unique_ptr<Transport> near,
                                 std::unique_ptr<Transport> network)
    : near_(std::move(near)), network_(std::move(network)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) fail_system("epoll_create1 of a transport", errno);
  for (const int fd : {near_->event_fd(), network_->event_fd()}) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      fail_system("epoll_ctl of a transport", errno);
    }
  }
}

std::unique_ptr<BoxLink> BesideTransport::open_job(const LinkLayout& layout) {
  const auto memory = std::make_shared<const BoxMemory>(layout, name());
  auto network = network_->open_job_in(memory, layout);
  return std::make_unique<BesideBoxLink>(*this, near_->open_job_in(memory, layout),
                                         std::move(network), layout);
}

void BesideTransport::handle_events(std::vector<TransportEvent>& out) {
  std::vector<TransportEvent> events;
  near_->handle_events(events);
  network_->handle_events(events);
  const std::lock_guard lock(mutex_);
  for (TransportEvent& event : events) {
    if (event.link != nullptr) {
      const auto at = outer_.find(event.link);
      if (at == outer_.end()) continue;
      event.link = at->second;
      auto& link = static_cast<BesideBoxLink&>(*event.link);
      if (event.kind == TransportEvent::kDisconnected &&
          !link.ends(event.rank, event.incarnation)) {
        continue;
      }
    }
    out.push_back(std::move(event));
  }
}

}  // namespace

std::unique_ptr<Transport> make_beside(std::unique_ptr<Transport> network) {
  std::unique_ptr<Transport> near;
  try {
    near = make_tcp_transport({.only_near = true});
  } catch (const Error&) {
    return network;
  }
  return std::make_unique<BesideTransport>(std::move(near), std::move(network));
}

}  // namespace phub
