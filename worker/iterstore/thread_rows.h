// The rows that one thread is known to access: each has a place of its own, in contiguous memory,
// that only this thread uses. A row that threads contend for also has a copy of the state there
// (static cache, which never evicts: section 3.2.2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "numa/memory.h"
#include "worker/iterstore/shared_rows.h"

namespace phub::iterstore {

struct PlaceSettings {
  bool every_row = true;  // a place for each row that the thread accesses; else for cached ones
  bool holds = false;     // it knows the last accesses to keys
  uint32_t threads = 1;
  std::optional<uint32_t> os_node;  // the node of the thread's memory
};

// The place of a row, for one thread.
struct Place {
  uint32_t table = 0;
  uint64_t row = 0;
  RowPlace at;
  bool may_update = true;
  std::byte* update = nullptr;  // combined since the last clock
  std::byte* copy = nullptr;    // a copy of the state; null: it is not cached
  uint64_t updated_at = 0;      // the clock of `update`
  uint64_t copied_at = 0;       // the clock before which the state was as in `copy`
  uint32_t step = 0;            // the first step of the sequence that accesses the row
};

class ThreadRows {
 public:
  ThreadRows() = default;
  ThreadRows(const Recording& recording, const SharedRows& shared, std::span<const Table> tables,
             const PlaceSettings& settings);
  ThreadRows(const ThreadRows&) = delete;
  ThreadRows& operator=(const ThreadRows&) = delete;

  // Returns null if the thread has no place for it.
  Place* find(uint32_t table, uint64_t row) {
    if (next_ < sequence_.size() && sequence_[next_] != kNoPlace) {
      Place& place = places_[sequence_[next_]];
      if (place.row == row && place.table == table) {
        ++next_;
        ++in_sequence_;
        return &place;
      }
    }
    return look_up(table, row);
  }
  const Place* peek(uint32_t table, uint64_t row) const;
  void clock();  // the sequence goes on behind its next clock
  void allow_updates(uint32_t table);

  // The thread holds the keys that its sequence still accesses before its next clock. When calls
  // come in the sequence, is_done_with_one() says that one is behind its last access, and let_go()
  // returns its number, each once.
  bool holds(uint32_t key) const { return key < held_.size() && held_[key]; }
  bool is_done_with_one() const { return next_ > due_step_; }
  uint32_t let_go();

  std::span<const Place> places() const { return places_; }
  uint64_t in_sequence() const { return in_sequence_; }
  uint64_t by_index() const { return by_index_; }
  uint64_t cached() const { return cached_; }
  uint64_t dynamic = 0;  // accesses that found no place here

 private:
  static constexpr uint32_t kNoPlace = ~uint32_t{0};  // a clock, or a row without a place

  struct Due {  // the last access to a key before a clock
    uint32_t step = 0, key = 0;
  };
  static constexpr uint32_t kNoStep = kNoPlace - 1;  // the sequence is never behind it
  static constexpr uint64_t kNever = ~uint64_t{0};

  Place* look_up(uint32_t table, uint64_t row);
  void plan_dues(size_t keys);
  void hold();  // what comes before the next clock

  std::vector<Place> places_;
  std::unordered_map<uint64_t, uint32_t> index_;
  std::vector<uint32_t> sequence_;   // places
  std::vector<uint32_t> clocks_;     // steps
  size_t next_ = 0;                  // step
  std::vector<Due> dues_;            // clock by clock, by ascending step
  std::vector<uint32_t> first_due_;  // of each clock; and the end of the last
  size_t next_due_ = 0, end_due_ = 0;
  uint64_t due_step_ = kNever;  // of next_due_; kNever: none, or a call did not come in sequence
  std::vector<uint8_t> held_;   // by key
  numa::Memory on_node_;
  std::vector<std::byte> memory_;
  uint64_t in_sequence_ = 0, by_index_ = 0, cached_ = 0;
};

// One number for a row of a table. REQUIRES: checked_tables() allows them.
constexpr uint64_t row_id(uint32_t table, uint64_t row) { return uint64_t{table} << 48 | row; }

}  // namespace phub::iterstore
