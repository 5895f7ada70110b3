// CoreJob for jobs that are not in lock-step (SSP, async): every update is applied when it comes,
// and a rank gets the parameters back as soon as the slowest is within the slack.
//
// Others may change a chunk while its parameters are on their way: each rank has results of its
// own, copied at one instant.
#include <cstring>

#include "phub/core_job.h"
#include "transport/error.h"

namespace phub {
void CoreJob::take_update(uint32_t rank, uint32_t index, const Imm& imm) {
  const CoreChunk& chunk = chunks_[index];
  const uint64_t clock = clocks_->of(index, rank);
  if (chunk.round == 0 || clock == kNever) {
    return violation(rank, index, CoreReport::kRound, imm.round);
  }
  if (imm.round == low8(clock) && clock >= ranks_[rank].first_round) {
    return send_result(rank, index);  // sent again after a reconnection: applied already
  }
  if (imm.round != low8(clock + 1)) {
    return violation(rank, index, CoreReport::kRound, imm.round);
  }
  if (has(arrived_bits_, index, rank)) return;  // an update counts once
  mark_arrived(rank, index, imm.kind == ImmKind::kNull);
  if (trace_) trace_->arrival(index, chunk.id, clock + 1, rank, true, true);
  check_ready(index);
}

// Applies what has arrived at the first chunk of the ready heap, in the order of the ranks. False:
// it cannot be done now.
bool CoreJob::complete_updates(uint32_t index) {
  const bool held = hold_from_ != kNever;  // a boundary: nobody's clock moves
  for (uint32_t w = 0; w < words_ && !held; ++w) {
    const size_t word = size_t{index} * words_ + w;
    for (uint64_t bits = arrived_bits_[word]; bits != 0; bits &= bits - 1) {
      if (!apply(w * 64 + static_cast<uint32_t>(__builtin_ctzll(bits)), index)) return false;
    }
  }
  pop_ready();
  if (held) {
    check_ready(index);
  } else {
    release(index);
  }
  return true;
}

// One update, by one rank: a step of the optimizer, or plain addition. False: it cannot be done
// now.
bool CoreJob::apply(uint32_t rank, uint32_t index) {
  if (!has(null_bits_, index, rank) && !add_update(rank, index)) return false;
  drop_update(rank, index);
  clocks_->tick(index, rank);
  clocks_->withhold(index, rank, true);
  return true;
}

void CoreJob::drop_update(uint32_t rank, uint32_t index) {
  const size_t word = size_t{index} * words_ + rank / 64;
  const uint64_t bit = uint64_t{1} << (rank % 64);
  arrived_bits_[word] &= ~bit;
  null_bits_[word] &= ~bit;
  --chunks_[index].arrived;
  --ranks_[rank].pending;
}

bool CoreJob::add_update(uint32_t rank, uint32_t index) {
  const CoreChunk& chunk = chunks_[index];
  const uint64_t round = clocks_->of(index, rank) + 1;
  TraceEvent event = traced("update", chunk);
  event.round = round, event.rank = rank;
  const TraceSpan span(trace_log(), event);

  const kernels::Hyper hyper = hyper_.of(round, chunk.hyper_class);
  const auto factor =
      static_cast<float>(1.0 / (hyper.grad_scale * (parameters_.mean ? expected_count_ : 1)));
  const void* slot =
      ranks_[rank].slots + chunk.offset * kernels::bytes_of(parameters_.gradient_dtype);
  const bool finite =
      kernels::sum({&slot, 1}, parameters_.gradient_dtype, factor, scratch_.data(), chunk.elements);
  if (!finite && parameters_.on_nonfinite != OnNonFinite::kPass) {
    if (exclusions_ + 1 > most_exclusions()) return false;  // taken soon: again
    stopped_ = parameters_.on_nonfinite == OnNonFinite::kStop;
    report(stopped_ ? CoreReport::kNonFinite : CoreReport::kExcluded, rank, &chunk).round = round;
    return !stopped_;  // left out, it changes nothing
  }

  // Without an optimizer the parameters are the running sum: p − (−1)·g is p + g, to the bit.
  const bool adds = parameters_.optimizer == kernels::Optimizer::kNone;
  const kernels::Step step =
      adds ? kernels::make_step(kernels::Optimizer::kSgd, {.lr = -1}, 1)
           : kernels::make_step(parameters_.optimizer, hyper, clocks_->next_update(index));
  kernels::optimize(step, scratch_.data(), arrays_.parameters + chunk.offset,
                    arrays_.state0 ? arrays_.state0 + chunk.offset : nullptr,
                    arrays_.state1 ? arrays_.state1 + chunk.offset : nullptr, chunk.elements,
                    nullptr, parameters_.parameter_dtype, kernels::Store::kCached);
  return true;
}

// The slowest rank may have moved: notes the round in progress, and sends the results that may go.
void CoreJob::release(uint32_t index) {
  CoreChunk& chunk = chunks_[index];
  const uint64_t slowest = clocks_->slowest(index);
  if (slowest == kNever || chunk.round == 0) return;
  if (slowest + 1 > chunk.round) {
    chunks_completed_ += slowest + 1 - chunk.round;
    counters_[chunk.queue].chunks += slowest + 1 - chunk.round;
  }
  chunk.round = slowest + 1;
  for (uint32_t rank = 0; rank < attached_end_; ++rank) {
    if (!clocks_->withheld(index, rank) || !ranks_[rank].attached) continue;
    if (!clocks_->may_have(clocks_->of(index, rank), slowest)) continue;
    clocks_->withhold(index, rank, false);
    copy_result(rank, chunk);
    send_result(rank, index);
  }
}

void CoreJob::copy_result(uint32_t rank, const CoreChunk& chunk) {
  const float* parameters = arrays_.parameters + chunk.offset;
  std::byte* result = arrays_.results + rank * arrays_.result_stride +
                      chunk.offset * kernels::bytes_of(parameters_.parameter_dtype);
  if (parameters_.parameter_dtype == kernels::DType::kF32) {
    std::memcpy(result, parameters, chunk.elements * sizeof(float));
  } else {
    kernels::convert(parameters, kernels::DType::kF32, result, parameters_.parameter_dtype,
                     chunk.elements);
  }
}

// The initial parameters of a chunk are here: everyone gets them.
void CoreJob::begin_clocks(uint32_t index) {
  chunks_[index].round = 1;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (clocks_->of(index, rank) != kNever) clocks_->withhold(index, rank, true);
  }
  release(index);
}

// See lose(): what the rank sent and can be relied on is applied now. Returns the last round that
// it took part in.
uint64_t CoreJob::lose_clock(uint32_t rank, uint32_t index, uint64_t expected_again) {
  if (has(arrived_bits_, index, rank)) {
    const bool reliable = !parameters_.slots_belong_to_worker || has(null_bits_, index, rank);
    if (!reliable || stopped_ || !apply(rank, index)) drop_update(rank, index);
  }
  const uint64_t last = clocks_->of(index, rank);
  clocks_->withhold(index, rank, false);
  clocks_->set(index, rank, expected_again == kNever ? kNever : expected_again - 1);
  release(index);
  return last == kNever ? 0 : last;
}

}  // namespace phub
