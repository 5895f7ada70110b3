// The orders by which cores move a job's branches between two rounds.
//
// A branch has, for every chunk, the parameters, the optimizer's states and the number of steps
// that the optimizer has made. The branch that runs is at place 0; each of the others is on a
// shelf, place 1 or higher. An order moves branches, chunk by chunk; places.h knows whose memory a
// place uses. Each shelf has a *dock*: that of shelf S in a job with B shelves is place B + S. A
// state that is to be copied from files to the shelf waits in the dock, whose memory exists only
// meanwhile.
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
    kCopy,  // `to` becomes a copy of `from`: a fork; from the dock of `to`: a branch is revived
    kSwap,  // the running branch and that on shelf `to` change places
  };
  uint64_t round = 0;  // before this round
  Kind kind = kCopy;
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t child = 0;  // kCopy: the branch that `to` then is

  friend bool operator==(const BranchOrder&, const BranchOrder&) = default;
};

// Convert orders to messages (transport/control/branch_messages.h), and back.
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
  // Adds the orders of a boundary, ascending by round and none before an order that is here.
  // `lowest` is the lowest round that a chunk is in. Returns all orders that are still needed,
  // ascending, for the cores. The result lives until the second call after this one: by then the
  // cores have taken the result of the first.
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
  std::vector<BranchOrder> retired_;  // cores may read these until they take the next ones
};

}  // namespace phub
