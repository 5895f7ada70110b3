// What the cores do about a job's branches between two rounds.
//
// A branch has the parameters and the optimizer's states of every chunk, and how many steps that
// has made. The branch that runs is at place 0, each of the others on a shelf, place 1 or higher.
// An order moves them, chunk by chunk; places.h knows whose memory a place uses. Above the shelves
// each has a *dock*: shelf S of a job with B shelves has place B + S. What is to be copied to the
// shelf from files waits there, in memory that is there only meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "transport/control/branch_messages.h"

namespace phub {

struct BranchOrder {
  enum Kind : uint8_t {
    kCopy,  // `to` becomes as `from` is: a fork; from the dock of `to`: a branch is revived
    kSwap,  // what runs and what is on shelf `to` change places: another branch runs
  };
  uint64_t round = 0;  // before this round
  Kind kind = kCopy;
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t child = 0;  // kCopy: the branch that `to` then is

  friend bool operator==(const BranchOrder&, const BranchOrder&) = default;
};

// As they are written down, and back.
inline std::vector<BranchMove> moves_of(std::span<const BranchOrder> orders) {
  std::vector<BranchMove> moves;
  for (const BranchOrder& order : orders) {
    moves.push_back({.round = order.round,
                     .copies = order.kind == BranchOrder::kCopy,
                     .from = order.from,
                     .to = order.to,
                     .child = order.child});
  }
  return moves;
}
inline std::vector<BranchOrder> orders_of(std::span<const BranchMove> moves) {
  std::vector<BranchOrder> orders;
  for (const BranchMove& move : moves) {
    orders.push_back({.round = move.round,
                      .kind = move.copies ? BranchOrder::kCopy : BranchOrder::kSwap,
                      .from = move.from,
                      .to = move.to,
                      .child = move.child});
  }
  return orders;
}

// The orders that some chunk has still to carry out. Control thread.
class BranchOrders {
 public:
  // Those of a boundary, each for a round that is no lower than that of the one before. `lowest` is
  // the lowest round that a chunk is in. Returns all that are needed, ascending, for the cores.
  // What the call before last returned may go: the cores have the last one by then.
  std::span<const BranchOrder> add(std::span<const BranchOrder> orders, uint64_t lowest) {
    std::vector<BranchOrder> needed;
    for (const BranchOrder& order : orders_) {
      if (order.round > lowest) needed.push_back(order);
    }
    needed.insert(needed.end(), orders.begin(), orders.end());
    retired_ = std::exchange(orders_, std::move(needed));
    return orders_;
  }
  uint64_t bytes() const {
    return (orders_.capacity() + retired_.capacity()) * sizeof(BranchOrder);
  }

 private:
  std::vector<BranchOrder> orders_;
  std::vector<BranchOrder> retired_;  // cores may have them until they take the next ones
};

}  // namespace phub
