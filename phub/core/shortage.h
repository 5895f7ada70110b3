// Ranks for whose gradients a core's window (transport/slot_window.h) has no place.
//
// Mostly the chunks that they wait for complete soon. But ranks that send in different orders may
// each wait for a chunk that another one has no place for. Then these ranks get places:
//
// - at once if all ranks that some chunk waits for are short here. The chunks of the lowest round
//   that anybody waits in decide: who is not there in a later round may wait for these. (Keys that
//   are pushed at different rates have rounds that say nothing of this: they wait as for a rank
//   that is late;)
// - after a moment without any arrival if they are short at this core or another one of the box:
//   what a worker sends to one core holds up what it sends to the others;
// - after some seconds if one of them is short nowhere: it is late, or another box holds it up,
//   which is not seen here. An eighth of their window then, and another after as long or longer.
//   None if it is not connected.
//
// Where chunks share slots (shared_slots.h) a rank is short of a chunk's slot while another of its
// gradients is there; other queues go on. Instead of getting places, these gradients are taken out
// of the slots.
//
// The first of these is long before a rank that is waited for counts as lost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "phub/core/way.h"

namespace phub {

// It belongs to the core's thread.
class Shortage {
 public:
  // `window` may be null. `progress_limit_ms`: JobSpec's.
  Shortage(SlotWindow* window, uint32_t progress_limit_ms, uint32_t chunks)
      : late_ns_(std::min(kMostLateNs, uint64_t{progress_limit_ms} * 1'000'000 / 4)),
        between_ns_(chunks * kBetweenLooksNs),
        window_(window) {}

  bool is_there() const { return window_ != nullptr && window_->is_short(); }
  // How long the core sleeps at most while there is one.
  uint64_t look_ns() const {
    const uint64_t most = late_ns_ / 30;
    return is_due_ ? most : std::min(most, between_ns_);
  }
  // Before the core sleeps; `arrivals` is the number of them so far, `now_ns` the endpoint's. True:
  // some ranks have got places, and can be read from; or have been told of slots that are free.
  bool relieve(ChunkTable& table, const Way& way, Outbox& outbox, uint64_t arrivals,
               uint64_t now_ns);
  // Takes all gradients of the rank out of the slots, which somebody else will write to, beyond the
  // limit for memory. Throws Error(kFull).
  void clear_slots(ChunkTable& table, uint32_t rank);
  // Ranks may leave at a boundary: what they have sent is read before, as without a window.
  void in_boundary(bool is_in) {
    if (window_ != nullptr) window_->open(is_in);
  }

 private:
  static constexpr uint64_t kMostLateNs = 3'000'000'000;
  static constexpr uint64_t kBetweenLooksNs = 500;  // for each chunk: a look takes some percent
  uint64_t moment_ns() const { return late_ns_ / 15; }
  // A few times in a row, then ever more slowly: the rank may be late for long.
  uint64_t late_now_ns() const { return late_ns_ << (std::max(times_, kAtFirst) - kAtFirst); }
  static constexpr uint32_t kMostTimes = 20, kAtFirst = 4;
  struct Patience {
    uint64_t ns = 0;    // how long nothing must have arrived
    bool late = false;  // and some rank may be late
  };
  Patience patience_with(const ChunkTable& table, const Way& way) const;
  void note_used_slots(const SharedSlots& shared);
  bool take_out(ChunkTable& table, const Way& way, Outbox& outbox, uint32_t gradients);

  const uint64_t late_ns_;
  const uint64_t between_ns_;  // looks at all chunks
  SlotWindow* const window_;
  uint64_t arrivals_ = kNever;
  uint64_t since_ns_ = 0;    // there have been so many
  uint64_t look_at_ns_ = 0;  // not before
  bool is_due_ = true;       // or the latest look was not made
  uint64_t completed_ = 0;
  std::vector<uint32_t> taken_out_;  // by rank
  uint32_t times_ = 0;               // that a late rank was the reason, since a chunk completed
};

}  // namespace phub
