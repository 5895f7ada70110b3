#include "phub/core/core_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "phub/core/clocked.h"
#include "phub/core/gated.h"
#include "phub/core/lock_step.h"
#include "phub/core/uplinked.h"
#include "transport/error.h"
#include "transport/layout.h"

namespace phub {
namespace {

constexpr size_t kPollBatch = 256;    // arrivals received in one pass
constexpr uint64_t kHandling = 4096;  // the cost of a chunk or a packet beside its bytes

uint64_t multiplications_of(const CoreChunk& chunk) {
  return chunk.form == kernels::SlotForm::kFactors ? chunk.limit * chunk.elements : 0;
}

std::unique_ptr<Way> way_of(const Stages& stages, const CoreJob::MakeLockStep& make_lock_step) {
  if (!stages.parameters.lock_step) return std::make_unique<Clocked>(stages);
  return make_lock_step ? make_lock_step(stages) : std::make_unique<LockStep>(stages);
}

}  // namespace

CoreJob::CoreJob(uint32_t core, const JobParameters& parameters, const JobArrays& arrays,
                 std::vector<CoreChunk> chunks, BoxEndpoint& endpoint, const HyperView& hyper,
                 std::span<const uint32_t> expected, uint32_t queues,
                 const MakeLockStep& make_lock_step)
    : endpoint_(endpoint),
      parameters_(parameters),
      table_(std::move(chunks), queues, parameters.max_ranks, expected),
      ready_(table_.chunks()),
      following_(table_.chunks()),
      places_(arrays, table_),
      reports_(core, this, table_),
      reducer_(parameters_, arrays, places_, hyper, table_, reports_, trace_),
      outbox_(parameters_, arrays, endpoint, table_, trace_),
      snapshot_(arrays, places_, table_, trace_),
      states_(places_, table_, trace_),
      shelves_(arrays, places_, table_, snapshot_, states_, trace_),
      way_(way_of({parameters_, table_, reducer_, outbox_, trace_, reports_, shelves_},
                  make_lock_step)),
      core_(core),
      wake_after_(parameters.max_ranks) {
  if (!parameters_.rack_ranks.empty()) table_.count_rack_ranks();
  // Below a parent the result of the round before the first is still to come.
  const uint64_t beginning = parameters_.initial_broadcast ? 0 : 1;
  const uint64_t first = parameters_.first_round > 0 ? parameters_.first_round : beginning;
  for (uint32_t i = 0; i < table_.size(); ++i) {
    table_.begin_round(i, parameters_.has_parent ? parameters_.first_round - 1 : first);
    table_[i].closed = parameters_.has_parent;
  }
}

uint64_t CoreJob::bytes(const Size& size) {
  return sizeof(CoreJob) + ChunkTable::bytes(size.chunks, size.queues, size.max_ranks) +
         2 * ReadyChunks::bytes(size.chunks) +
         Outbox::bytes({size.chunks, size.queues, size.max_ranks, size.gated}) +
         DueChunks::bytes(size.chunks) + KeyStates::bytes(size.chunks) +
         Reports::most(size.max_ranks) * sizeof(CoreReport) +
         Reducer::bytes(size.max_ranks, size.classes, size.largest_chunk, size.levels,
                        size.differences, size.lazy) +
         RankTree::bytes(size.levels, size.max_ranks) +
         (size.places > 1 ? Places::bytes(size.chunks, size.places) : 0) +
         (size.lock_step ? 0 : CoreClocks::bytes(size.chunks, size.max_ranks)) +
         (size.gated ? Gated::bytes(size.chunks) : 0) +
         (size.of_racks ? ChunkTable::rack_bytes(size.chunks) : 0) +
         (size.has_parent ? Uplinked::bytes(size.chunks) : 0) +
         size.max_ranks * sizeof(uint32_t);  // wake_after_
}

void CoreJob::take_sums_of(std::unique_ptr<SwitchIntake> intake) {
  PHUB_CHECK(parameters_.lock_step && !parameters_.has_parent);
  intake_ = std::move(intake);
  reducer_.take_sums_of(*intake_);
  outbox_.tell_of_switch(intake_->ranks());
}

bool CoreJob::step(uint64_t& bytes) {
  if (!failure_.empty()) return false;
  return parameters_.lock_step ? pass(static_cast<LockStep&>(*way_), bytes)
                               : pass(static_cast<Clocked&>(*way_), bytes);
}

template <typename TheWay>
bool CoreJob::pass(TheWay& way, uint64_t& bytes) {
  const auto completed_round = [&way](uint32_t r, uint32_t i) { return way.completed(r, i); };
  if (outbox_.pay(completed_round)) {
    retries_in_vain_ = 0;
    note_activity();
  }

  std::array<Arrival, kPollBatch> arrivals;
  const size_t n = endpoint_.poll(arrivals);
  for (size_t i = 0; i < n; ++i) receive(way, arrivals[i]);
  arrivals_ += n;
  // The ranks of a round are not final while a boundary holds it.
  const bool sums = intake_ && table_.hold_from == kNever && receive_sums(way, bytes);

  size_t handled = 0;  // chunks
  uint64_t spent = 0;
  if (!reducer_.stopped()) {
    while (spent < kPassBytes && finish_pending(way, spent)) ++handled;
    if (way.moved_on()) insert_ready();
    while (spent < kPassBytes && close_ready(way, spent)) ++handled;
  }
  bytes += spent;
  pass_was_full_ = spent >= kPassBytes;
  if (n == 0 && !sums && handled == 0 && copy_when_idle(bytes)) ++handled;

  const bool moved = n > 0 || sums || handled > 0;
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
  if (!fits(arrival, rank, index, imm)) return;
  const bool of_racks = !parameters_.rack_ranks.empty() && imm.kind <= ImmKind::kNull;
  const uint32_t participants = of_racks ? participants_of(rank, index) : 1;
  if (of_racks && !may_take_part(rank, participants, imm)) {
    return violation(rank, index, CoreReport::kParticipants, participants);
  }
  if (imm.kind <= ImmKind::kNull && table_.is_idle(rank, index)) {
    return violation(rank, index, CoreReport::kInterest, imm.round);
  }
  ++from.arrivals;
  const bool heard_before = table_.is_heard(rank, index);
  table_.hear(rank, index);
  if (imm.kind == ImmKind::kInitial) {
    return receive_initial(rank, index, imm.round, heard_before);
  }
  if (imm.kind == ImmKind::kControl) {
    // Later results are asked for by the contribution.
    if (imm.round != low8(from.first_round - 1)) {
      return violation(rank, index, CoreReport::kKind, static_cast<uint32_t>(imm.kind));
    }
    // A rack may have asked, and got initial parameters that overtook this: one answer is enough.
    if (!heard_before) way.resend(rank, index);
    return;
  }
  if (intake_ && intake_->takes(index, table_[index].round)) {
    intake_->end("a rank sends directly", rank);
  }
  switch (way.accept(rank, index, imm)) {
    case Way::Verdict::kAccepted:
      if (of_racks) table_.add_participants(index, rank, participants);
      if (way.ready(index)) make_ready(index);
      return;
    case Way::Verdict::kDuplicate:
      return;
    case Way::Verdict::kComplete:
      // The round came through a switch, and the rank did not know yet: its result is on its way.
      if (intake_ && heard_before) return;
      return way.resend(rank, index);
    case Way::Verdict::kWrongRound:
      return violation(rank, index, CoreReport::kRound, imm.round);
  }
}

// Called after the arrivals: a direct contribution ends the generation before a later sum counts.
template <typename TheWay>
bool CoreJob::receive_sums(TheWay& way, uint64_t& bytes) {
  const uint32_t packets = intake_->poll();
  bytes += packets * (kHandling + sizeof(SwitchPacket));
  for (uint32_t index = intake_->next_closed(); index != kNoChunk; index = intake_->next_closed()) {
    accept_sum(way, index);
  }
  if (intake_->ended()) {
    if (!switch_end_reported_) note_switch_end();
    begin_switch_again();
  }
  return packets > 0;
}

uint64_t CoreJob::highest_of_stream() const {
  uint64_t round = 0;
  for (const uint32_t index : intake_->stream()) round = std::max(round, table_[index].round);
  return round;
}

CoreReport& CoreJob::note_switch_end() {
  switch_end_reported_ = true;
  outbox_.announce(SwitchBeginning());  // ranks need no longer learn of it
  intake_->wait_from(highest_of_stream());
  CoreReport& report = reports_.add(CoreReport::kSwitchEnded, intake_->why_rank());
  report.why = intake_->why();
  return report;
}

// Another generation begins with a round of which no rank can have sent anything: that after the
// ones in progress. Each rank is told before it gets a result of these.
void CoreJob::begin_switch_again() {
  if (table_[intake_->stream().front()].round < intake_->waits_until()) return;
  if (!reports_.empty()) return;  // there is room for one end and one beginning
  const uint64_t round = highest_of_stream() + 1;
  intake_->wait_until(round);  // to look again
  if (!may_begin_switch(round)) return;
  intake_->begin_again(round);
  outbox_.announce(SwitchBeginning{intake_->generation(), round});
  switch_end_reported_ = false;
  reports_.add(CoreReport::kSwitchBegun, CoreReport::kNoRank).round = round;
}

// All ranks that the switch adds are there, and no others; nothing has come of the generation
// before that is still to be read; and no chunk lags, as one of a key that is not pushed in every
// round: the others would wait for it.
bool CoreJob::may_begin_switch(uint64_t round) const {
  for (const uint32_t index : intake_->stream()) {
    const CoreChunk& chunk = table_[index];
    if (chunk.round == 0 || chunk.summed || chunk.round + 2 < round) return false;
  }
  for (uint32_t r = 0; r < table_.max_ranks(); ++r) {
    const CoreRank& rank = table_.rank(r);
    const bool is_there = rank.attached && !rank.broken && rank.unheard == 0 &&
                          rank.first_round <= round && rank.results_from != kNever;
    const bool is_away = !rank.attached && rank.first_round == kNever;
    if (r < intake_->ranks() ? !is_there : !is_away) return false;
  }
  return true;
}

// The sum has a contribution of every rank: the first rank's counts as the sum, the others' as
// null. Connections that are broken just now do not matter: their ranks' contributions have come.
template <typename TheWay>
void CoreJob::accept_sum(TheWay& way, uint32_t index) {
  CoreChunk& chunk = table_[index];
  if (chunk.arrived > 0 || static_cast<uint32_t>(chunk.round) != intake_->round(index)) {
    return intake_->end("a sum is of another round than the job");
  }
  chunk.summed = true;
  for (uint32_t rank = 0; rank < intake_->ranks(); ++rank) {
    const ImmKind kind = rank == 0 ? ImmKind::kData : ImmKind::kNull;
    ++table_.rank(rank).arrivals;
    way.accept(rank, index, {.round = low8(chunk.round), .kind = kind});
  }
  arrivals_ += intake_->ranks();
  if (way.ready(index)) make_ready(index);
}

// Whether the payload has the chunk's place and size (for rows: that of as many as it says): bytes
// that it did not overwrite would be summed as if they had arrived.
bool CoreJob::fits(const Arrival& arrival, uint32_t rank, uint32_t index, const Imm& imm) {
  const CoreChunk& chunk = table_[index];
  const std::byte* const slots = table_.rank(rank).slots;
  uint64_t bytes = imm.kind == ImmKind::kData ? chunk.sent_bytes(slots) : 0;
  uint64_t place = chunk.slot_offset;
  if (!parameters_.rack_ranks.empty() && imm.kind <= ImmKind::kNull) {
    // A null is its trailer alone.
    if (imm.kind == ImmKind::kNull) place += chunk.elements * sizeof(float);
    bytes += kTrailerElements * sizeof(float);
  }
  if (imm.kind == ImmKind::kInitial) {
    bytes = initial_part(chunk.elements, chunk.slot_bytes(), imm.round).count * sizeof(float);
  }
  const bool has_room = imm.kind != ImmKind::kData || chunk.sent_bytes(slots) <= chunk.slot_bytes();
  if (has_room && arrival.fits(bytes, place)) return true;
  const bool wrong_bytes = !has_room || arrival.bytes != bytes;
  const uint64_t said = arrival.bytes == Arrival::kNotTold ? bytes : arrival.bytes;
  violation(rank, index, wrong_bytes ? CoreReport::kBytes : CoreReport::kPlace,
            wrong_bytes ? said : arrival.offset);
  return false;
}

// The number of ranks that took part, as a rank that is a rack says.
uint32_t CoreJob::participants_of(uint32_t rank, uint32_t index) const {
  const CoreChunk& chunk = table_[index];
  uint32_t participants = 0;
  std::memcpy(&participants, table_.rank(rank).slots + chunk.slot_offset + chunk.slot_bytes(),
              sizeof participants);
  return participants;
}

// It is allowed that none took part: the rack waits for the ranks of a later round.
bool CoreJob::may_take_part(uint32_t rank, uint32_t participants, const Imm& imm) const {
  const bool null = imm.kind == ImmKind::kNull;
  if (null && participants == kNoneLeft) return true;
  const bool some = participants > 0 || null;
  return some && participants <= parameters_.rack_ranks[rank];
}

void CoreJob::receive_initial(uint32_t rank, uint32_t index, uint32_t part, bool heard_before) {
  CoreChunk& chunk = table_[index];
  const uint32_t parts = initial_parts(chunk.elements, chunk.slot_bytes());
  if (!parameters_.initial_broadcast || rank != 0 || part >= parts) {
    return violation(rank, index, CoreReport::kKind, static_cast<uint32_t>(ImmKind::kInitial));
  }
  if (chunk.round == 0) {
    if (chunk.initial_parts == parts) return;  // a parent has them, and has not answered yet
    if (part > chunk.initial_parts) return violation(rank, index, CoreReport::kRound, part);
    if (part == chunk.initial_parts) {
      way_->store_initial(index, part);
      ++chunk.initial_parts;
      table_.counters()[chunk.queue].bytes_in +=
          initial_part(chunk.elements, chunk.slot_bytes(), part).count * sizeof(float);
    }
    if (chunk.initial_parts == parts) {
      way_->begin(index);
      if (way_->ready(index)) make_ready(index);
      return reached(index);
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
         kernels::slot_bytes(parameters_.parameter_dtype, chunk.elements);
}

void CoreJob::insert_ready() {
  for (uint32_t i = 0; i < table_.size(); ++i) {
    if (way_->ready(i)) make_ready(i);
  }
}

// False: there is none, or it cannot be closed now.
template <typename TheWay>
bool CoreJob::close_ready(TheWay& way, uint64_t& bytes) {
  ReadyChunks& ready = ready_.empty() ? following_ : ready_;
  if (ready.empty()) return false;
  const uint32_t index = ready.first();
  uint64_t cost = cost_of(table_[index], table_[index].arrived);
  const bool still_ready = way.ready(index);  // unless a boundary came in between
  if (still_ready) cost += copy_before_close(index);
  const Way::Closed closed = still_ready ? way.close(index) : Way::Closed::kNotNow;
  if (still_ready && closed == Way::Closed::kNotNow) return false;
  ready.erase(index);
  if (still_ready && table_[index].summed) {
    intake_->begin_next(index);
    table_[index].summed = false;
  }
  // A state that a rank has set differs from the result of the round before.
  if (states_.set.round() == table_[index].round) table_[index].same = false;
  if (closed == Way::Closed::kDone) cost += finish(way, index);
  if (closed == Way::Closed::kPending) table_[index].closed = true;
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
  reached(index);
  if (way.ready(index)) make_ready(index);  // if it follows
  return shelves_.take_cost();
}

// False: nothing is due.
bool CoreJob::copy_when_idle(uint64_t& bytes) {
  if (snapshot_.chunks.any_due()) {
    const uint32_t index = snapshot_.chunks.next();
    bytes += snapshot_.cost(table_[index]);
    snapshot_.copy(index, *way_);
    return true;
  }
  if (!states_.get.any_due()) return false;
  const uint32_t index = states_.get.next();
  bytes += states_.cost(table_[index]);
  states_.copy_out(index);
  return true;
}

// Does the copies and sets that are due before the chunk's round is closed. Returns how many bytes
// that reads and writes. A snapshot has the state before a set, a get the state after it.
uint64_t CoreJob::copy_before_close(uint32_t index) {
  uint64_t cost = 0;
  if (snapshot_.chunks.is_due(index)) {
    cost += snapshot_.cost(table_[index]);
    snapshot_.copy(index, *way_);
  }
  if (states_.set.is_due(index)) {
    cost += states_.cost(table_[index]);
    states_.copy_in(index);
  }
  if (states_.get.is_due(index)) {
    cost += states_.cost(table_[index]);
    states_.copy_out(index);
  }
  return cost;
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
  const auto completed = [&](DueChunks& chunks, CoreReport::Type type) {
    if (!chunks.take_complete()) return false;
    out = {.type = type, .core = core_, .job = this, .round = chunks.round()};
    return true;
  };
  // The order matters: copies are reported before the set that came after them.
  if (completed(snapshot_.chunks, CoreReport::kSnapped)) return true;
  if (completed(states_.get, CoreReport::kGotState)) return true;
  if (completed(states_.set, CoreReport::kSetState)) return true;
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
  if ((pass_was_full_ || !ready_.empty() || !following_.empty()) && !reducer_.stopped())
    return false;
  if (snapshot_.chunks.any_due() || states_.get.any_due()) return false;
  if (snapshot_.chunks.is_complete() || states_.get.is_complete() || states_.set.is_complete()) {
    return false;
  }
  if (intake_ && !intake_->drained()) return false;
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
