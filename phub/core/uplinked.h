// Lock-step below a parent: this box is a rack, one rank of the parent's job. A chunk closes when
// its sum is in the parent's slot for this rack, and is pending until the parent's result is there.
// The parent has the optimizer; a rack has neither parameters nor state.
//
// The rounds are the parent's. Every chunk begins closed, in the round before the first: its result
// is the parent's state of the chunk, which the parent sends to a rank that joins. A round in which
// this rack has no rank any more, while others come later, completes all the same: with a null of
// no rank.
//
// Where rounds are gated, the gate is the root's: its verdict is passed on with the results.
//
// A sum that finds no room in its queue, or no budget of its NIC, waits: on each queue by itself,
// by the keys' priority.
//
// The connection may break. Then this says so once, and goes on when there is a new one: unanswered
// sums are sent again, byte for byte.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "phub/core/index_set.h"
#include "phub/core/lock_step.h"
#include "transport/transport.h"
#include "transport/verdict.h"

namespace phub {

// A core's part of the connection to the parent. All of it outlives the core job.
struct CoreUplink {
  struct Place {
    uint64_t sum = 0;     // bytes, in `sums`
    uint64_t slot = 0;    // bytes, at the parent
    uint64_t result = 0;  // bytes, in `results`
    uint32_t queue = 0;   // by the parent's plan
    uint32_t index = 0;   // in the queue
  };
  Endpoint* endpoint = nullptr;
  std::span<std::byte> sums;           // this rack's, with their trailers
  std::span<const std::byte> results;  // the parent's results land here
  std::vector<Place> places;           // by chunk of the core
  std::byte* rack_results = nullptr;   // those of this rack's job (JobArrays)
};

class Uplinked final : public LockStep {
 public:
  Uplinked(const Stages& stages, CoreUplink uplink);
  static constexpr uint64_t bytes(uint64_t chunks) {
    return sizeof(Uplinked) + IndexSet::bytes(chunks) +
           chunks * (sizeof(CoreUplink::Place) + 5 * sizeof(uint32_t) + sizeof(ImmKind));
  }

  Closed close(uint32_t index) override;
  uint32_t next_done() override;
  bool moved_on() override { return std::exchange(moved_on_, false); }
  void finish(uint32_t index) override;
  void store_initial(uint32_t index, uint32_t part) override;
  void begin(uint32_t index) override;
  void settle(uint32_t index) override;
  void suspend_parent() override;
  void resume_parent() override;
  bool arm() override;
  void disarm() override {
    if (!broken_) uplink_.endpoint->disarm();
  }
  int wake_fd() const override { return uplink_.endpoint->wake_fd(); }
  uint64_t waits_for_room_ns() const override {
    if (broken_ || unposted_ == 0) return 0;
    return std::max(uplink_.endpoint->refused_for_ns(), kTryAgainNs);
  }

 private:
  static constexpr size_t kArrivals = 64;
  static constexpr uint64_t kTryAgainNs = 1'000'000;      // where the endpoint does not ring
  static constexpr ImmKind kNothing = ImmKind::kControl;  // nothing is sent of this chunk

  void post(uint32_t index, ImmKind kind);
  bool post_again(uint32_t index);
  void wait_for_room(uint32_t index);
  void post_unposted();
  uint32_t take(const Arrival& arrival);
  void read_verdict(uint32_t queue, const Imm& imm);
  uint32_t take_result(uint32_t index);
  void find_vacant(uint32_t index);
  void pass_verdict_on(uint32_t queue, uint64_t round);

  const CoreUplink uplink_;
  const uint32_t result_bytes_;    // per element
  struct Queue {                   // by the parent's plan
    std::vector<uint32_t> chunks;  // [index] = chunk of the core
    std::vector<uint32_t> order;   // `chunks` by priority
    IndexSet unposted{0};          // places in `order` that found no room, or no budget
    VerdictReader verdict;         // a gated job's
    std::vector<uint32_t> early;   // results that came before the verdict on their round
  };
  std::vector<Queue> queues_;
  std::vector<ImmKind> sent_;        // by chunk: the kind that the parent has not answered
  std::vector<uint32_t> done_;       // results whose verdict has come
  uint64_t verdict_round_ = kNever;  // the round of the latest that ranks are told
  std::vector<uint32_t> place_;      // by chunk: in its queue's order
  size_t unposted_ = 0;              // in all queues
  std::array<Arrival, kArrivals> arrivals_;
  size_t taken_ = 0, arrived_ = 0;  // in arrivals_
  bool unflushed_ = false;
  bool moved_on_ = false;
  bool broken_ = false;  // the connection is
};

}  // namespace phub
