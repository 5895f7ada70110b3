// A set of the numbers below a limit, of which one is drawn, added or removed in the same time
// however many it has.
#pragma once
#include <cstddef>
#include <vector>

namespace phub::sim {

class IndexSet {
 public:
  bool empty() const { return members_.empty(); }
  size_t size() const { return members_.size(); }
  size_t operator[](size_t i) const { return members_[i]; }

  // All numbers below `limit`, and no others.
  void fill(size_t limit) {
    members_.clear();
    place_.assign(limit, kNone);
    for (size_t number = 0; number < limit; ++number) add(number);
  }

  // Raises the limit, and adds the numbers that are new below it.
  void grow(size_t limit) {
    for (size_t number = place_.size(); number < limit; ++number) {
      place_.push_back(kNone);
      add(number);
    }
  }

  void add(size_t number) {
    if (place_[number] != kNone) return;
    place_[number] = members_.size();
    members_.push_back(number);
  }

  void remove(size_t number) {
    const size_t place = place_[number];
    if (place == kNone) return;
    members_[place] = members_.back();
    place_[members_[place]] = place;
    members_.pop_back();
    place_[number] = kNone;
  }

 private:
  static constexpr size_t kNone = ~size_t{0};
  std::vector<size_t> members_;
  std::vector<size_t> place_;  // of a number in `members_`
};

}  // namespace phub::sim
