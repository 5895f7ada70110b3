#include "transport/paced/shares.h"

#include <algorithm>

namespace phub {

std::vector<BudgetShare*> BudgetShares::open(const std::vector<Use>& uses) {
  const std::lock_guard lock(mutex_);
  std::vector<BudgetShare*> shares;
  for (const Use& use : uses) {
    share_of(use).add(use.chunks);
    shares.push_back(&share_of(use));
  }
  deal_out();
  return shares;
}

void BudgetShares::close(const std::vector<Use>& uses) {
  const std::lock_guard lock(mutex_);
  for (const Use& use : uses) share_of(use).remove(use.chunks);
  deal_out();
}

// The parts of a NIC are rounded down: together they are at most its budget.
void BudgetShares::deal_out() {
  std::map<std::string, uint64_t> of_nic;
  for (const auto& [place, share] : shares_) of_nic[place.first] += share.chunks();
  for (auto& [place, share] : shares_) {
    const double all = static_cast<double>(std::max<uint64_t>(of_nic[place.first], 1));
    const double part = static_cast<double>(share.chunks()) / all;
    share.set_rate(static_cast<uint64_t>(part * static_cast<double>(budget_.bytes_per_s)));
  }
}

}  // namespace phub
