// The chunks of a core on which a task between two rounds, such as a copy, is still to be done.
//
// The task belongs after all rounds before R and before R itself. A chunk that is still in an
// earlier round is awaited; a chunk that has come to R is due. The core does the task at the latest
// before it closes R. Nothing allocates after construction.
#pragma once

#include <cstdint>
#include <utility>

#include "phub/core/chunk_table.h"
#include "phub/core/index_set.h"
#include "transport/error.h"

namespace phub {

class DueChunks {
 public:
  explicit DueChunks(const ChunkTable& table)
      : table_(table), awaited_(table.size()), due_(table.size()) {}
  static constexpr uint64_t bytes(uint64_t chunks) {  // held
    return 2 * (IndexSet::bytes(chunks) - sizeof(IndexSet));
  }

  // At a boundary: begins the task for the chunks for which concerns(chunk). With `as_they_are` all
  // are due, also those of an earlier round. REQUIRES: the task before is complete, or dropped.
  template <typename Concerns>
  void begin(uint64_t round, const Concerns& concerns, bool as_they_are = false) {
    PHUB_CHECK(!under_way_);
    round_ = round;
    under_way_ = true;
    for (uint32_t i = 0; i < table_.size(); ++i) {
      if (!concerns(table_[i])) continue;
      IndexSet& set = as_they_are || table_[i].round >= round ? due_ : awaited_;
      set.insert(i);
    }
  }
  void drop() {
    awaited_.clear();
    due_.clear();
    under_way_ = false;
  }
  // The chunk has begun another round.
  void reached(uint32_t index) {
    if (!awaited_.empty() && awaited_.contains(index) && table_[index].round >= round_) {
      awaited_.erase(index);
      due_.insert(index);
    }
  }

  bool any_due() const { return !due_.empty(); }
  bool is_due(uint32_t index) const { return any_due() && due_.contains(index); }
  // Whether the task is still to be done with the chunk, and belongs before an earlier round than
  // `round`.
  bool is_before(uint32_t index, uint64_t round) const {
    return under_way_ && round_ < round && (due_.contains(index) || awaited_.contains(index));
  }
  uint32_t next() const { return due_.lowest(); }  // REQUIRES: any_due()
  void done(uint32_t index) {
    due_.erase(index);
    awaited_.erase(index);  // it has skipped rounds
  }

  // Every chunk is done, and take_complete() has not said so yet.
  bool is_complete() const { return under_way_ && due_.empty() && awaited_.empty(); }
  bool take_complete() { return is_complete() && std::exchange(under_way_, false); }
  bool under_way() const { return under_way_; }
  uint64_t round() const { return round_; }

 private:
  const ChunkTable& table_;
  IndexSet awaited_;
  IndexSet due_;
  uint64_t round_ = 0;
  bool under_way_ = false;
};

}  // namespace phub
