// Follows the application through the recorded sequence. The sequence is a hint: the application
// may omit calls, and make others in between. Only acquisitions (calls that return a buffer) must
// be in order; clocks and releases may come at any time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "worker/geeps/sequence.h"

namespace phub::geeps {

// Steps are counted through the iterations: iteration · operations + step.
class Follower {
 public:
  Follower() = default;
  explicit Follower(const Sequence& sequence);

  // Returns the step of an acquisition, or nullopt if it is outside the sequence. If two
  // acquisitions in a row follow one another elsewhere in the sequence, the second continues there.
  std::optional<uint64_t> follow(Call call, uint32_t table, std::span<const uint64_t> keys);
  // The step of the latest acquisition or, if that was outside the sequence, of the next one with
  // the same call and rows. nullopt if the sequence has none.
  std::optional<uint64_t> last() const { return last_; }
  // Returns the step of a TableClock: the table's next one, or nullopt if the sequence has none.
  std::optional<uint64_t> clock(uint32_t table);
  // The number of TableClocks of the table between the application's position and this step.
  uint64_t clocks_before(uint32_t table, uint64_t step) const;

  uint64_t next() const { return next_; }  // the expected step
  uint64_t length() const { return operations_.size(); }
  // Names the actual call and the expected one, for strict mode.
  std::string deviation(Call call, uint32_t table, std::span<const uint64_t> keys) const;

 private:
  bool matches(uint64_t step, Call call, uint32_t table, std::span<const uint64_t> keys) const;
  uint64_t acquisition_from(uint64_t step) const;  // the next one, from this step on

  std::vector<TableInfo> tables_;
  std::vector<KeyList> lists_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> next_acquisition_;            // by step: steps to it, around the circle
  std::vector<std::optional<uint32_t>> clock_steps_;  // by table
  std::vector<uint64_t> clocked_;  // by table: TableClocks before this step were called
  uint64_t next_ = 0;
  std::optional<uint64_t> last_;
  std::optional<uint64_t> elsewhere_;  // the step that would follow the latest call, if outside
};

}  // namespace phub::geeps
