// What every rank says with each clock, as sums: the values of the clock's key.
#pragma once

#include <cstdint>

namespace phub::iterstore {

struct Tally {
  int64_t ranks = 0;     // that made the clock
  int64_t accesses = 0;  // of their threads
  int64_t outside = 0;   // of these, that did not come as recorded
  int64_t changes = 0;   // of rows, that they ask for

  friend Tally operator+(const Tally& a, const Tally& b) {
    return {a.ranks + b.ranks, a.accesses + b.accesses, a.outside + b.outside,
            a.changes + b.changes};
  }
  friend Tally operator-(const Tally& a, const Tally& b) {
    return {a.ranks - b.ranks, a.accesses - b.accesses, a.outside - b.outside,
            a.changes - b.changes};
  }
};

}  // namespace phub::iterstore
