#include "phub/core/core_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "phub/core/clocked.h"
#include "phub/core/gated.h"
#include "phub/core/lock_step.h"
#include "phub/core/mirrored.h"
#include "phub/core/quorum.h"
#include "phub/core/uplinked.h"
#include "transport/error.h"
#include "transport/layout.h"

namespace phub {
namespace {

constexpr size_t kPollBatch = 256;  // arrivals received in one pass

uint64_t multiplications_of(const CoreChunk& chunk) {
  const bool may_multiply =
      chunk.form == kernels::SlotForm::kFactors || chunk.form == kernels::SlotForm::kEither;
  return may_multiply ? chunk.limit * chunk.elements : 0;
}

std::unique_ptr<Way> way_of(const Stages& stages, const CoreJob::MakeLockStep& make_lock_step) {
  if (!stages.parameters.rules.lock_step()) return std::make_unique<Clocked>(stages);
  return make_lock_step ? make_lock_step(stages) : std::make_unique<LockStep>(stages);
}

}  // namespace

CoreJob::CoreJob(uint32_t core, const JobParameters& parameters, const JobArrays& arrays,
                 std::vector<CoreChunk> chunks, BoxEndpoint& endpoint, const HyperView& hyper,
                 std::span<const uint32_t> expected, uint32_t queues,
                 const MakeLockStep& make_lock_step, SlotWindow* window, SharedSlots* shared)
    : endpoint_(endpoint),
      parameters_(parameters),
      table_(std::move(chunks), queues, parameters.max_ranks, expected, {window, shared},
             parameters_.schedules),
      check_(parameters_, table_),
      ready_(table_.chunks()),
      places_(arrays, table_),
      reports_(core, this, table_),
      reducer_(parameters_, arrays, places_, hyper, table_, reports_, trace_),
      outbox_(parameters_, arrays, endpoint, table_, trace_),
      moves_(arrays, places_, table_, trace_),
      shelves_(arrays, places_, table_, moves_, trace_),
      way_(way_of({parameters_, table_, reducer_, outbox_, trace_, reports_, shelves_, endpoint_},
                  make_lock_step)),
      intake_(way_->intake()),
      shortage_(window, parameters_.progress_limit_ms, table_.size()),
      core_(core),
      wake_after_(parameters.max_ranks) {
  if (window != nullptr && shared == nullptr) endpoint_.use_window(*window);
  if (!parameters_.rack_ranks.empty()) table_.count_rack_ranks();
  if (parameters_.rules.weighs()) table_.keep_weights();
  // Below a parent the result of the round before the first is still to come.
  const uint64_t beginning = parameters_.rules.initial_broadcast() ? 0 : 1;
  const uint64_t first = parameters_.first_round > 0 ? parameters_.first_round : beginning;
  for (uint32_t i = 0; i < table_.size(); ++i) {
    table_.begin_round(i, parameters_.has_parent ? parameters_.first_round - 1 : first);
    table_[i].closed = parameters_.has_parent;
  }
}

uint64_t CoreJob::bytes(const Size& size) {
  return sizeof(CoreJob) + ChunkTable::bytes(size.chunks, size.queues, size.max_ranks) +
         ReadyChunks::bytes(size.chunks) +
         Outbox::bytes({size.chunks, size.queues, size.max_ranks, size.gated, size.shares_slots}) +
         Moves::bytes(size.chunks) + Reports::most(size.max_ranks) * sizeof(CoreReport) +
         Reducer::bytes(size.max_ranks, size.classes, size.largest_chunk, size.levels,
                        size.differences, size.lazy, size.weighs) +
         (size.weighs ? ChunkTable::weight_bytes(size.chunks, size.max_ranks) : 0) +
         RankTree::bytes(size.levels, size.max_ranks) +
         (size.places > 1 ? Places::bytes(size.chunks, size.places) : 0) +
         (size.lock_step ? 0 : CoreClocks::bytes(size.chunks, size.max_ranks)) +
         (size.gated ? Gated::bytes(size.chunks) : 0) +
         (size.fragments > 0 ? Quorum::bytes(size.chunks, size.max_ranks, size.fragments) : 0) +
         (size.of_racks ? ChunkTable::rack_bytes(size.chunks) : 0) +
         (size.has_parent ? Uplinked::bytes(size.chunks) : 0) +
         (size.has_standby ? Mirrored<LockStep>::bytes(size.chunks) : 0) +
         size.max_ranks * sizeof(uint32_t);  // wake_after_
}

bool CoreJob::step(uint64_t& bytes) {
  if (!failure_.empty()) return false;
  if (!parameters_.rules.lock_step()) return pass(static_cast<Clocked&>(*way_), bytes);
  return parameters_.rules.quorum > 0 ? pass(static_cast<Quorum&>(*way_), bytes)
                                      : pass(static_cast<LockStep&>(*way_), bytes);
}

template <typename TheWay>
bool CoreJob::pass(TheWay& way, uint64_t& bytes) {
  const auto completed_round = [&way](uint32_t r, uint32_t i) { return way.completed(r, i); };
  const auto taken_round = [&way](uint32_t r, uint32_t i) { return way.taken(r, i); };
  if (outbox_.pay(completed_round, taken_round)) {
    retries_in_vain_ = 0;
    note_activity();
  }

  std::array<Arrival, kPollBatch> arrivals;
  const size_t n = endpoint_.poll(arrivals);
  for (size_t i = 0; i < n; ++i) receive(way, arrivals[i]);
  arrivals_ += n;
  // The ranks of a round are not final while a boundary holds it.
  const bool more = intake_ && table_.hold_from == kNever && take_in(way, bytes);

  size_t handled = 0;  // chunks
  uint64_t spent = 0;
  bool went_on = false;  // then it may have sent results of rounds that were passed over
  if (!reducer_.stopped()) {
    while (spent < kPassBytes && finish_pending(way, spent)) ++handled;
    went_on = way.moved_on();
    if (went_on) insert_ready();
    while (spent < kPassBytes && close_ready(way, spent)) ++handled;
  }
  bytes += spent;
  pass_was_full_ = spent >= kPassBytes;
  if (n == 0 && !more && handled == 0 && moves_.make_when_idle(way, bytes)) ++handled;

  const bool moved = n > 0 || more || went_on || handled > 0;
  if (moved) note_activity();
  return outbox_.flush_if_due(moved, handled) || moved;
}

template <typename TheWay>
void CoreJob::receive(TheWay& way, const Arrival& arrival) {
  const uint32_t rank = arrival.rank;
  CoreRank& from = table_.rank(rank);
  if (!from.attached || from.broken) return;
  if (!arrival.ok) return lose_connection(rank, arrival.violation);
  const Imm imm = decode(arrival.imm);
  const uint32_t index = table_.find(arrival.queue, imm.chunk);
  if (index == kNoChunk) return violation(rank, kNoChunk, CoreReport::kChunk, imm.chunk);
  if (arrival.bytes > 0 && table_.has_lost_slot(rank, index)) {
    return receive_lost(way, rank, index);
  }
  ArrivalCheck::Trailer trailer;
  if (const auto refused = check_(arrival, index, imm, trailer)) {
    return violation(rank, index, refused->what, refused->said);
  }
  ++from.arrivals;
  const bool heard_before = table_.is_heard(rank, index);
  table_.hear(rank, index);
  if (imm.kind == ImmKind::kInitial) {
    receive_initial(rank, index, imm.round, heard_before);
    return table_.free_unread_slot(rank, index);
  }
  if (imm.kind == ImmKind::kControl) return receive_request(rank, index, imm, heard_before);
  if (intake_) intake_->took_directly(rank, index);
  switch (way.accept(rank, index, imm)) {
    case Way::Verdict::kAccepted:
      if (check_.is_of_racks()) table_.add_participants(index, rank, trailer.participants);
      if (table_.has_weights()) table_.set_weight(rank, index, trailer.weight);
      if (way.ready(index)) make_ready(index);
      break;
    case Way::Verdict::kDuplicate:
      outbox_.tell_taken(rank, index, way.taken(rank, index));
      break;
    case Way::Verdict::kComplete:
      // The round came otherwise, and the rank did not know yet: its result is on its way.
      if (!intake_ || !heard_before) way.resend(rank, index);
      outbox_.tell_taken(rank, index, way.taken(rank, index));
      break;
    case Way::Verdict::kWrongRound:
      violation(rank, index, CoreReport::kRound, imm.round);
      break;
  }
  table_.free_unread_slot(rank, index);
}

// A contribution that came once more had the place of the first, and the chunk was closed before
// it was looked at.
template <typename TheWay>
void CoreJob::receive_lost(TheWay& way, uint32_t rank, uint32_t index) {
  table_.hear(rank, index);
  if (!table_[index].closed) way.resend(rank, index);
}

// A rank asks for the result of the round before its first one. Later results are asked for by the
// contribution.
void CoreJob::receive_request(uint32_t rank, uint32_t index, const Imm& imm, bool heard_before) {
  if (imm.round != low8(table_.rank(rank).first_round - 1)) {
    return violation(rank, index, CoreReport::kKind, static_cast<uint32_t>(imm.kind));
  }
  // A rack may have asked, and got initial parameters that overtook this: one answer is enough.
  if (!heard_before) way_->resend(rank, index);
}

// False: nothing has come.
template <typename TheWay>
bool CoreJob::take_in(TheWay& way, uint64_t& bytes) {
  const uint64_t before = bytes;
  for (uint32_t index = intake_->take_in(bytes); index != kNoChunk;
       index = intake_->take_in(bytes)) {
    ++arrivals_;
    if (way.ready(index)) make_ready(index);
  }
  return bytes > before;
}

void CoreJob::receive_initial(uint32_t rank, uint32_t index, uint32_t part, bool heard_before) {
  CoreChunk& chunk = table_[index];
  const uint64_t slot_bytes = table_.most_slot_bytes(chunk);
  const uint32_t parts = initial_parts(chunk.elements, slot_bytes);
  if (!parameters_.rules.initial_broadcast() || rank != 0 || part >= parts) {
    return violation(rank, index, CoreReport::kKind, static_cast<uint32_t>(ImmKind::kInitial));
  }
  if (chunk.round == 0) {
    if (chunk.initial_parts == parts) return;  // a parent has them, and has not answered yet
    if (part > chunk.initial_parts) return violation(rank, index, CoreReport::kRound, part);
    if (part == chunk.initial_parts) {
      way_->store_initial(index, part);
      ++chunk.initial_parts;
      table_.counters()[chunk.queue].bytes_in +=
          initial_part(chunk.elements, slot_bytes, part).count * sizeof(float);
    }
    if (chunk.initial_parts == parts) {
      way_->begin(index);
      if (way_->ready(index)) make_ready(index);
      return moves_.reached(index);
    }
    return outbox_.send(rank, index, kNever);  // the part was taken
  }
  // A rank that came after another had sent them got the result at its admission: not twice.
  if (!heard_before) way_->resend(rank, index);
}

// The cost of a chunk of which `ranks` gradients are read: their bytes, the result's, and a
// constant. A multiplication of factors takes about as long as a byte.
uint64_t CoreJob::cost_of(const CoreChunk& chunk, uint32_t ranks) const {
  return kHandling + ranks * (chunk.slot_bytes() + multiplications_of(chunk)) +
         kernels::slot_bytes(parameters_.rules.parameter_dtype, chunk.elements);
}

void CoreJob::insert_ready() {
  for (uint32_t i = 0; i < table_.size(); ++i) {
    moves_.reached(i);  // a round may have been passed over
    if (way_->ready(i)) make_ready(i);
  }
}

// False: there is none, or it cannot be closed now.
template <typename TheWay>
bool CoreJob::close_ready(TheWay& way, uint64_t& bytes) {
  if (ready_.empty()) return false;
  const uint32_t index = ready_.first();
  uint64_t cost = cost_of(table_[index], table_[index].arrived);
  const bool still_ready = way.ready(index);  // unless a boundary came in between
  if (still_ready) cost += moves_.make_due(index, way);
  const Way::Closed closed = still_ready ? way.close(index) : Way::Closed::kNotNow;
  if (still_ready && closed == Way::Closed::kNotNow) return false;
  ready_.erase(index);
  // A state that a rank has set differs from the result of the round before.
  if (moves_.sets(index)) table_[index].same = false;
  if (closed == Way::Closed::kDone) cost += finish(way, index);
  if (closed == Way::Closed::kPending) {
    table_.free_slots(index);
    table_[index].closed = true;
    if (outbox_.tells_taken()) {
      table_.for_each_gradient(
          index, [&](uint32_t rank) { outbox_.tell_taken(rank, index, way.taken(rank, index)); });
    }
  }
  bytes += cost;
  return true;
}

// Returns false if no pending chunk is done now.
template <typename TheWay>
bool CoreJob::finish_pending(TheWay& way, uint64_t& bytes) {
  const uint32_t index = way.next_done();
  if (index == kNoChunk) return false;
  PHUB_CHECK(table_[index].closed);
  bytes += cost_of(table_[index], 0) + finish(way, index);
  return true;
}

// Returns how many bytes were read and written for orders about branches before the next round.
template <typename TheWay>
uint64_t CoreJob::finish(TheWay& way, uint32_t index) {
  way.finish(index);
  moves_.reached(index);
  if (way.ready(index)) make_ready(index);  // if it follows
  return shelves_.take_cost();
}

void CoreJob::lose_connection(uint32_t rank, bool by_violation) {
  if (by_violation) return violation(rank, kNoChunk, CoreReport::kStream, 0);
  table_.rank(rank).broken = true;
  reports_.add(CoreReport::kBroken, rank);
}

void CoreJob::violation(uint32_t rank, uint32_t index, CoreReport::Violation what, uint64_t said) {
  if (std::exchange(table_.rank(rank).broken, true)) return;
  CoreReport& report = reports_.add(CoreReport::kViolation, rank, index);
  report.violation = what;
  report.said = said;
}

void CoreJob::fail(const std::string& why) {
  if (failure_.empty()) failure_ = why.empty() ? "it does not say why" : why;
}

bool CoreJob::next_report(CoreReport& out) {
  if (reports_.next(out)) return true;
  if (const Move* move = moves_.take_complete()) {
    out = {.type = move->done(), .core = core_, .job = this, .round = move->chunks.round()};
    return true;
  }
  if (failure_.empty() || std::exchange(failure_reported_, true)) return false;
  out = {.type = CoreReport::kFailed, .core = core_, .job = this};
  return true;
}

uint64_t CoreJob::retry_ms() {
  constexpr uint32_t kMostDoublings = 12;  // to four seconds
  uint64_t ms = kNever;
  const auto within = [&ms](uint64_t ns) {
    constexpr uint64_t kMs = 1'000'000, kLongestBudgetMs = 1000;
    ms = std::min(ms, std::clamp<uint64_t>((ns + kMs - 1) / kMs, 1, kLongestBudgetMs));
  };
  if (const uint64_t sums = way_->waits_for_room_ns(); sums > 0) within(sums);
  if (shortage_.is_there()) within(shortage_.look_ns());
  if (!outbox_.owes()) return ms;
  if (const uint64_t budget = endpoint_.refused_for_ns(); budget > 0) {
    within(budget);
  } else {
    ms = std::min(ms, uint64_t{1} << std::min(retries_in_vain_++, kMostDoublings));
  }
  return ms;
}

bool CoreJob::arm() {
  if (!failure_.empty()) return reports_.empty() && failure_reported_;
  if (outbox_.has_unflushed() || !reports_.empty()) return false;
  if ((pass_was_full_ || !ready_.empty()) && !reducer_.stopped()) return false;
  if (moves_.are_due()) return false;
  if (shortage_.relieve(table_, *way_, outbox_, arrivals_, endpoint_.now_ns())) return false;
  if (!way_->arm()) return false;
  const bool quiet = std::exchange(arrivals_when_armed_, arrivals_) == arrivals_;
  const uint32_t only =
      quiet || reducer_.stopped() ? CoreReport::kNoRank : way_->indispensable_rank();
  waits_for_one_ = only != CoreReport::kNoRank;
  if (waits_for_one_) note_activity();  // the next probe looks for others' contributions
  for (uint32_t rank = 0; rank < wake_after_.size(); ++rank) {
    wake_after_[rank] = !waits_for_one_ || only == rank;
  }
  return endpoint_.arm(wake_after_);
}

}  // namespace phub
