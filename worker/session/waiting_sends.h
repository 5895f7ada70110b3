// The messages of a session that wait for room in a queue, or for the budget of a NIC: on each NIC
// in the session's order (send_order.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "transport/layout.h"
#include "transport/transport.h"
#include "worker/session/send_order.h"

namespace phub {

struct WaitingSend {
  int64_t place;  // in the order: the highest is sent first, then the lowest sequence
  uint64_t sequence;
  uint64_t round;
  uint32_t chunk;
  ImmKind kind;                                     // kData: a push, which may be null
  bool operator<(const WaitingSend& other) const {  // the order of a max-heap
    return place != other.place ? place < other.place : sequence > other.sequence;
  }
};

class WaitingSends {
 public:
  // `seed` is that of kRandom.
  WaitingSends(SendOrder order, uint64_t seed) : order_(order), seed_(seed) {}

  // Drops everything. `chunks` has the number of chunks of each queue of the link.
  void begin(const WorkerLink& link, std::span<const size_t> chunks);

  // What decides about a chunk's place.
  struct Weight {
    int64_t priority = 0;
    uint64_t round = 0;
    float magnitude = 0;
  };
  void add(uint32_t queue, uint32_t chunk, const Weight& weight, ImmKind kind);
  // Adds one that was removed before, at its place.
  void add_again(uint32_t queue, const WaitingSend& send);
  size_t size() const { return size_; }

  // Calls post(send) for the first of each NIC, and removes it if that returns true; and so on.
  template <typename Post>
  void post_all(const Post& post) {
    for (std::vector<WaitingSend>& waiting : of_nic_) {
      while (!waiting.empty() && post(waiting.front())) {
        std::pop_heap(waiting.begin(), waiting.end());
        waiting.pop_back();
        --size_;
      }
    }
  }
  // Those for which goes_first(send) go before all others.
  template <typename GoesFirst>
  void advance(const GoesFirst& goes_first) {
    for (std::vector<WaitingSend>& waiting : of_nic_) {
      bool any = false;
      for (WaitingSend& send : waiting) {
        if (!goes_first(send)) continue;
        send.place = std::numeric_limits<int64_t>::max();
        any = true;
      }
      if (any) std::make_heap(waiting.begin(), waiting.end());
    }
  }

 private:
  int64_t place_of(uint32_t chunk, const Weight& weight) const;

  const SendOrder order_;
  const uint64_t seed_;
  std::vector<uint32_t> nic_of_;                  // by queue: index into of_nic_
  std::vector<std::vector<WaitingSend>> of_nic_;  // heaps
  size_t size_ = 0;                               // the number in all of them
  uint64_t sequence_ = 0;
};

}  // namespace phub
