// Where the application is in the recorded sequence. The sequence is a hint: calls may be left out,
// and there may be others in between. Only what asks for a buffer is followed closely: clocks and
// releases may come at any time.
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

  // The step of a call that asks for a buffer; nothing if it is outside of the sequence. After two
  // calls in a row that follow one another elsewhere in it, the second is taken as that step.
  std::optional<uint64_t> follow(Call call, uint32_t table, std::span<const uint64_t> keys);
  // The step of the last call that asked for a buffer: its place in the sequence or, of one that
  // was outside, the next one like it. Nothing: there is none like it.
  std::optional<uint64_t> last() const { return last_; }
  // The step of a TableClock: the next of this table; nothing if the sequence has none.
  std::optional<uint64_t> clock(uint32_t table);
  // TableClocks of the table from the application's place on that come before this step.
  uint64_t clocks_before(uint32_t table, uint64_t step) const;

  uint64_t next() const { return next_; }  // the step that is expected
  uint64_t length() const { return operations_.size(); }
  // What is expected, and what came instead, for strict mode.
  std::string deviation(Call call, uint32_t table, std::span<const uint64_t> keys) const;

 private:
  bool matches(uint64_t step, Call call, uint32_t table, std::span<const uint64_t> keys) const;
  uint64_t acquisition_from(uint64_t step) const;  // the next that asks for a buffer

  std::vector<TableInfo> tables_;
  std::vector<KeyList> lists_;
  std::vector<Operation> operations_;
  std::vector<uint32_t> next_acquisition_;            // by step: this or later; circular distance
  std::vector<std::optional<uint32_t>> clock_steps_;  // by table
  std::vector<uint64_t> clocked_;  // by table: clocks before this step are called
  uint64_t next_ = 0;
  std::optional<uint64_t> last_;
  std::optional<uint64_t> elsewhere_;  // the step after that of a call which was outside
};

}  // namespace phub::geeps
