// CoreJob's cold side: construction, boundaries, reports, sleeping.
#include <algorithm>
#include <utility>

#include "phub/core_job.h"
#include "transport/error.h"

namespace phub {

CoreJob::CoreJob(uint32_t core, const JobParameters& parameters, const JobArrays& arrays,
                 std::vector<CoreChunk> chunks, Endpoint& endpoint, const HyperView& hyper,
                 std::span<const uint32_t> expected, uint32_t queues)
    : endpoint_(endpoint),
      parameters_(parameters),
      arrays_(arrays),
      chunks_(std::move(chunks)),
      ranks_(parameters.max_ranks),
      words_((parameters.max_ranks + 63) / 64),
      core_(core),
      hyper_(hyper) {
  const size_t n = chunks_.size();
  for (uint32_t i = 0; i < n; ++i) {
    while (queue_first_.size() <= chunks_[i].queue) queue_first_.push_back(i);
  }
  PHUB_CHECK(queue_first_.size() <= queues);
  queue_first_.resize(queues + 1, static_cast<uint32_t>(n));
  counters_.resize(queues);
  arrived_bits_.assign(n * words_, 0);
  null_bits_.assign(n * words_, 0);
  ready_.reserve(n);
  held_.reserve(n);
  slots_.reserve(parameters_.max_ranks);
  slot_ranks_.reserve(parameters_.max_ranks);
  owed_bits_.assign(((n + 63) / 64) * parameters_.max_ranks, 0);
  owed_count_.assign(parameters_.max_ranks, 0);
  // One of each rank, one of the sum, and exclusions.
  reports_.reserve(parameters_.max_ranks + 1 + most_exclusions());
  wake_after_.assign((queue_first_.size() - 1) * parameters_.max_ranks, 0);
  steps_.resize(hyper_.scales.size());
  uint32_t largest = 0;
  for (const CoreChunk& chunk : chunks_) largest = std::max(largest, chunk.elements);
  scratch_.resize(largest);
  for (uint32_t rank : expected) ranks_[rank].first_round = 1;
  if (!parameters_.lock_step) {
    clocks_ = std::make_unique<CoreClocks>(n, parameters_.max_ranks, parameters_.slack);
    for (uint32_t i = 0; i < n; ++i) {
      for (uint32_t rank : expected) clocks_->set(i, rank, 0);
    }
  }
  recount_expected();
  for (uint32_t i = 0; i < n; ++i) begin_round(i, parameters_.initial_broadcast ? 0 : 1);
}

void CoreJob::recount_expected() {
  expected_count_ = 0;
  expected_from_ = 0;
  settled_ = false;
  expected_bits_.assign(words_, 0);
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].first_round == kNever) continue;
    ++expected_count_;
    expected_from_ = std::max(expected_from_, ranks_[r].first_round);
    expected_bits_[r / 64] |= uint64_t{1} << (r % 64);
  }
}

CoreReport CoreJob::hold() {
  CoreReport held{.type = CoreReport::kHeld};
  held.min_round = kNever;
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    const CoreChunk& chunk = chunks_[i];
    held.round = std::max(held.round, chunk.round);
    held.min_round = std::min(held.min_round, chunk.round);
    if (clocks_) held.started = std::max(held.started, clocks_->fastest(i));
    const uint64_t present = clocks_ ? clocks_->fastest(i) + 1 : chunk.round;
    if (chunk.arrived > 0) held.started = std::max(held.started, present);
  }
  hold_from_ = held.round;
  return held;
}

uint64_t CoreJob::commit(const Boundary& boundary) {
  uint64_t min_round = kNever;
  note_activity();
  for (const Boundary::Lost& lost : boundary.lost) detach(lost.rank);  // whatever fails afterwards
  for (const Boundary::Lost& lost : boundary.lost) lose(lost);
  for (uint32_t rank : boundary.forgotten) lose({.rank = rank});
  for (const Boundary::Admitted& admitted : boundary.admitted) admit(admitted);
  if (boundary.hyper) {
    hyper_ = *boundary.hyper;
    for (CachedStep& cached : steps_) cached.round = kNever;
  }
  hold_from_ = kNever;
  for (uint32_t index : held_) chunks_[index].queued = false;
  held_.clear();
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    const CoreChunk& chunk = chunks_[i];
    const bool nobody = !clocks_ && chunk.round > 0 && chunk.arrived == 0 && chunk.missing == 0;
    if (const uint64_t next = nobody ? next_round(chunk.round - 1) : 0; next > chunk.round) {
      begin_round(i, next);
      write_back(i);
    }
    check_ready(i);
    min_round = std::min(min_round, chunk.round);
  }
  endpoint_.flush();
  return min_round;
}

// The rank's contributions that can still be relied on stay; it is not waited for any more, unless
// the job pauses for it. REQUIRES: it is not attached.
void CoreJob::lose(const Boundary::Lost& lost) {
  Rank& rank = ranks_[lost.rank];
  const uint64_t first_round = std::exchange(rank.first_round, lost.expected_again);
  const uint64_t bit = uint64_t{1} << (lost.rank % 64);
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    CoreChunk& chunk = chunks_[i];
    if (lost.rank == 0 && chunk.round == 0) chunk.initial_parts = 0;
    if (clocks_) {
      const uint64_t last = lose_clock(lost.rank, i, lost.expected_again);
      if (!lost.last_rounds.empty()) {
        lost.last_rounds[chunk.id] = last >= first_round ? last : 0;
      }
      continue;
    }
    const size_t word = size_t{i} * words_ + lost.rank / 64;
    bool took_part = has(arrived_bits_, i, lost.rank);
    const bool was_expected = first_round <= chunk.round;
    const bool is_expected = rank.first_round <= chunk.round;
    if (took_part && parameters_.slots_belong_to_worker && !(null_bits_[word] & bit)) {
      arrived_bits_[word] &= ~bit;
      --chunk.arrived;
      took_part = false;
      if (is_expected) ++chunk.missing;
    } else if (!took_part && chunk.round > 0) {
      chunk.missing += is_expected;
      chunk.missing -= was_expected;
    }
    if (!lost.last_rounds.empty()) {
      const uint64_t last = took_part ? chunk.round : chunk.round == 0 ? 0 : chunk.round - 1;
      lost.last_rounds[chunk.id] = last >= first_round ? last : 0;
    }
  }
  const size_t words = (chunks_.size() + 63) / 64;
  std::fill_n(owed_bits_.begin() + static_cast<ptrdiff_t>(lost.rank * words), words, 0);
  owed_total_ -= std::exchange(owed_count_[lost.rank], 0);
  rank.results_from = kNever;
  rank.broken = false;
  rank.pending = 0;
  for (uint32_t i = 0; i < chunks_.size(); ++i) rank.pending += has(arrived_bits_, i, lost.rank);
  recount_expected();
}

void CoreJob::admit(const Boundary::Admitted& admitted) {
  Rank& rank = ranks_[admitted.rank];
  const uint64_t expected_before = std::exchange(rank.first_round, admitted.first_round);
  rank.results_from = admitted.first_round - 1;
  rank.slots = admitted.slots.data();
  attach(admitted.rank, admitted.incarnation);
  recount_expected();
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    CoreChunk& chunk = chunks_[i];
    if (clocks_) {
      clocks_->set(i, admitted.rank, admitted.first_round - 1);
      clocks_->withhold(i, admitted.rank, true);
      release(i);
      continue;
    }
    if (chunk.round == 0) continue;
    if (!has(arrived_bits_, i, admitted.rank)) {
      chunk.missing += rank.first_round <= chunk.round;
      chunk.missing -= expected_before <= chunk.round;
    }
    send_result(admitted.rank, i);  // of the round before, where that is complete
  }
  endpoint_.flush();
}

void CoreJob::attach(uint32_t rank, uint32_t incarnation) {
  endpoint_.attach(rank, incarnation);
  ranks_[rank].incarnation = incarnation;
  ranks_[rank].attached = true;
  ranks_[rank].broken = false;
  attached_end_ = std::max(attached_end_, rank + 1);
}

// Results of before may have been lost with the old connection, and not all of them were asked for
// by a contribution that is sent again: the first one of a rank that has just joined was not.
void CoreJob::reattach(uint32_t rank, uint32_t incarnation) {
  note_activity();
  attach(rank, incarnation);
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    if (clocks_ && clocks_->withheld(i, rank)) {
      release(i);  // the slowest may have come closer meanwhile
    } else if (chunks_[i].round > 0 && !has(arrived_bits_, i, rank)) {
      send_result(rank, i);
    }
  }
  endpoint_.flush();
}

void CoreJob::detach(uint32_t rank) {
  if (!ranks_[rank].attached) return;  // a reconnection that was given up
  endpoint_.detach(rank);
  ranks_[rank].attached = false;
}

void CoreJob::detach_all() {
  for (uint32_t rank = 0; rank < attached_end_; ++rank) {
    if (ranks_[rank].attached) detach(rank);
  }
}

void CoreJob::probe(Probe& out) const {
  out.min_round = kNever;
  out.chunks_completed = chunks_completed_;
  out.endpoint = endpoint_.counters();
  std::fill(out.waited_for.begin(), out.waited_for.end(), 0);
  std::fill(out.lacks.begin(), out.lacks.end(), Lack());
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    const CoreChunk& chunk = chunks_[i];
    out.min_round = std::min(out.min_round, chunk.round);
    const bool waited = clocks_ ? anyone_waits(i) : chunk.arrived > 0 && chunk.missing > 0;
    if (!waited) continue;
    for (uint32_t w = 0; w < words_; ++w) {
      const uint64_t bits = lacking(i, w);
      out.waited_for[w] |= bits;
      if (out.lacks.empty()) continue;
      for (uint64_t left = bits; left != 0; left &= left - 1) {
        out.lacks[w * 64 + static_cast<uint32_t>(__builtin_ctzll(left))].add(
            {.chunks = 1, .chunk = chunk.id, .round = chunk.round});
      }
    }
  }
  for (uint32_t r = 0; r < ranks_.size(); ++r) out.arrivals[r] = ranks_[r].arrivals;
  std::copy_n(counters_.begin(), std::min(counters_.size(), out.queues.size()), out.queues.begin());
}

// Whether a result is withheld from a rank that is there. Who has not come waits for nothing.
bool CoreJob::anyone_waits(uint32_t index) const {
  for (uint32_t rank = 0; rank < attached_end_; ++rank) {
    if (clocks_->withheld(index, rank) && ranks_[rank].attached) return true;
  }
  return false;
}

// Of 64 ranks, those that are expected in the chunk's round and not here yet.
uint64_t CoreJob::lacking(uint32_t index, uint32_t word) const {
  const uint64_t arrived = arrived_bits_[size_t{index} * words_ + word];
  const uint64_t round = chunks_[index].round;
  if (clocks_) return slowest(index, word) & ~arrived;
  if (round >= expected_from_) return expected_bits_[word] & ~arrived;
  uint64_t expected = 0;
  const uint32_t end = std::min<uint32_t>((word + 1) * 64, static_cast<uint32_t>(ranks_.size()));
  for (uint32_t r = word * 64; r < end; ++r) {
    expected |= uint64_t{ranks_[r].first_round <= round} << (r % 64);
  }
  return expected & ~arrived;
}

// Of 64 ranks, those whose clock is the lowest.
uint64_t CoreJob::slowest(uint32_t index, uint32_t word) const {
  const uint64_t clock = clocks_->slowest(index);
  uint64_t bits = 0;
  const uint32_t end = std::min<uint32_t>((word + 1) * 64, static_cast<uint32_t>(ranks_.size()));
  for (uint32_t r = word * 64; r < end && clock != kNever; ++r) {
    bits |= uint64_t{clocks_->of(index, r) == clock} << (r % 64);
  }
  return bits;
}

void CoreJob::violation(uint32_t rank, uint32_t index, CoreReport::Violation what, uint64_t said) {
  if (ranks_[rank].broken) return;
  ranks_[rank].broken = true;
  CoreReport& made =
      report(CoreReport::kViolation, rank, index < chunks_.size() ? &chunks_[index] : nullptr);
  made.violation = what;
  made.said = said;
}

// Where it stands until somebody takes it: it may be in the place of an older one.
CoreReport& CoreJob::report(CoreReport::Type type, uint32_t rank, const CoreChunk* chunk) {
  const auto broke = [](CoreReport::Type t) {
    return t == CoreReport::kBroken || t == CoreReport::kViolation;
  };
  const CoreReport report{.type = type,
                          .core = core_,
                          .job = this,
                          .rank = rank,
                          .incarnation = rank < ranks_.size() ? ranks_[rank].incarnation : 0,
                          .chunk = chunk ? chunk->id : 0,
                          .round = chunk ? chunk->round : 0};
  if (broke(type)) {  // of an earlier connection of the rank, nobody wants to know any more
    const auto older = std::find_if(reports_.begin(), reports_.end(), [&](const CoreReport& r) {
      return r.rank == rank && broke(r.type);
    });
    if (older != reports_.end()) return *older = report;
  }
  if (type == CoreReport::kExcluded) ++exclusions_;
  PHUB_CHECK(reports_.size() < reports_.capacity());
  return reports_.emplace_back(report);
}

void CoreJob::fail(const std::string& why) {
  if (failure_.empty()) failure_ = why.empty() ? "it does not say why" : why;
}

bool CoreJob::next_report(CoreReport& out) {
  if (reports_.empty() && !failure_.empty() && !std::exchange(failure_reported_, true)) {
    out = {.type = CoreReport::kFailed, .core = core_, .job = this};
    return true;
  }
  if (reports_.empty()) return false;
  out = reports_.front();
  if (out.type == CoreReport::kExcluded) --exclusions_;
  reports_.erase(reports_.begin());
  return true;
}

bool CoreJob::arm() {
  if (!failure_.empty()) return reports_.empty() && failure_reported_;
  if (unflushed_ > 0) return false;
  if ((!ready_.empty() && !stopped_) || !reports_.empty()) return false;
  // While some rank has sent nothing that is still open, no chunk can complete without it: its
  // first arrival is early enough to wake for. With lock-step workers that is one wake-up a round,
  // not one per rank.
  if (!settled_) {
    const uint64_t from = std::max<uint64_t>(expected_from_, 1);
    settled_ = std::all_of(chunks_.begin(), chunks_.end(),
                           [from](const CoreChunk& chunk) { return chunk.round >= from; });
  }
  uint32_t only = CoreReport::kNoRank;
  const bool quiet = std::exchange(taken_when_armed_, taken_) == taken_;
  if (settled_ && !stopped_ && !clocks_ && !quiet) {
    for (uint32_t r = 0; r < attached_end_ && only == CoreReport::kNoRank; ++r) {
      const Rank& rank = ranks_[r];
      if (rank.attached && !rank.broken && rank.first_round != kNever && rank.pending == 0)
        only = r;
    }
  }
  waits_for_one_ = only != CoreReport::kNoRank;
  if (waits_for_one_) note_activity();  // the next probe looks what others have sent
  for (uint32_t qp = 0; qp < wake_after_.size(); ++qp) {
    wake_after_[qp] = only == CoreReport::kNoRank || only == qp % parameters_.max_ranks;
  }
  return endpoint_.arm(wake_after_);
}

}  // namespace phub
