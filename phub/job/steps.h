// How many steps the optimizer has made on each key: one in each round, but for rounds that were
// skipped and keys whose state was set. Control thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace phub {

class Steps {
 public:
  // By key: by how much its step in a round differs from the round.
  explicit Steps(const std::vector<int64_t>& offsets) {
    for (const int64_t offset : offsets) keys_.push_back({.offset = offset});
  }

  // Made on the key before the round. REQUIRES: rounds before it that were skipped are known.
  uint64_t before(size_t key, uint64_t round) const {
    const auto first = std::ranges::lower_bound(skipped_, keys_[key].from);
    const auto end = std::ranges::lower_bound(skipped_, std::max(round, keys_[key].from));
    return round - 1 + static_cast<uint64_t>(keys_[key].offset - (end - first));
  }
  // The step in a round is the round plus this, as far as none is skipped from `from` on.
  int64_t offset(size_t key) const { return keys_[key].offset; }

  // From this round on, as if `done` were made before it.
  void set(size_t key, uint64_t round, uint64_t done) {
    keys_[key] = {.offset = static_cast<int64_t>(done + 1 - round), .from = round};
  }
  void skip(uint64_t round) { skipped_.insert(std::ranges::upper_bound(skipped_, round), round); }
  uint64_t bytes() const { return skipped_.capacity() * sizeof(uint64_t); }  // that it has grown by

 private:
  struct Key {
    int64_t offset = 0;
    uint64_t from = 0;
  };
  std::vector<Key> keys_;
  std::vector<uint64_t> skipped_;  // rounds, ascending
};

}  // namespace phub
