// The box's transport whose NICs have budgets.
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/error.h"
#include "transport/paced/endpoint.h"
#include "transport/paced/shares.h"
#include "transport/paced/transport.h"

namespace phub {
namespace {

class PacedBoxEndpoint final : public PacedEndpoint, public BoxEndpoint {
 public:
  PacedBoxEndpoint(BoxEndpoint& endpoint, const NicBudget& budget,
                   std::vector<BudgetShare*> of_queue)
      : PacedEndpoint(endpoint, budget), box_endpoint_(endpoint) {
    use(std::move(of_queue));
  }

  void attach(uint32_t rank, uint32_t incarnation) override {
    box_endpoint_.attach(rank, incarnation);
  }
  void detach(uint32_t rank) override { box_endpoint_.detach(rank); }
  void use_window(SlotWindow& window) override { box_endpoint_.use_window(window); }
  uint64_t now_ns() const override { return box_endpoint_.now_ns(); }

 private:
  BoxEndpoint& box_endpoint_;
};

class PacedBoxLink;

class PacedTransport final : public Transport {
 public:
  PacedTransport(std::unique_ptr<Transport> transport, NicBudget budget)
      : transport_(std::move(transport)),
        names_nics_(!transport_->ports().empty()),
        shares_(std::move(budget)) {}

  std::string_view name() const override { return transport_->name(); }
  std::string describe() const override {
    return transport_->describe() + ", at most " + describe_rate(shares_.budget().bytes_per_s) +
           " from each NIC";
  }
  std::vector<NicPort> ports() const override { return transport_->ports(); }
  Windows windows() const override { return transport_->windows(); }
  uint64_t nic_bytes_per_s() const override { return shares_.budget().bytes_per_s; }
  std::unique_ptr<BoxLink> open_job(const LinkLayout& layout) override;
  int event_fd() const override { return transport_->event_fd(); }
  void handle_events(std::vector<TransportEvent>& out) override;

  BudgetShares& shares() { return shares_; }
  // Of each queue.
  std::vector<BudgetShares::Use> uses_of(const LinkLayout& layout) const;
  void add(BoxLink* inner, BoxLink* outer) {
    const std::lock_guard lock(mutex_);
    outer_[inner] = outer;
  }
  void remove(BoxLink* inner) {
    const std::lock_guard lock(mutex_);
    outer_.erase(inner);
  }

 private:
  const std::unique_ptr<Transport> transport_;
  const bool names_nics_;
  BudgetShares shares_;
  std::mutex mutex_;                    // guards the next one
  std::map<BoxLink*, BoxLink*> outer_;  // of the transport's own links
};

class PacedBoxLink final : public BoxLink {
 public:
  PacedBoxLink(PacedTransport& transport, std::unique_ptr<BoxLink> link, const LinkLayout& layout)
      : transport_(transport), uses_(transport.uses_of(layout)), link_(std::move(link)) {
    transport_.add(link_.get(), this);
    const std::vector<BudgetShare*> shares = transport_.shares().open(uses_);
    std::vector<std::vector<BudgetShare*>> of_cores(layout.cores);
    for (uint32_t q = 0; q < shares.size(); ++q) of_cores[layout.core_of(q)].push_back(shares[q]);
    for (uint32_t core = 0; core < layout.cores; ++core) {
      endpoints_.push_back(std::make_unique<PacedBoxEndpoint>(
          link_->endpoint(core), transport_.shares().budget(), std::move(of_cores[core])));
    }
  }
  ~PacedBoxLink() override {
    transport_.shares().close(uses_);
    transport_.remove(link_.get());
  }
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
  HeldMemory revoke(uint32_t rank) override { return link_->revoke(rank); }
  void close() override { link_->close(); }
  bool slots_belong_to_worker() const override { return link_->slots_belong_to_worker(); }
  bool can_reconnect() const override { return link_->can_reconnect(); }
  Offer reconnect(uint32_t rank) override { return link_->reconnect(rank); }

 private:
  PacedTransport& transport_;
  const std::vector<BudgetShares::Use> uses_;
  const std::unique_ptr<BoxLink> link_;
  std::vector<std::unique_ptr<PacedBoxEndpoint>> endpoints_;  // by core
};

std::unique_ptr<BoxLink> PacedTransport::open_job(const LinkLayout& layout) {
  return std::make_unique<PacedBoxLink>(*this, transport_->open_job(layout), layout);
}

// A transport that names no NICs has one.
std::vector<BudgetShares::Use> PacedTransport::uses_of(const LinkLayout& layout) const {
  std::vector<BudgetShares::Use> uses;
  for (uint32_t q = 0; q < layout.queue_chunks.size(); ++q) {
    const uint32_t core = layout.core_of(q);
    uses.push_back({.nic = names_nics_ && !layout.queue_nic.empty() ? layout.queue_nic[q] : "",
                    .cpu = layout.core_cpu.empty() ? core : layout.core_cpu[core],
                    .chunks = layout.queue_chunks[q]});
  }
  return uses;
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
