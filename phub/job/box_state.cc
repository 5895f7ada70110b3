#include "phub/job/box_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

namespace phub {

BoxState::BoxState(const JobContext& context)
    : host_(context.host),
      job_(context.job),
      membership_(context.membership),
      remote_(context.remote),
      driver_(context.driver),
      has_standby_(context.standby != nullptr) {}

// --- calls ---------------------------------------------------------------------------------------

void BoxState::begin(const StateRequest& request, Reply<StateReply> reply) {
  const JobSpec& spec = job_.spec();
  if (!job_.rules().lock_step() || !box_has_state(spec)) {
    fail(ErrorCode::kInvalid,
         "the state of keys can be read and set in jobs in lock-step with an optimizer; job '{}' "
         "has consistency {}, optimizer {}",
         spec.name, spec.consistency, spec.optimizer);
  }
  if (request.set && has_standby_) {
    fail(ErrorCode::kInvalid,
         "job '{}' has a standby, which makes the same steps: the state of keys cannot be set",
         spec.name);
  }
  if (request.set && remote_.empty()) check_no_set_waits();
  const bool is_mine =
      state_ && state_->rank == request.rank && state_->stage == StateTransfer::Stage::kOpen;
  if (state_ && !is_mine) {
    fail(ErrorCode::kTaken, "{} {} {} the state of job '{}': try again when it is done",
         spec.rack_ranks.empty() ? "rank" : "a rank of rack", state_->rank,
         state_->sets ? "sets" : "reads", spec.name);
  }
  auto transfer = std::make_shared<StateTransfer>(job_, remote_.moves().new_number(), request);
  drop(state_);
  driver_.count_growth();
  if (!host_.budget.has_room(transfer->bytes)) {
    fail(ErrorCode::kFull,
         "the state has {} bytes, for which the server has no room now: ask for fewer keys at a "
         "time, or raise --memory-limit",
         transfer->bytes);
  }
  transfer->begun = std::move(reply);
  state_ = transfer;
  driver_.count_growth();
  driver_.run_beside(
      host_.builder, [this, transfer] { transfer->allocate(job_); },
      [this, transfer](const std::optional<Error>& failed) { note_allocated(transfer, failed); });
}

void BoxState::note_allocated(const std::shared_ptr<StateTransfer>& transfer,
                              const std::optional<Error>& failed) {
  if (driver_.has_ended()) return;
  if (failed || transfer->is_over) {
    refuse(failed ? failed->code() : ErrorCode::kFenced,
           failed ? failed->what() : "the rank is gone");
  } else if (transfer->sets) {
    transfer->stage = StateTransfer::Stage::kOpen;
    std::exchange(transfer->begun, nullptr)(StateReply{.bytes = transfer->bytes});
  } else {
    share();
  }
  driver_.carry_out();
}

void BoxState::check_no_set_waits() const {
  if (!set_state_) return;
  fail(ErrorCode::kTaken,
       "the state that was set for round {} of job '{}' is not taken up yet: every rank pushes the "
       "keys of that round first",
       set_state_->round, job_.spec().name);
}

// A box answers after the earlier reports of its cores. So a rank that has the results of a round
// may set the state again that was set for that round, however long the mail takes.
void BoxState::share() {
  if (remote_.empty()) return decide();
  state_->stage = StateTransfer::Stage::kSharing;
  state_->is_shared = true;
  if (state_->sets) move(BoxMoves::Direction::kSend);
  remote_.share_state({.number = state_->number, .set = state_->sets, .keys = state_->keys},
                      [this](const std::optional<Error>& failed) {
                        if (driver_.has_ended()) return;
                        std::optional<Error> refused = failed;
                        if (!refused && state_->sets) {
                          refused = error_of([this] { check_no_set_waits(); });
                        }
                        if (refused) return refuse(refused->code(), refused->what());
                        decide();
                      });
}

// The state moves at a boundary of its own, or at the one that is made for something else.
void BoxState::decide() {
  remote_.moves().end({.state = state_->number});
  state_->stage = StateTransfer::Stage::kDeciding;
  if (membership_.changes().ask(&Boundary::moves_state)) return;
  refuse(ErrorCode::kInvalid,
         fmt::format("job '{}' has not begun: its ranks and initial parameters come first",
                     job_.spec().name));
}

void BoxState::refuse(ErrorCode code, const std::string& why) {
  if (state_) state_->refuse(code, why);
  drop(state_);
}

// The builder's thread gives the memory back.
void BoxState::drop(std::shared_ptr<StateTransfer>& transfer) {
  if (!transfer) return;
  if (transfer->is_shared) remote_.drop_state(transfer->number);
  remote_.moves().end({.state = transfer->number});
  host_.builder.run([rest = std::move(transfer)]() mutable { rest.reset(); });
  transfer.reset();
}

uint64_t BoxState::at_boundary(Boundary& boundary) {
  if (!state_ || state_->stage != StateTransfer::Stage::kDeciding) return 0;
  if (state_->is_over) {
    drop(state_);
    return 0;
  }
  StateTransfer& transfer = *state_;
  transfer.round = boundary.round;
  transfer.stage = StateTransfer::Stage::kCopying;
  transfer.is_shared = false;  // the boxes drop it themselves
  if (!transfer.sets) {
    move(BoxMoves::Direction::kReceive);
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

void BoxState::copied(const CoreReport& report) {
  const bool was_set = report.type == CoreReport::kSetState;
  const std::shared_ptr<StateTransfer> transfer = was_set ? set_state_ : state_;
  if (++transfer->cores < job_.all_cores()) return;
  if (was_set) return drop(set_state_);
  remote_.moves().end({.state = transfer->number});
  transfer->stage = StateTransfer::Stage::kOpen;
  if (transfer->is_over) return drop(state_);
  std::exchange(transfer->begun, nullptr)(StateReply{.round = transfer->round - 1,
                                                     .bytes = transfer->bytes,
                                                     .steps = transfer->steps_of_keys(job_)});
}

// The state that the rank reads or sends now. Throws Error: it does not.
std::shared_ptr<StateTransfer> BoxState::open(uint32_t rank, bool sets) const {
  if (!state_ || state_->rank != rank || state_->stage != StateTransfer::Stage::kOpen ||
      state_->sets != sets) {
    fail_not_open(job_.spec().name, rank, sets);
  }
  return state_;
}

void BoxState::read(uint32_t rank, uint64_t offset, Reply<PartBytes> reply) {
  const auto transfer = open(rank, false);
  const uint64_t size =
      std::min(kStatePieceBytes, transfer->bytes - std::min(transfer->bytes, offset));
  check_piece_of_state(offset, size, transfer->bytes);
  const auto piece = std::make_shared<PartBytes>();
  driver_.run_beside(
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

void BoxState::check_piece(uint32_t rank, uint64_t offset, uint64_t bytes) const {
  const auto transfer = open(rank, true);
  check_piece_of_state(offset, bytes, transfer->bytes);
  if (bytes > kStatePieceBytes || offset > transfer->received) {
    fail(ErrorCode::kInvalid, "a piece has up to {} bytes, and comes behind the {} that are there",
         kStatePieceBytes, transfer->received);
  }
}

void BoxState::write(uint32_t rank, uint64_t offset, std::string piece,
                     std::shared_ptr<void> charge, Reply<Done> reply) {
  check_piece(rank, offset, piece.size());
  const auto transfer = open(rank, true);
  const auto bytes = std::make_shared<const std::string>(std::move(piece));
  driver_.run_beside(
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

void BoxState::apply(uint32_t rank, Reply<HyperReply> reply) {
  const auto transfer = open(rank, true);
  if (transfer->received != transfer->bytes) {
    fail(ErrorCode::kInvalid, "{} of the {} bytes of the state have come", transfer->received,
         transfer->bytes);
  }
  transfer->decided = std::move(reply);
  share();
  driver_.carry_out();
}

void BoxState::end(uint32_t rank, Reply<Done> done) {
  if (done) done(Done{});
  if (!state_ || state_->rank != rank) return;
  state_->refuse(ErrorCode::kFenced, fmt::format("rank {} has ended it", rank));
  if (state_->stage != StateTransfer::Stage::kOpen) {
    state_->is_over = true;
    return;
  }
  drop(state_);
  driver_.count_growth();
}

uint64_t BoxState::bytes() const {
  uint64_t bytes = 0;
  for (const auto& transfer : {state_, set_state_}) {
    if (!transfer) continue;
    bytes += transfer->bytes + StateTransfer::bookkeeping(job_);
  }
  return bytes;
}

// Every other box moves its part of the state.
void BoxState::move(BoxMoves::Direction direction) {
  for (uint32_t box = 1; box < state_->shares.size(); ++box) {
    remote_.moves().begin(box, direction, {.state = state_->number}, state_->shares[box]);
  }
}

}  // namespace phub
