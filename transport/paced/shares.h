// The parts that the cores of a box have of its NICs' budgets. Cores share nothing: each has a
// bucket for each NIC that it sends over, with the part of the budget that its chunks are of those
// of all open jobs on that NIC. The part that a core does not use goes to no other core.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/paced/nic_budget.h"
#include "transport/paced/token_bucket.h"

namespace phub {

// The share of one core, on one NIC, for all jobs.
class BudgetShare {
 public:
  // The core's thread.
  TokenBucket& bucket(const NicBudget& budget, uint64_t now_ns) {
    const uint64_t rate = bytes_per_s_.load(std::memory_order_relaxed);
    if (!bucket_) bucket_.emplace(rate, budget.burst(rate));
    if (rate != bucket_->bytes_per_s()) bucket_->change(rate, budget.burst(rate), now_ns);
    return *bucket_;
  }

  // The mutex of all shares guards the members below; bytes_per_s_ is read without it.
  void add(uint64_t chunks) { chunks_ += chunks; }
  void remove(uint64_t chunks) { chunks_ -= chunks; }
  uint64_t chunks() const { return chunks_; }
  void set_rate(uint64_t bytes_per_s) {
    bytes_per_s_.store(std::max<uint64_t>(bytes_per_s, 1), std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> bytes_per_s_{1};
  std::optional<TokenBucket> bucket_;  // nothing: it was not used yet
  uint64_t chunks_ = 0;                // the chunks of open jobs
};

class BudgetShares {
 public:
  explicit BudgetShares(NicBudget budget) : budget_(std::move(budget)) {}
  const NicBudget& budget() const { return budget_; }

  // The traffic of a job over a NIC, from the core with this CPU.
  struct Use {
    std::string nic;
    uint32_t cpu = 0;
    uint64_t chunks = 0;
  };
  // Any thread. Deals the budgets out again. The shares, one for each use, live as long as this;
  // each is for the thread of its core.
  std::vector<BudgetShare*> open(const std::vector<Use>& uses);
  void close(const std::vector<Use>& uses);

 private:
  using Place = std::pair<std::string, uint32_t>;  // NIC, CPU
  BudgetShare& share_of(const Use& use) { return shares_[Place{use.nic, use.cpu}]; }
  void deal_out();

  const NicBudget budget_;
  std::mutex mutex_;                     // guards the members below
  std::map<Place, BudgetShare> shares_;  // stay where they are: cores use them
};

}  // namespace phub
