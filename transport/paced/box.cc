// The box's transport whose NICs have budgets.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "transport/error.h"
#include "transport/paced/endpoint.h"
#include "transport/paced/transport.h"

namespace phub {
namespace {

// A core's part of a NIC's budget, for all jobs.
class Share {
 public:
  // The core's thread.
  TokenBucket& bucket(const NicBudget& budget, uint64_t now_ns) {
    const uint64_t rate = bytes_per_s_.load(std::memory_order_relaxed);
    if (!bucket_) bucket_.emplace(rate, budget.burst(rate));
    if (rate != bucket_->bytes_per_s()) bucket_->change(rate, budget.burst(rate), now_ns);
    return *bucket_;
  }

  // What follows is guarded by the transport's mutex; bytes_per_s_ is read without it.
  void add(uint64_t chunks) { chunks_ += chunks; }
  void remove(uint64_t chunks) { chunks_ -= chunks; }
  uint64_t chunks() const { return chunks_; }
  void set_rate(uint64_t bytes_per_s) {
    bytes_per_s_.store(std::max<uint64_t>(bytes_per_s, 1), std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> bytes_per_s_{1};
  std::optional<TokenBucket> bucket_;  // nothing: it was not used yet
  uint64_t chunks_ = 0;                // of open jobs
};

// Those of one job, by core and there by the core's queue.
using Shares = std::vector<std::vector<Share*>>;

class PacedBoxEndpoint final : public PacedEndpoint, public BoxEndpoint {
 public:
  PacedBoxEndpoint(BoxEndpoint& endpoint, const NicBudget& budget, std::vector<Share*> of_queue)
      : PacedEndpoint(endpoint, budget.clock),
        box_endpoint_(endpoint),
        budget_(budget),
        of_queue_(std::move(of_queue)) {}

  bool post(QueuePair to, const Write& write) override {
    return post_paid(of_queue_[to.queue]->bucket(budget_, now_ns()), to, write);
  }
  void attach(uint32_t rank, uint32_t incarnation) override {
    box_endpoint_.attach(rank, incarnation);
  }
  void detach(uint32_t rank) override { box_endpoint_.detach(rank); }

 private:
  BoxEndpoint& box_endpoint_;
  const NicBudget& budget_;
  const std::vector<Share*> of_queue_;
};

class PacedBoxLink;

class PacedTransport final : public Transport {
 public:
  PacedTransport(std::unique_ptr<Transport> transport, NicBudget budget)
      : transport_(std::move(transport)),
        names_nics_(!transport_->ports().empty()),
        budget_(std::move(budget)) {}

  std::string_view name() const override { return transport_->name(); }
  std::string describe() const override {
    return transport_->describe() + ", at most " + describe_rate(budget_.bytes_per_s) +
           " from each NIC";
  }
  std::vector<NicPort> ports() const override { return transport_->ports(); }
  uint64_t nic_bytes_per_s() const override { return budget_.bytes_per_s; }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override;
  int event_fd() const override { return transport_->event_fd(); }
  void handle_events(std::vector<TransportEvent>& out) override;

  const NicBudget& budget() const { return budget_; }
  Shares open(const LinkLayout& layout, BoxLink* inner, BoxLink* outer);
  void close(const LinkLayout& layout, BoxLink* inner);

 private:
  using Place = std::pair<std::string, uint32_t>;  // NIC, CPU
  Place place_of(const LinkLayout& layout, size_t queue) const;
  void deal_out();

  const std::unique_ptr<Transport> transport_;
  const bool names_nics_;
  const NicBudget budget_;
  std::mutex mutex_;                    // guards what follows
  std::map<Place, Share> shares_;       // stay where they are: cores use them
  std::map<BoxLink*, BoxLink*> outer_;  // of the transport's own links
};

class PacedBoxLink final : public BoxLink {
 public:
  PacedBoxLink(PacedTransport& transport, std::unique_ptr<BoxLink> link, const LinkLayout& layout)
      : transport_(transport), layout_(layout), link_(std::move(link)) {
    Shares shares = transport_.open(layout_, link_.get(), this);
    for (uint32_t core = 0; core < layout_.cores; ++core) {
      endpoints_.push_back(std::make_unique<PacedBoxEndpoint>(
          link_->endpoint(core), transport_.budget(), std::move(shares[core])));
    }
  }
  ~PacedBoxLink() override { transport_.close(layout_, link_.get()); }
  PacedBoxLink(const PacedBoxLink&) = delete;
  PacedBoxLink& operator=(const PacedBoxLink&) = delete;

  std::span<std::byte> results() override { return link_->results(); }
  BoxEndpoint& endpoint(uint32_t core) override { return *endpoints_[core]; }
  void prepare(uint32_t rank) override { link_->prepare(rank); }
  Offer admit(uint32_t rank, uint32_t incarnation) override {
    return link_->admit(rank, incarnation);
  }
  void use_ticket(std::string ticket) override { link_->use_ticket(std::move(ticket)); }
  std::span<const std::byte> slots(uint32_t rank) override { return link_->slots(rank); }
  Rest revoke(uint32_t rank) override { return link_->revoke(rank); }
  void close() override { link_->close(); }
  bool slots_belong_to_worker() const override { return link_->slots_belong_to_worker(); }
  bool can_reconnect() const override { return link_->can_reconnect(); }
  Offer reconnect(uint32_t rank) override { return link_->reconnect(rank); }

 private:
  PacedTransport& transport_;
  const LinkLayout layout_;
  const std::unique_ptr<BoxLink> link_;
  std::vector<std::unique_ptr<PacedBoxEndpoint>> endpoints_;  // by core
};

std::unique_ptr<BoxLink> PacedTransport::open_job(const LinkLayout& layout) {
  return std::make_unique<PacedBoxLink>(*this, transport_->open_job(layout), layout);
}

// A transport that names no NICs has one.
PacedTransport::Place PacedTransport::place_of(const LinkLayout& layout, size_t queue) const {
  const uint32_t core = layout.core_of(static_cast<uint32_t>(queue));
  return {names_nics_ && !layout.queue_nic.empty() ? layout.queue_nic[queue] : "",
          layout.core_cpu.empty() ? core : layout.core_cpu[core]};
}

Shares PacedTransport::open(const LinkLayout& layout, BoxLink* inner, BoxLink* outer) {
  const std::lock_guard lock(mutex_);
  outer_[inner] = outer;
  Shares of_cores(layout.cores);
  for (size_t q = 0; q < layout.queue_chunks.size(); ++q) {
    Share& share = shares_[place_of(layout, q)];
    share.add(layout.queue_chunks[q]);
    of_cores[layout.core_of(static_cast<uint32_t>(q))].push_back(&share);
  }
  deal_out();
  return of_cores;
}

void PacedTransport::close(const LinkLayout& layout, BoxLink* inner) {
  const std::lock_guard lock(mutex_);
  outer_.erase(inner);
  for (size_t q = 0; q < layout.queue_chunks.size(); ++q) {
    shares_[place_of(layout, q)].remove(layout.queue_chunks[q]);
  }
  deal_out();
}

// The parts of a NIC are rounded down: together they are at most its budget.
void PacedTransport::deal_out() {
  std::map<std::string, uint64_t> of_nic;
  for (const auto& [place, share] : shares_) of_nic[place.first] += share.chunks();
  for (auto& [place, share] : shares_) {
    const double all = static_cast<double>(std::max<uint64_t>(of_nic[place.first], 1));
    const double part = static_cast<double>(share.chunks()) / all;
    share.set_rate(static_cast<uint64_t>(part * static_cast<double>(budget_.bytes_per_s)));
  }
}

void PacedTransport::handle_events(std::vector<TransportEvent>& out) {
  const size_t before = out.size();
  transport_->handle_events(out);
  const std::lock_guard lock(mutex_);
  for (size_t i = before; i < out.size(); ++i) {
    const auto at = outer_.find(out[i].link);
    if (at != outer_.end()) out[i].link = at->second;
  }
}

}  // namespace

std::unique_ptr<Transport> make_paced(std::unique_ptr<Transport> transport, NicBudget budget) {
  if (transport->shares_memory()) {
    fail(ErrorCode::kInvalid, "a budget of NICs does not fit transport '{}': nothing is sent",
         transport->name());
  }
  return std::make_unique<PacedTransport>(std::move(transport), std::move(budget));
}

}  // namespace phub
