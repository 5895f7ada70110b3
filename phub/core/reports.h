// A job's reports to the control thread, until its core forwards them: at most one about each rank
// whose connection is lost, one about the sum, one about the parent's connection, one about the
// gate or the quorum, two about the switch, and exclusions, which delay their chunk when there are
// too many.
// Nothing allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phub/core/chunk_table.h"
#include "phub/core/messages.h"

namespace phub {

class Reports {
 public:
  Reports(uint32_t core, CoreJob* job, const ChunkTable& table);

  static constexpr size_t most_exclusions(size_t max_ranks) { return max_ranks + 64; }
  static constexpr size_t most(size_t max_ranks) {
    return max_ranks + 5 + most_exclusions(max_ranks);
  }

  // Valid until the next call.
  CoreReport& add(CoreReport::Type type, uint32_t rank, uint32_t index = kNoChunk);
  bool next(CoreReport& out);
  bool empty() const { return reports_.empty(); }

  bool room_for_exclusions(size_t count) const { return exclusions_ + count <= most_exclusions_; }
  size_t size() const { return reports_.size(); }
  // Withdraws the reports that were added since size() was `size`. REQUIRES: they are exclusions.
  void withdraw(size_t size);

 private:
  const uint32_t core_;
  CoreJob* const job_;
  const ChunkTable& table_;
  const size_t most_exclusions_;
  size_t exclusions_ = 0;            // in reports_
  std::vector<CoreReport> reports_;  // fixed capacity
};

}  // namespace phub
