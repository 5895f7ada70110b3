// A worker's link whose NICs have budgets, or that of a rack to its parent.
#include <fmt/format.h>

#include <utility>

#include "transport/error.h"
#include "transport/paced/endpoint.h"
#include "transport/paced/transport.h"
#include "transport/wrapped_link.h"

namespace phub {
namespace {

class PacedWorkerLink final : public WrappedLink {
 public:
  // Of the layout: its queues and threads. `own`: the shares, if no other link has part in them.
  PacedWorkerLink(std::unique_ptr<WorkerLink> link, const LinkLayout& layout, BudgetShares& shares,
                  std::unique_ptr<BudgetShares> own)
      : WrappedLink(std::move(link)),
        own_(std::move(own)),
        shares_(shares),
        queue_chunks_(layout.queue_chunks) {
    for (uint32_t thread = 0; thread < layout.threads; ++thread) {
      endpoints_.push_back(
          std::make_unique<PacedEndpoint>(link_->endpoint_of(thread), shares.budget()));
    }
    for (uint32_t queue = 0; queue < queue_chunks_.size(); ++queue) {
      const uint32_t thread = layout.thread_of(queue);
      queue_thread_.push_back(thread);
      queue_cpu_.push_back(layout.thread_cpu.empty() ? thread : layout.thread_cpu[thread]);
    }
    open();
  }
  ~PacedWorkerLink() override { shares_.close(uses_); }
  PacedWorkerLink(const PacedWorkerLink&) = delete;
  PacedWorkerLink& operator=(const PacedWorkerLink&) = delete;

  Endpoint& endpoint() override { return *endpoints_.front(); }
  Endpoint& endpoint_of(uint32_t thread) override { return *endpoints_.at(thread); }
  std::string describe() const override {
    return fmt::format("{}; at most {} from each NIC", link_->describe(),
                       describe_rate(shares_.budget().bytes_per_s));
  }
  // A NIC keeps its buckets when connections are made anew.
  void reconnect(const Offer& offer) override {
    link_->reconnect(offer);
    shares_.close(std::exchange(uses_, {}));
    open();
  }

 private:
  // What crosses no NIC takes nothing of a budget.
  void open() {
    for (uint32_t queue = 0; queue < queue_chunks_.size(); ++queue) {
      const bool crosses = endpoints_[queue_thread_[queue]]->crosses_nic({.queue = queue});
      uses_.push_back({.nic = link_->nic_of(queue),
                       .cpu = queue_cpu_[queue],
                       .chunks = crosses ? queue_chunks_[queue] : 0});
    }
    const std::vector<BudgetShare*> shares = shares_.open(uses_);
    for (const auto& endpoint : endpoints_) endpoint->use(shares);
  }

  const std::unique_ptr<BudgetShares> own_;
  BudgetShares& shares_;
  const std::vector<uint32_t> queue_chunks_;
  std::vector<uint32_t> queue_thread_, queue_cpu_;
  std::vector<BudgetShares::Use> uses_;                    // by queue
  std::vector<std::unique_ptr<PacedEndpoint>> endpoints_;  // by thread
};

std::unique_ptr<WorkerLink> make_paced(std::unique_ptr<WorkerLink> link, const LinkLayout& layout,
                                       BudgetShares& shares, std::unique_ptr<BudgetShares> own) {
  if (link->zero_copy()) {
    fail(ErrorCode::kInvalid,
         "a budget of a NIC needs a transport over a NIC: over shared memory nothing is sent");
  }
  return std::make_unique<PacedWorkerLink>(std::move(link), layout, shares, std::move(own));
}

}  // namespace

std::unique_ptr<WorkerLink> make_paced(std::unique_ptr<WorkerLink> link, uint32_t queues,
                                       NicBudget budget) {
  auto shares = std::make_unique<BudgetShares>(std::move(budget));
  BudgetShares& of_link = *shares;
  LinkLayout layout;
  layout.queue_chunks.assign(queues, 1);
  return make_paced(std::move(link), layout, of_link, std::move(shares));
}

std::unique_ptr<WorkerLink> make_paced(std::unique_ptr<WorkerLink> link, const LinkLayout& layout,
                                       BudgetShares& shares) {
  return make_paced(std::move(link), layout, shares, nullptr);
}

}  // namespace phub
