#include "phub/core_job.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/error.h"
#include "transport/layout.h"

namespace phub {
namespace {

constexpr size_t kPollBatch = 256;    // arrivals taken in one pass
constexpr uint32_t kFlushAfter = 16;  // chunks whose results go out together while more is coming

constexpr uint32_t kNoChunk = ~0u;

}  // namespace

bool CoreJob::step(uint64_t& bytes) {
  if (!failure_.empty()) return false;
  pay();

  std::array<Arrival, kPollBatch> arrivals;
  const size_t n = endpoint_.poll(arrivals);
  for (size_t i = 0; i < n; ++i) take(arrivals[i]);
  taken_ += n;

  size_t completed = 0;
  for (uint64_t taken = 0; taken < kPassBytes && !ready_.empty(); ++completed) {
    const uint64_t cost = cost_of(chunks_[ready_.front()]);
    if (!complete(ready_.front())) break;
    taken += cost;
    bytes += cost;
  }

  if (n > 0 || completed > 0) note_activity();
  // Doorbells are rung when nothing else is to be done, or for enough results at once.
  const bool busy = n > 0 || completed > 0;
  if (busy) unflushed_ += static_cast<uint32_t>(std::max<size_t>(completed, 1));
  if (unflushed_ > 0 && (!busy || unflushed_ >= kFlushAfter)) {
    unflushed_ = 0;
    const TraceSpan span(trace_log(),
                         trace_ ? trace_->event("flush", TraceEvent::kNone, 0) : TraceEvent());
    endpoint_.flush();
    return true;
  }
  return busy;
}

// Of a chunk that is ready: the gradients that are read, the results, and as much as handling it
// takes.
uint64_t CoreJob::cost_of(const CoreChunk& chunk) const {
  constexpr uint64_t kHandling = 4096;
  return kHandling +
         uint64_t{chunk.elements} * (chunk.arrived * kernels::bytes_of(parameters_.gradient_dtype) +
                                     kernels::bytes_of(parameters_.parameter_dtype));
}

void CoreJob::take(const Arrival& arrival) {
  const uint32_t queue = arrival.qp / parameters_.max_ranks;
  const uint32_t rank = arrival.qp % parameters_.max_ranks;
  Rank& from = ranks_[rank];
  if (!from.attached || from.broken) return;
  if (!arrival.ok) {
    if (arrival.violation) return violation(rank, kNoChunk, CoreReport::kStream, 0);
    from.broken = true;
    report(CoreReport::kBroken, rank, nullptr);
    return;
  }
  const Imm imm = decode(arrival.imm);
  const uint32_t index = queue_first_[queue] + imm.chunk;
  if (index >= queue_first_[queue + 1]) {
    return violation(rank, kNoChunk, CoreReport::kChunk, imm.chunk);
  }
  if (!lies_right(arrival, rank, index, imm)) return;
  ++from.arrivals;
  switch (imm.kind) {
    case ImmKind::kData:
    case ImmKind::kNull:
      return take_gradient(rank, index, imm);
    case ImmKind::kInitial:
      return take_initial(rank, index, imm.round);
    case ImmKind::kControl:
      return violation(rank, index, CoreReport::kKind, arrival.imm & 3u);
  }
}

// Whether the payload is the chunk's, no less and nowhere else: what it did not overwrite would be
// summed as if it had come.
bool CoreJob::lies_right(const Arrival& arrival, uint32_t rank, uint32_t index, const Imm& imm) {
  const CoreChunk& chunk = chunks_[index];
  const uint32_t element = kernels::bytes_of(parameters_.gradient_dtype);
  uint64_t bytes = 0;
  if (imm.kind == ImmKind::kData) bytes = uint64_t{chunk.elements} * element;
  if (imm.kind == ImmKind::kInitial) {
    bytes = initial_part(chunk.elements, element, imm.round).count * sizeof(float);
  }
  if (arrival.fits(bytes, chunk.offset * element)) return true;
  const bool wrong_bytes = arrival.bytes != bytes;
  violation(rank, index, wrong_bytes ? CoreReport::kBytes : CoreReport::kPlace,
            wrong_bytes ? arrival.bytes : arrival.offset);
  return false;
}

void CoreJob::take_gradient(uint32_t rank, uint32_t index, const Imm& imm) {
  if (clocks_) return take_update(rank, index, imm);
  CoreChunk& chunk = chunks_[index];
  const Rank& from = ranks_[rank];
  if (chunk.round == 0 || chunk.round < from.first_round) {
    return violation(rank, index, CoreReport::kRound, imm.round);
  }
  if (imm.round != low8(chunk.round)) {
    // Sent again after a reconnection: the round is complete and its result got lost on the way.
    if (imm.round == low8(chunk.round - 1) && chunk.round > from.first_round) {
      return send_result(rank, index);
    }
    return violation(rank, index, CoreReport::kRound, imm.round);
  }
  if (has(arrived_bits_, index, rank)) return;  // a contribution counts once
  mark_arrived(rank, index, imm.kind == ImmKind::kNull);
  --chunk.missing;
  if (trace_) {
    trace_->arrival(index, chunk.id, chunk.round, rank, chunk.arrived == 1, chunk.missing == 0);
  }
  check_ready(index);
}

void CoreJob::mark_arrived(uint32_t rank, uint32_t index, bool null) {
  CoreChunk& chunk = chunks_[index];
  const uint64_t bit = uint64_t{1} << (rank % 64);
  arrived_bits_[index * words_ + rank / 64] |= bit;
  if (null) null_bits_[index * words_ + rank / 64] |= bit;
  if (!null) counters_[chunk.queue].elements_in += chunk.elements;
  ++chunk.arrived;
  ++ranks_[rank].pending;
}

void CoreJob::take_initial(uint32_t rank, uint32_t index, uint32_t part) {
  CoreChunk& chunk = chunks_[index];
  const uint32_t gradient_bytes = kernels::bytes_of(parameters_.gradient_dtype);
  const uint32_t parts = initial_parts(gradient_bytes);
  if (!parameters_.initial_broadcast || rank != 0 || part >= parts) {
    return violation(rank, index, CoreReport::kKind, static_cast<uint32_t>(ImmKind::kInitial));
  }
  if (chunk.round > 0) return send_result(rank, index);
  if (part > chunk.initial_parts) return violation(rank, index, CoreReport::kRound, part);
  if (part == chunk.initial_parts) {
    const auto [begin, count] = initial_part(chunk.elements, gradient_bytes, part);
    const std::byte* slot = ranks_[rank].slots + chunk.offset * gradient_bytes;
    const size_t element = kernels::bytes_of(parameters_.parameter_dtype);
    if (arrays_.parameters) {
      std::memcpy(arrays_.parameters + chunk.offset + begin, slot, count * sizeof(float));
    }
    if (parameters_.parameter_dtype != kernels::DType::kF32 && !clocks_) {
      kernels::convert(slot, kernels::DType::kF32,
                       arrays_.results + (chunk.offset + begin) * element,
                       parameters_.parameter_dtype, count);
    }
    ++chunk.initial_parts;
    counters_[chunk.queue].elements_in += chunk.elements;
  }
  if (chunk.initial_parts < parts) return send_result(rank, index);
  if (clocks_) return begin_clocks(index);
  begin_round(index, next_round(0));
  write_back(index);
}

// The order of the ready heap: higher priority first, then the order of the keys.
bool CoreJob::lower(uint32_t a, uint32_t b) const {
  if (chunks_[a].priority != chunks_[b].priority) return chunks_[a].priority < chunks_[b].priority;
  return a > b;
}

void CoreJob::check_ready(uint32_t index) {
  CoreChunk& chunk = chunks_[index];
  if (chunk.arrived == 0 || chunk.queued || chunk.round == 0) return;
  if (chunk.missing > 0 && !clocks_) return;
  chunk.queued = true;
  if (clocks_ ? hold_from_ != kNever : chunk.round >= hold_from_) {
    held_.push_back(index);
    return;
  }
  ready_.push_back(index);
  std::push_heap(ready_.begin(), ready_.end(),
                 [this](uint32_t a, uint32_t b) { return lower(a, b); });
}

void CoreJob::pop_ready() {
  std::pop_heap(ready_.begin(), ready_.end(),
                [this](uint32_t a, uint32_t b) { return lower(a, b); });
  chunks_[ready_.back()].queued = false;
  ready_.pop_back();
}

// Completes the first chunk of the ready heap. False: it cannot be completed now.
bool CoreJob::complete(uint32_t index) {
  if (stopped_) return false;
  if (clocks_) return complete_updates(index);
  CoreChunk& chunk = chunks_[index];
  const bool ready = chunk.missing == 0 && chunk.arrived > 0;
  const bool held = chunk.round >= hold_from_;
  if (ready && !held && !reduce_and_optimize(chunk, index)) return false;

  pop_ready();
  if (!ready || held) {
    check_ready(index);  // a boundary came in between
    return true;
  }
  for (uint32_t w = 0; w < words_; ++w) {
    for (uint64_t bits = arrived_bits_[index * words_ + w]; bits != 0; bits &= bits - 1) {
      --ranks_[w * 64 + static_cast<uint32_t>(__builtin_ctzll(bits))].pending;
    }
  }
  ++chunks_completed_;
  ++counters_[chunk.queue].chunks;
  begin_round(index, next_round(chunk.round));
  write_back(index);
  return true;
}

// Slots with a gradient in them, in rank order.
void CoreJob::gather(uint32_t index, const CoreChunk& chunk) {
  const uint64_t slot_offset = chunk.offset * kernels::bytes_of(parameters_.gradient_dtype);
  slots_.clear();
  slot_ranks_.clear();
  for (uint32_t w = 0; w < words_; ++w) {
    const size_t word = size_t{index} * words_ + w;
    for (uint64_t bits = arrived_bits_[word] & ~null_bits_[word]; bits != 0; bits &= bits - 1) {
      const uint32_t rank = w * 64 + static_cast<uint32_t>(__builtin_ctzll(bits));
      slots_.push_back(ranks_[rank].slots + slot_offset);
      slot_ranks_.push_back(rank);
    }
  }
}

// One pass over every slot: sum in rank order into scratch that stays in cache, then the optimizer
// over scratch, state and parameters.
bool CoreJob::reduce_and_optimize(CoreChunk& chunk, uint32_t index) {
  if (parameters_.work == Work::kNone) return true;
  const TraceSpan span(trace_log(), traced("sum and optimize", chunk));
  gather(index, chunk);

  std::byte* result =
      arrays_.results + chunk.offset * kernels::bytes_of(parameters_.parameter_dtype);
  const bool in_place = parameters_.optimizer == kernels::Optimizer::kNone &&
                        parameters_.parameter_dtype == kernels::DType::kF32;
  float* sum = in_place ? reinterpret_cast<float*>(result) : scratch_.data();

  bool finite = kernels::sum(slots_, parameters_.gradient_dtype, factor_of(chunk, chunk.arrived),
                             sum, chunk.elements);
  if (!finite && parameters_.on_nonfinite != OnNonFinite::kPass &&
      !resolve_nonfinite(chunk, chunk.arrived, sum)) {
    return false;
  }
  if (in_place || parameters_.work == Work::kSumOnly) return true;

  float* parameters = arrays_.parameters ? arrays_.parameters + chunk.offset : nullptr;
  const bool separate = static_cast<void*>(parameters) != static_cast<void*>(result);
  kernels::optimize(step_of(chunk).step, sum, parameters,
                    arrays_.state0 ? arrays_.state0 + chunk.offset : nullptr,
                    arrays_.state1 ? arrays_.state1 + chunk.offset : nullptr, chunk.elements,
                    separate ? result : nullptr, parameters_.parameter_dtype, parameters_.store);
  return true;
}

// A NaN or an infinity is in the sum. Stop: the job ends here, its parameters untouched. Exclude:
// the ranks that sent it are left out of this chunk, which is recorded. False: the chunk cannot
// complete.
bool CoreJob::resolve_nonfinite(CoreChunk& chunk, uint32_t participants, float* sum) {
  if (exclusions_ + participants > most_exclusions()) return false;  // taken soon: again
  const size_t reports_before = reports_.size();
  for (;;) {
    const int at = kernels::find_nonfinite(slots_, parameters_.gradient_dtype, chunk.elements);
    if (at < 0 || parameters_.on_nonfinite == OnNonFinite::kStop || participants == 1) {
      exclusions_ -= reports_.size() - reports_before;
      reports_.resize(reports_before);
      stopped_ = true;
      report(CoreReport::kNonFinite,
             at < 0 ? CoreReport::kNoRank : slot_ranks_[static_cast<size_t>(at)], &chunk);
      return false;
    }
    report(CoreReport::kExcluded, slot_ranks_[static_cast<size_t>(at)], &chunk);
    slots_.erase(slots_.begin() + at);
    slot_ranks_.erase(slot_ranks_.begin() + at);
    --participants;
    if (kernels::sum(slots_, parameters_.gradient_dtype, factor_of(chunk, participants), sum,
                     chunk.elements)) {
      return true;
    }
  }
}

// The next round that somebody is expected in. Where everybody who knew a round is gone and the
// others begin later, nobody will ever take part in it: such rounds are skipped, and change
// nothing.
uint64_t CoreJob::next_round(uint64_t round) const {
  if (expected_count_ > 0 && round + 1 >= expected_from_) return round + 1;
  uint64_t next = kNever;
  for (const Rank& rank : ranks_) {
    if (rank.first_round != kNever) next = std::min(next, std::max(rank.first_round, round + 1));
  }
  return next == kNever || next > hold_from_ ? round + 1 : next;
}

void CoreJob::begin_round(uint32_t index, uint64_t round) {
  CoreChunk& chunk = chunks_[index];
  chunk.round = round;
  chunk.arrived = 0;
  chunk.missing = expected_in(round);
  const size_t word = size_t{index} * words_;
  std::fill_n(arrived_bits_.begin() + static_cast<ptrdiff_t>(word), words_, 0);
  std::fill_n(null_bits_.begin() + static_cast<ptrdiff_t>(word), words_, 0);
}

void CoreJob::write_back(uint32_t index) {
  const TraceSpan span(trace_log(), traced("write back", chunks_[index]));
  for (uint32_t rank = 0; rank < attached_end_; ++rank) {
    if (ranks_[rank].attached) send_result(rank, index);
  }
}

// While the initial parameters come in, the result is the word that the last part was taken. A
// result that is withheld is not sent, and comes when it may.
void CoreJob::send_result(uint32_t rank, uint32_t index) {
  const CoreChunk& chunk = chunks_[index];
  const Rank& to = ranks_[rank];
  if (to.broken) return;
  const uint32_t in_queue = index - queue_first_[chunk.queue];
  Write write;
  if (chunk.round == 0) {
    if (chunk.initial_parts == 0) return;
    write.imm = encode({in_queue, chunk.initial_parts - 1u, ImmKind::kInitial});
  } else {
    if (clocks_ && clocks_->withheld(index, rank)) return;
    const uint64_t completed = clocks_ ? clocks_->of(index, rank) : chunk.round - 1;
    if (completed == kNever || completed < to.results_from || to.results_from == kNever) return;
    const size_t element = kernels::bytes_of(parameters_.parameter_dtype);
    write = {.local_offset = rank * arrays_.result_stride + chunk.offset * element,
             .remote_offset = chunk.worker_offset * element,
             .bytes = static_cast<uint32_t>(chunk.elements * element),
             .imm = encode({in_queue, low8(completed), ImmKind::kData})};
  }
  const uint32_t qp = chunk.queue * parameters_.max_ranks + rank;
  if (owed_count_[rank] > 0 || !endpoint_.post(qp, write)) return owe(rank, index);
  if (write.bytes > 0) counters_[chunk.queue].elements_out += chunk.elements;
}

void CoreJob::owe(uint32_t rank, uint32_t index) {
  const size_t words = (chunks_.size() + 63) / 64;
  uint64_t& word = owed_bits_[rank * words + index / 64];
  const uint64_t bit = uint64_t{1} << (index % 64);
  if (word & bit) return;
  word |= bit;
  ++owed_count_[rank];
  ++owed_total_;
}

// Posts results that found a full queue, as far as there is room now.
void CoreJob::pay() {
  if (owed_total_ == 0) return;
  const size_t words = (chunks_.size() + 63) / 64;
  bool posted = false;
  for (uint32_t rank = 0; rank < attached_end_; ++rank) {
    if (owed_count_[rank] == 0 || ranks_[rank].broken) continue;
    const uint32_t count = owed_count_[rank];
    owed_count_[rank] = 0;
    owed_total_ -= count;
    for (size_t w = 0; w < words && owed_count_[rank] == 0; ++w) {
      uint64_t bits = owed_bits_[rank * words + w];
      while (bits != 0 && owed_count_[rank] == 0) {
        const uint32_t bit = static_cast<uint32_t>(__builtin_ctzll(bits));
        bits &= bits - 1;
        owed_bits_[rank * words + w] &= ~(uint64_t{1} << bit);
        send_result(rank, static_cast<uint32_t>(w * 64 + bit));  // may owe() it again
        posted = true;
      }
    }
    uint32_t left = 0;
    for (size_t w = 0; w < words; ++w) {
      left += static_cast<uint32_t>(__builtin_popcountll(owed_bits_[rank * words + w]));
    }
    owed_total_ += left - owed_count_[rank];
    owed_count_[rank] = left;
  }
  if (!posted) return;
  note_activity();
  endpoint_.flush();
}

const CoreJob::CachedStep& CoreJob::step_of(const CoreChunk& chunk) {
  CachedStep& cached = steps_[chunk.hyper_class];
  if (cached.round != chunk.round) {
    const kernels::Hyper hyper = hyper_.of(chunk.round, chunk.hyper_class);
    cached.round = chunk.round;
    cached.step = kernels::make_step(parameters_.optimizer, hyper, chunk.round);
    cached.grad_scale = hyper.grad_scale;
  }
  return cached;
}

float CoreJob::factor_of(const CoreChunk& chunk, uint32_t participants) {
  return static_cast<float>(1.0 /
                            (step_of(chunk).grad_scale * (parameters_.mean ? participants : 1)));
}

bool CoreJob::has(const std::vector<uint64_t>& bits, uint32_t chunk, uint32_t rank) const {
  return (bits[size_t{chunk} * words_ + rank / 64] >> (rank % 64)) & 1;
}

uint32_t CoreJob::expected_in(uint64_t round) const {
  if (round >= expected_from_) return expected_count_;
  return static_cast<uint32_t>(std::count_if(ranks_.begin(), ranks_.end(), [round](const Rank& r) {
    return r.first_round != kNever && r.first_round <= round;
  }));
}

}  // namespace phub
