// A running job: what its members get and set of the state of keys.
//
// One rank at a time, so that the memory for it is bounded: as much as the keys have. A set is over
// for its rank when its round is known; every core takes it before it closes that round
// (core/key_states.h), and until then there is no other set.
//
// Other boxes that have parts of the job make memory for theirs before the boundary, and fetch what
// is set: a core has it when it closes the round. What their cores have copied is sent here.
//
// Below a parent the calls go on to it (passed_state.h).
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "phub/job/running_job.h"
#include "phub/job/state_transfer.h"

namespace phub {

using Stage = StateTransfer::Stage;

void RunningJob::begin_state(const StateRequest& request, Reply<StateReply> reply) {
  const JobSpec& spec = job_->spec();
  if (passed_state_) return passed_state_->begin(request, std::move(reply));
  if (!job_->choices().lock_step() || !box_has_state(spec)) {
    fail(ErrorCode::kInvalid,
         "the state of keys can be read and set in jobs in lock-step with an optimizer; job '{}' "
         "has consistency {}, optimizer {}",
         spec.name, spec.consistency, spec.optimizer);
  }
  if (request.set && remote_.empty()) check_set_is_taken_up();
  const bool is_mine = state_ && state_->rank == request.rank && state_->stage == Stage::kOpen;
  if (state_ && !is_mine) {
    fail(ErrorCode::kTaken, "{} {} {} the state of job '{}': try again when it is done",
         spec.rack_ranks.empty() ? "rank" : "a rank of rack", state_->rank,
         state_->sets ? "sets" : "reads", spec.name);
  }
  auto transfer = std::make_shared<StateTransfer>(*job_, ++states_, request);
  drop(state_);
  count_growth();
  if (!host_.budget.has_room(transfer->bytes)) {
    fail(ErrorCode::kFull,
         "the state has {} bytes, for which the server has no room now: ask for fewer keys at a "
         "time, or raise --memory-limit",
         transfer->bytes);
  }
  transfer->begun = std::move(reply);
  state_ = transfer;
  count_growth();
  run_beside(
      host_.builder, [this, transfer] { transfer->allocate(*job_); },
      [this, transfer](const std::optional<Error>& failed) { state_made(transfer, failed); });
}

void RunningJob::state_made(const std::shared_ptr<StateTransfer>& transfer,
                            const std::optional<Error>& failed) {
  if (ending_) return;
  if (failed || transfer->is_over) {
    refuse_state(failed ? failed->code() : ErrorCode::kFenced,
                 failed ? failed->what() : "the rank is gone");
  } else if (transfer->sets) {
    transfer->stage = Stage::kOpen;
    std::exchange(transfer->begun, nullptr)(StateReply{.bytes = transfer->bytes});
  } else {
    share_state();
  }
  carry_out();
}

void RunningJob::check_set_is_taken_up() const {
  if (!set_state_) return;
  fail(ErrorCode::kTaken,
       "the state that was set for round {} of job '{}' is not taken up yet: every rank pushes the "
       "keys of that round first",
       set_state_->round, job_->spec().name);
}

// What the cores of another box did before that answers has been reported then: so a rank that has
// the results of a round may set again what was set for it, however long the mail takes.
void RunningJob::share_state() {
  if (remote_.empty()) return decide_state();
  state_->stage = Stage::kSharing;
  state_->is_shared = true;
  remote_.share_state({.number = state_->number, .set = state_->sets, .keys = state_->keys},
                      [this](const std::optional<Error>& failed) {
                        if (ending_) return;
                        std::optional<Error> refused = failed;
                        if (!refused && state_->sets) {
                          refused = error_of([this] { check_set_is_taken_up(); });
                        }
                        if (refused) return refuse_state(refused->code(), refused->what());
                        decide_state();
                      });
}

// At a boundary of its own, or with what waits for one.
void RunningJob::decide_state() {
  state_->stage = Stage::kDeciding;
  if (membership_.move_state()) return;
  refuse_state(ErrorCode::kInvalid,
               fmt::format("job '{}' has not begun: its ranks and initial parameters come first",
                           job_->spec().name));
}

void RunningJob::refuse_state(ErrorCode code, const std::string& why) {
  if (state_) state_->refuse(code, why);
  drop(state_);
}

// Memory is given back beside this thread.
void RunningJob::drop(std::shared_ptr<StateTransfer>& transfer) {
  if (!transfer) return;
  if (transfer->is_shared) remote_.drop_state(transfer->number);
  host_.builder.run([rest = std::move(transfer)]() mutable { rest.reset(); });
  transfer.reset();
}

// What the boundary has for the cores. Returns the number of the state; 0: there is none.
uint64_t RunningJob::place_state(Boundary& boundary) {
  if (!state_ || state_->stage != Stage::kDeciding) return 0;
  if (state_->is_over) {
    drop(state_);
    return 0;
  }
  StateTransfer& transfer = *state_;
  transfer.round = boundary.round;
  transfer.stage = Stage::kCopying;
  transfer.is_shared = false;  // they drop it themselves
  if (!transfer.sets) {
    boundary.get_state = &transfer.where;
    return transfer.number;
  }
  LogRecord record{.kind = LogRecord::Kind::kSet,
                   .round = boundary.round,
                   .rank = transfer.rank,
                   .incarnation = transfer.incarnation};
  for (uint32_t i = 0; i < transfer.where.places.size(); ++i) {
    if (transfer.where.places[i].first == KeyStateMemory::kNowhere) continue;
    if (record.chunks.empty() || record.chunks.back().last + 1 != i)
      record.chunks.push_back({i, i});
    record.chunks.back().last = i;
  }
  membership_.log().add(std::move(record));
  boundary.set_state = &transfer.where;
  set_state_ = std::exchange(state_, nullptr);
  std::exchange(set_state_->decided, nullptr)(HyperReply{.round = boundary.round});
  return set_state_->number;
}

void RunningJob::state_copied(const CoreReport& report) {
  const bool was_set = report.type == CoreReport::kSetState;
  const std::shared_ptr<StateTransfer> transfer = was_set ? set_state_ : state_;
  if (++transfer->cores < job_->all_cores()) return;
  if (was_set) return drop(set_state_);
  transfer->stage = Stage::kOpen;
  if (transfer->is_over) return drop(state_);
  std::exchange(transfer->begun, nullptr)(StateReply{.round = transfer->round - 1,
                                                     .bytes = transfer->bytes,
                                                     .steps = transfer->steps_of_keys(*job_)});
}

// The rank's, which is open for it to be read or sent. Throws Error.
std::shared_ptr<StateTransfer> RunningJob::open_state(uint32_t rank, bool sets) const {
  if (!state_ || state_->rank != rank || state_->stage != Stage::kOpen || state_->sets != sets) {
    fail_not_open(job_->spec().name, rank, sets);
  }
  return state_;
}

void RunningJob::read_state(uint32_t rank, uint64_t offset, Reply<PartBytes> reply) {
  if (passed_state_) return passed_state_->read(rank, offset, std::move(reply));
  const auto transfer = open_state(rank, false);
  const uint64_t size =
      std::min(kStatePieceBytes, transfer->bytes - std::min(transfer->bytes, offset));
  check_piece_of_state(offset, size, transfer->bytes);
  const auto piece = std::make_shared<PartBytes>();
  run_beside(
      host_.coder,
      [transfer, offset, size, piece] {
        const auto bytes = transfer->memory.bytes().subspan(offset, size);
        piece->bytes.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      },
      [piece, reply](const std::optional<Error>& failed) {
        if (failed) return reply({failed->code(), failed->what()});
        reply(std::move(*piece));
      });
}

void RunningJob::check_state_piece(uint32_t rank, uint64_t offset, uint64_t bytes) const {
  if (passed_state_) return passed_state_->check_piece(rank, offset, bytes);
  const auto transfer = open_state(rank, true);
  check_piece_of_state(offset, bytes, transfer->bytes);
  if (bytes > kStatePieceBytes || offset > transfer->received) {
    fail(ErrorCode::kInvalid, "a piece has up to {} bytes, and comes behind the {} that are there",
         kStatePieceBytes, transfer->received);
  }
}

void RunningJob::write_state(uint32_t rank, uint64_t offset, std::string piece,
                             std::shared_ptr<void> charge, Reply<Done> reply) {
  if (passed_state_) {
    return passed_state_->write(rank, offset, std::move(piece), std::move(charge),
                                std::move(reply));
  }
  check_state_piece(rank, offset, piece.size());
  const auto transfer = open_state(rank, true);
  const auto bytes = std::make_shared<const std::string>(std::move(piece));
  run_beside(
      host_.coder,
      [transfer, offset, bytes] {
        std::memcpy(transfer->memory.bytes().data() + offset, bytes->data(), bytes->size());
      },
      [transfer, offset, bytes, charge = std::move(charge),
       reply](const std::optional<Error>& failed) {
        if (failed) return reply({failed->code(), failed->what()});
        transfer->received = std::max(transfer->received, offset + bytes->size());
        reply(Done{});
      });
}

void RunningJob::apply_state(uint32_t rank, Reply<HyperReply> reply) {
  if (passed_state_) return passed_state_->apply(rank, std::move(reply));
  const auto transfer = open_state(rank, true);
  if (transfer->received != transfer->bytes) {
    fail(ErrorCode::kInvalid, "{} of the {} bytes of the state have come", transfer->received,
         transfer->bytes);
  }
  transfer->decided = std::move(reply);
  share_state();
  carry_out();
}

void RunningJob::end_state(uint32_t rank, Reply<Done> done) {
  if (passed_state_) return passed_state_->end(rank, std::move(done));
  if (done) done(Done{});
  if (!state_ || state_->rank != rank) return;
  state_->refuse(ErrorCode::kFenced, fmt::format("rank {} has ended it", rank));
  if (state_->stage != Stage::kOpen) {
    state_->is_over = true;
    return;
  }
  drop(state_);
  count_growth();
}

// --- other boxes ---------------------------------------------------------------------------------

// Throws Error(kInvalid): that state is not read or set now.
StateTransfer::Share& RunningJob::share_of(uint64_t shard, const CopyPlace& place,
                                           bool sets) const {
  const uint32_t box = remote_.at(shard).box;
  const Stage stage = sets ? Stage::kSharing : Stage::kCopying;
  if (ending_ || !state_ || state_->number != place.state || state_->sets != sets ||
      state_->stage != stage) {
    fail(ErrorCode::kInvalid, "job '{}' does not {} state {} of keys now", job_->spec().name,
         sets ? "set" : "read", place.state);
  }
  return state_->shares[box];
}

void RunningJob::check_state_copy(uint64_t shard, const CopyPlace& place, uint64_t bytes) const {
  const StateTransfer::Share& share = share_of(shard, place, false);
  const uint64_t left = share.image.bytes() - std::min(share.image.bytes(), place.offset);
  if (bytes > 0 && bytes == std::min(kCopyPieceBytes, left) && place.offset <= share.copied) return;
  fail(ErrorCode::kInvalid,
       "{} bytes from byte {} on are no piece of what job '{}' wants of state {} of keys", bytes,
       place.offset, job_->spec().name, place.state);
}

// A box's cores have copied when what they have is here.
void RunningJob::check_got(uint64_t shard) const {
  const uint32_t box = remote_.at(shard).box;
  if (state_ && state_->stage == Stage::kCopying &&
      state_->shares[box].copied == state_->shares[box].image.bytes()) {
    return;
  }
  fail(ErrorCode::kInvalid, "mail: a report does not fit its job: a state that did not come");
}

uint64_t RunningJob::state_bytes() const {
  uint64_t bytes = 0;
  for (const auto& transfer : {state_, set_state_}) {
    if (!transfer) continue;
    bytes += transfer->bytes + StateTransfer::bookkeeping(*job_);
  }
  return bytes;
}

}  // namespace phub
