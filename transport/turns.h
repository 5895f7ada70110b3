// The order in which an endpoint polls its queue pairs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace phub {

// A compact list of the open queue pairs, which take turns: an idle one costs a poll one look.
class Turns {
 public:
  explicit Turns(size_t max_pairs) { pairs_.reserve(max_pairs); }

  auto begin() const { return pairs_.begin(); }
  auto end() const { return pairs_.end(); }
  bool empty() const { return pairs_.empty(); }
  void add(uint32_t qp) { pairs_.push_back(qp); }
  void remove(uint32_t qp) {
    std::erase(pairs_, qp);
    next_ = 0;
  }

  // Fills `out` from each queue pair at most once, beginning where the last call ended.
  // take(qp, share) puts arrivals of one into `share` and returns how many.
  template <typename Take>
  size_t poll(std::span<Arrival> out, const Take& take) {
    constexpr size_t kLeastShare = 16;  // over shm, entries of a cache line
    const size_t count = pairs_.size();
    if (count == 0) return 0;
    const size_t share = std::max(out.size() / count, kLeastShare);
    size_t taken = 0;
    for (size_t visited = 0; visited < count && taken < out.size(); ++visited) {
      const uint32_t qp = pairs_[next_];
      next_ = next_ + 1 == count ? 0 : next_ + 1;
      taken += take(qp, out.subspan(taken, std::min(share, out.size() - taken)));
    }
    return taken;
  }

 private:
  std::vector<uint32_t> pairs_;
  size_t next_ = 0;
};

}  // namespace phub
