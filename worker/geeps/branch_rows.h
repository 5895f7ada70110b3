// The rows of a local table, of each branch of a job. The rows of the branch that runs are in the
// table's memory, the *home*. A row that another branch has as the home has it takes no memory. The
// first write after a fork keeps the old row for the branches that share it (copy on write).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "worker/geeps/rows.h"

namespace phub::geeps {

// keep() may be called by several threads, of different rows. Other calls REQUIRE that nobody
// writes rows or, for enter(), reads them.
class BranchRows {
 public:
  BranchRows(std::span<float> home, uint32_t row_floats);  // the rows of one branch, which runs
  BranchRows(const BranchRows&) = delete;
  BranchRows& operator=(const BranchRows&) = delete;

  // These rows of the home are to be written: by `source`, counted from the row `first`.
  void keep(std::span<const Run> runs, uint32_t first = 0);

  // A branch that has no rows here fails with Error(kInternal).
  void fork_running(uint32_t child);                // a copy of the branch that runs
  void fork(uint32_t parent, uint32_t child);       // a copy of another branch
  void enter(uint32_t branch, uint32_t before);     // `before` is the branch that ran so far
  void retain(const std::set<uint32_t>& branches);  // the others that do not run are gone
  uint64_t bytes() const;                           // the rows of all branches but the one that
                                                    // runs

  // The state for a checkpoint: all rows but the home.
  std::vector<std::byte> saved() const;
  // REQUIRES: the home is as it was then. Throws Error(kMismatch) if it is not what saved() of a
  // table with as many rows of this size returned; `what` names it.
  void restore(std::span<const std::byte> saved, const std::string& what);

 private:
  using Places = std::vector<uint32_t>;  // by row: where a branch has it
  static constexpr uint32_t kHome = ~uint32_t{0};

  std::span<float> row(uint32_t row) const {
    return home_.subspan(size_t{row} * row_floats_, row_floats_);
  }
  uint32_t add_copy();
  std::map<uint32_t, Places>::iterator find(uint32_t branch);

  std::span<float> home_;
  uint32_t row_floats_;
  uint32_t rows_;
  mutable std::mutex mutex_;                      // guards the members below
  std::map<uint32_t, Places> branches_;           // those that do not run
  std::vector<std::unique_ptr<float[]>> copies_;  // a row each; null: free
  std::vector<uint32_t> free_;
};

}  // namespace phub::geeps
