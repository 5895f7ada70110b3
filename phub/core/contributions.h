// The ranks of a core's part of a job, and which of them have contributed to each chunk's round in
// progress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "phub/core/index_set.h"
#include "phub/core/queued_chunks.h"
#include "phub/core/shared_slots.h"
#include "transport/contribution_weight.h"
#include "transport/slot_window.h"

namespace phub {

// A bit for each chunk and rank, in words of 64 ranks.
class RankBits {
 public:
  RankBits(uint32_t chunks, uint32_t max_ranks)
      : words_(static_cast<uint32_t>(bit_words(max_ranks))), bits_(size_t{chunks} * words_) {}

  bool has(uint32_t rank, uint32_t index) const {
    return ((word(index, rank / 64) >> (rank % 64)) & 1) != 0;
  }
  void set(uint32_t rank, uint32_t index) { word(index, rank / 64) |= mask(rank); }
  void clear(uint32_t rank, uint32_t index) { word(index, rank / 64) &= ~mask(rank); }
  void set_to(uint32_t rank, uint32_t index, bool yes) {
    yes ? set(rank, index) : clear(rank, index);
  }

  uint32_t words() const { return words_; }  // of a chunk
  uint64_t word(uint32_t index, uint32_t w) const { return bits_[size_t{index} * words_ + w]; }
  uint64_t& word(uint32_t index, uint32_t w) { return bits_[size_t{index} * words_ + w]; }

 private:
  static uint64_t mask(uint32_t rank) { return uint64_t{1} << (rank % 64); }

  const uint32_t words_;
  std::vector<uint64_t> bits_;
};

struct CoreRank {
  uint64_t first_round = kNever;     // expected from this round on; kNever: not at all
  uint64_t results_from = kNever;    // receives the results of this round and later ones
  uint64_t arrivals = 0;             // ever
  const std::byte* slots = nullptr;  // of all chunks, unless the core has a window
  uint32_t incarnation = 0;
  uint32_t open = 0;     // its contributions to chunks that are not complete
  uint32_t unheard = 0;  // chunks that have heard nothing from it since it reconnected
  bool attached = false;
  bool broken = false;     // its connection is; ignored until a boundary or a reconnection
  bool selective = false;  // there are chunks that it does not write, or not read
};

// Where gradients are beside slots of their own; both null: nowhere. As in CoreJob.
struct GradientPlaces {
  SlotWindow* window = nullptr;
  SharedSlots* shared = nullptr;
};

// It knows nothing of the ranks that are expected at a chunk, and begins no rounds. Nothing
// allocates after construction.
class Contributions : public QueuedChunks {
 public:
  Contributions(std::vector<CoreChunk> chunks, uint32_t queues, uint32_t max_ranks,
                GradientPlaces places = {})
      : QueuedChunks(std::move(chunks), queues),
        ranks_(max_ranks),
        arrived_(size(), max_ranks),
        null_(size(), max_ranks),
        unheard_(size(), max_ranks),
        window_(places.window),
        shared_(places.shared) {}

  CoreRank& rank(uint32_t rank) { return ranks_[rank]; }
  const CoreRank& rank(uint32_t rank) const { return ranks_[rank]; }
  uint32_t max_ranks() const { return static_cast<uint32_t>(ranks_.size()); }
  uint32_t words() const { return arrived_.words(); }  // each for 64 ranks

  // Where a rank's gradients of a chunk are. With a window (slot_window.h; null: without) one has
  // a place from its arrival until it is unmarked or freed. Where chunks share slots, the window
  // has those gradients that were taken out of them.
  const std::byte* slot(uint32_t rank, uint32_t index) const {  // null: it has no place
    if (window_ != nullptr) {
      const std::byte* const place = window_->at(rank, index);
      if (place != nullptr || shared_ == nullptr) return place;
    }
    return ranks_[rank].slots + (*this)[index].slot_offset;
  }
  const SharedSlots* shared_slots() const { return shared_; }  // null: each chunk has its own
  // Another gradient of the rank is in the chunk's slot.
  bool is_slot_taken(uint32_t rank, uint32_t index) const {
    return shared_ != nullptr && shared_->is_taken(rank, index);
  }
  // Its gradient was taken out of the slot that it shares.
  bool is_moved(uint32_t rank, uint32_t index) const {
    return shared_ != nullptr && window_->at(rank, index) != nullptr;
  }
  // Takes it out. False: there is no room elsewhere. REQUIRES: it is in its shared slot.
  bool move_out(uint32_t rank, uint32_t index);
  // Those of 64 ranks that nothing keeps from sending the chunk, here or at another core of the
  // box. All of them where windows cannot grow: or nobody would ever be late, and all wait for
  // ever.
  uint64_t not_held_up(uint32_t index, uint64_t ranks, uint32_t word) const {
    if (window_ == nullptr || ranks == 0 || window_->is_refused()) return ranks;
    uint64_t kept = 0;
    for_each_bit(ranks, word, [&](uint32_t rank) {
      if (!is_held_up(rank, index)) kept |= uint64_t{1} << (rank % 64);
    });
    return kept;
  }
  void free_slot(uint32_t rank, uint32_t index) {
    if (window_ != nullptr) window_->give_back(rank, index);
    if (shared_ != nullptr) shared_->free(rank, index);
  }
  void free_slots(uint32_t index) {  // of all that have arrived
    if (window_ == nullptr) return;
    for_each_arrived(index, [&](uint32_t rank) { free_slot(rank, index); });
  }
  // What was in it is somebody else's.
  bool has_lost_slot(uint32_t rank, uint32_t index) const {
    return window_ != nullptr && shared_ == nullptr && window_->at(rank, index) == nullptr;
  }
  // Frees the slot unless a contribution in it is still to be read.
  void free_unread_slot(uint32_t rank, uint32_t index) {
    if (window_ == nullptr) return;
    if (has(rank, index) && !is_null(rank, index) && !(*this)[index].closed) return;
    free_slot(rank, index);
  }
  void free_unread_slots(uint32_t rank) {  // of a detached one
    if (window_ == nullptr) return;
    for (uint32_t i = 0; i < size(); ++i) free_unread_slot(rank, i);
    window_->forget_shortage(rank);
  }

  bool has(uint32_t rank, uint32_t index) const { return arrived_.has(rank, index); }
  bool is_null(uint32_t rank, uint32_t index) const { return null_.has(rank, index); }
  uint64_t arrived_word(uint32_t index, uint32_t word) const { return arrived_.word(index, word); }
  void mark(uint32_t rank, uint32_t index, bool null);
  void unmark(uint32_t rank, uint32_t index);
  void unmark_all(uint32_t index);
  // A contribution is put aside and brought back later, without a change of its slot. REQUIRES:
  // there is no window.
  void put_aside(uint32_t rank, uint32_t index);
  void bring_back(uint32_t rank, uint32_t index, bool null);
  // Calls visit(rank) in the order of the ranks.
  template <typename Visit>
  void for_each_arrived(uint32_t index, const Visit& visit) const {
    for (uint32_t w = 0; w < words(); ++w) for_each_bit(arrived_.word(index, w), w, visit);
  }
  // Does the same without null contributions.
  template <typename Visit>
  void for_each_gradient(uint32_t index, const Visit& visit) const {
    for (uint32_t w = 0; w < words(); ++w) {
      for_each_bit(arrived_.word(index, w) & ~null_.word(index, w), w, visit);
    }
  }

  // The weights of contributions (transport/contribution_weight.h), if the job has some: without a
  // call of this each counts as one. A rank has at most one contribution to a chunk under way.
  void keep_weights() { weights_.assign(size_t{size()} * max_ranks(), 1.0f); }
  static constexpr uint64_t weight_bytes(uint64_t chunks, uint64_t max_ranks) {
    return chunks * max_ranks * sizeof(float);
  }
  bool has_weights() const { return !weights_.empty(); }
  float weight(uint32_t rank, uint32_t index) const { return weights_[at(rank, index)]; }
  void set_weight(uint32_t rank, uint32_t index, float weight) {
    weights_[at(rank, index)] = weight;
  }
  // Multiplies it; where nothing is left of it, the contribution is as a null. REQUIRES: it has
  // arrived.
  void reduce_weight(uint32_t rank, uint32_t index, float factor) {
    float& weight = weights_[at(rank, index)];
    weight = reduced_weight(weight, factor);
    if (weight == 0) null_.set(rank, index);
  }
  // Of all that have arrived, added in the order of the ranks.
  double sum_of_weights(uint32_t index) const {
    double sum = 0;
    for_each_arrived(index, [&](uint32_t rank) { sum += double{weight(rank, index)}; });
    return sum;
  }

  // After a reconnection a rank sends its unanswered contributions again. Until that to a chunk is
  // here, no result of the chunk goes to the rank: its next contribution could overtake the
  // repeated one.
  void reconnected(uint32_t rank);
  void joined(uint32_t rank);  // none of its messages is under way
  bool is_heard(uint32_t rank, uint32_t index) const {
    return ranks_[rank].unheard == 0 || !unheard_.has(rank, index);
  }
  void hear(uint32_t rank, uint32_t index) {
    if (is_heard(rank, index)) return;
    unheard_.clear(rank, index);
    --ranks_[rank].unheard;
  }

 private:
  size_t at(uint32_t rank, uint32_t index) const { return size_t{index} * ranks_.size() + rank; }
  bool is_held_up(uint32_t rank, uint32_t index) const {
    return shared_ != nullptr ? shared_->is_taken(rank, index) : window_->is_short_somewhere(rank);
  }

  std::vector<CoreRank> ranks_;
  RankBits arrived_, null_, unheard_;
  std::vector<float> weights_;  // [chunk][rank]; empty: there are none
  SlotWindow* const window_;
  SharedSlots* const shared_;
};

inline void Contributions::mark(uint32_t rank, uint32_t index, bool null) {
  const CoreChunk& chunk = (*this)[index];
  if (!null) counters()[chunk.queue].bytes_in += chunk.sent_bytes(slot(rank, index));
  if (!null && shared_ != nullptr) shared_->put(rank, index);
  bring_back(rank, index, null);
}

inline void Contributions::bring_back(uint32_t rank, uint32_t index, bool null) {
  CoreChunk& chunk = (*this)[index];
  arrived_.set(rank, index);
  if (null) null_.set(rank, index);
  ++chunk.arrived;
  --chunk.missing;
  ++ranks_[rank].open;
}

inline void Contributions::put_aside(uint32_t rank, uint32_t index) {
  arrived_.clear(rank, index);
  null_.clear(rank, index);
  --(*this)[index].arrived;
  ++(*this)[index].missing;
  --ranks_[rank].open;
}

inline bool Contributions::move_out(uint32_t rank, uint32_t index) {
  const std::byte* const from = slot(rank, index);
  std::byte* const to = window_->move_in(rank, index);
  if (to == nullptr) return false;
  std::memcpy(to, from, (*this)[index].slot_bytes());
  shared_->free(rank, index);
  return true;
}

inline void Contributions::unmark(uint32_t rank, uint32_t index) {
  put_aside(rank, index);
  free_slot(rank, index);
}

inline void Contributions::unmark_all(uint32_t index) {
  free_slots(index);
  for (uint32_t w = 0; w < words(); ++w) {
    for_each_bit(std::exchange(arrived_.word(index, w), 0), w,
                 [this](uint32_t rank) { --ranks_[rank].open; });
    null_.word(index, w) = 0;
  }
  (*this)[index].arrived = 0;
}

inline void Contributions::reconnected(uint32_t rank) {
  for (uint32_t i = 0; i < size(); ++i) unheard_.set(rank, i);
  ranks_[rank].unheard = size();
}

inline void Contributions::joined(uint32_t rank) {
  for (uint32_t i = 0; i < size(); ++i) unheard_.clear(rank, i);
  ranks_[rank].unheard = 0;
}

static_assert(kMaxRanks <= 0xffff, "ranks are counted in 16 bits");

}  // namespace phub
