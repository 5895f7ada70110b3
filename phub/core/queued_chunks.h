// The chunks of a core's part of a job, queue after queue, and what has gone through each queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/slots.h"
#include "phub/core/messages.h"
#include "transport/error.h"
#include "transport/layout.h"

namespace phub {

inline constexpr uint32_t kNoChunk = ~0u;

struct CoreChunk {
  uint64_t round = 0;  // in progress; 0: it awaits initial parameters
  // The offsets are in the box's arrays and in the worker's results, in elements. The bits that
  // they leave free describe the compact form of a matrix's gradient (SlotShape).
  uint64_t offset : 44 = 0;
  uint64_t columns : 20 = 0;
  uint64_t worker_offset : 44 = 0;
  uint64_t limit : 20 = 0;
  int64_t step_offset = 0;        // its optimizer's step in a round is the round plus this
  uint64_t slot_offset : 48 = 0;  // in the slots of a rank, bytes
  kernels::DType dtype = kernels::DType::kF32;  // the type of its gradients, in this round
  uint8_t initial_parts = 0;                    // parts of the initial parameters that have arrived
  uint32_t elements = 0;
  uint32_t id = 0;  // in the plan
  int32_t priority = 0;
  uint16_t expected = 0;  // ranks in this round, idle ones excluded (lock-step only)
  uint16_t missing = 0;   // expected ranks that have not arrived
  uint16_t arrived = 0;   // contributions that have arrived, null ones included
  uint16_t hyper_class = 0;
  uint16_t queue = 0;       // index among the core's queues
  bool closed : 1 = false;  // this round: its result is pending
  bool unused : 1 = false;  // this round: no rank has sent a gradient, so none is applied
  bool vacant : 1 = false;  // this round: no rank takes part, but it completes all the same
  bool lazy : 1 = false;    // the optimizer steps only the rows that some rank has sent
  bool skips : 1 = true;    // a round without a gradient may make no step (JobSpec::unused)
  bool same : 1 = false;    // the latest result equals that of the round before (KeySpec::lazy)
  kernels::SlotForm form : 2 = kernels::SlotForm::kElements;
  kernels::ValueType value : 2 = kernels::ValueType::kF32;  // the type of a fold's values
  kernels::Operation operation : 3 = kernels::Operation::kNone;
  uint8_t schedule : 3 = 0;  // 1 + that of its formats among the job's; 0: the same in every round

  // The shape of a gradient, in this round.
  kernels::SlotShape slot() const { return {elements, dtype, form, columns, limit, fold()}; }
  kernels::Fold fold() const { return {value, operation}; }
  uint64_t slot_bytes() const { return kernels::slot_bytes(slot()); }
  // The content of a slot says how long it is.
  bool says_size() const {
    return form == kernels::SlotForm::kRows || form == kernels::SlotForm::kEither;
  }
  // The bytes of a slot's present content on the wire.
  uint64_t sent_bytes(const std::byte* slot) const {
    if (!says_size()) return slot_bytes();
    const uint32_t first = kernels::row_count(slot);
    if (form == kernels::SlotForm::kRows) return kernels::bytes_of_rows(columns, first);
    return kernels::bytes_behind(first, elements / columns, columns);
  }
  // The slot says that it has more rows or pairs than there may be, also if they would fit there.
  bool says_too_many(const std::byte* slot) const {
    if (form != kernels::SlotForm::kEither) return false;
    const uint32_t first = kernels::row_count(slot);
    return (first & kernels::kPairs) != 0 ? first - kernels::kPairs > limit
                                          : first > elements / columns;
  }
  uint64_t steps_before(uint64_t r) const { return r - 1 + static_cast<uint64_t>(step_offset); }
  void set_steps_before(uint64_t r, uint64_t steps) {
    step_offset = static_cast<int64_t>(steps + 1 - r);
  }
};

// It knows nothing of ranks. Nothing allocates after construction.
class QueuedChunks {
 public:
  // `chunks` come queue after queue, those of a queue in the order of their index in it.
  QueuedChunks(std::vector<CoreChunk> chunks, uint32_t queues)
      : chunks_(std::move(chunks)), counters_(queues) {
    for (uint32_t i = 0; i < size(); ++i) {
      while (queue_first_.size() <= chunks_[i].queue) queue_first_.push_back(i);
    }
    PHUB_CHECK(queue_first_.size() <= queues);
    queue_first_.resize(queues + 1, size());
  }

  uint32_t size() const { return static_cast<uint32_t>(chunks_.size()); }
  CoreChunk& operator[](uint32_t index) { return chunks_[index]; }
  const CoreChunk& operator[](uint32_t index) const { return chunks_[index]; }
  std::span<const CoreChunk> chunks() const { return chunks_; }
  uint32_t index_of(const CoreChunk& chunk) const {  // REQUIRES: it is one of these
    return static_cast<uint32_t>(&chunk - chunks_.data());
  }

  // Returns kNoChunk if the queue has no such chunk.
  uint32_t find(uint32_t queue, uint32_t chunk_of_queue) const {
    const uint32_t index = queue_first_[queue] + chunk_of_queue;
    return index < queue_first_[queue + 1] ? index : kNoChunk;
  }
  uint32_t index_in_queue(uint32_t index) const {
    return index - queue_first_[chunks_[index].queue];
  }
  uint32_t queues() const { return static_cast<uint32_t>(counters_.size()); }

  void count_completed(uint32_t index, uint64_t rounds = 1) {
    chunks_completed_ += rounds;
    counters_[chunks_[index].queue].chunks += rounds;
  }
  uint64_t chunks_completed() const { return chunks_completed_; }
  std::span<QueueCounters> counters() { return counters_; }
  std::span<const QueueCounters> counters() const { return counters_; }

 private:
  std::vector<CoreChunk> chunks_;
  std::vector<uint32_t> queue_first_;    // where each queue's chunks begin in chunks_, and the end
  std::vector<QueueCounters> counters_;  // per queue
  uint64_t chunks_completed_ = 0;
};

static_assert(sizeof(CoreChunk) == 64, "a cache line");
static_assert(kMaxElements < uint64_t{1} << 43 && kMaxTileColumns < 1u << 20 &&
                  kMaxRankLimit < 1u << 20 && kMaxRowsLimit < 1u << 20,
              "a chunk's numbers have as many bits");

}  // namespace phub
