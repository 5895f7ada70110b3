#include "phub/job/passed_state.h"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "phub/background.h"
#include "phub/job/state_transfer.h"

namespace phub {

void PassedState::begin(const StateRequest& request, Reply<StateReply> reply) {
  if (stage_ == Stage::kEnding && !next_) {
    next_ = std::make_unique<Next>(Next{request, std::move(reply)});
    return;
  }
  const bool is_mine = stage_ == Stage::kOpen && rank_ == request.rank;
  if (stage_ != Stage::kFree && !is_mine) {
    const bool waits = next_ != nullptr;
    fail(ErrorCode::kTaken, "rank {} {} the state of job '{}': try again when it is done",
         waits ? next_->request.rank : rank_,
         (waits ? next_->request.set : sets_) ? "sets" : "reads", job_);
  }
  const bool sets_before = std::exchange(sets_, request.set);
  rank_ = request.rank;
  stage_ = Stage::kBeginning;
  const Reply<StateReply> begin = [this, is_mine, sets_before,
                                   reply = std::move(reply)](Result<StateReply> result) {
    if (!result && is_mine) sets_ = sets_before;
    begun(result, is_mine);
    reply(std::move(result));
  };
  uplink_.ask(begin, [&](Parent& parent, const Credential& who, auto answer) {
    parent.begin_state(who, request, std::move(answer));
  });
}

// If another state was open, a refusal may have left that one open at the parent.
void PassedState::begun(const Result<StateReply>& result, bool was_open) {
  if (result) bytes_ = result.value->bytes;
  const bool is_unknown = !result && may_pass(result.code);
  stage_ = result || was_open || is_unknown ? Stage::kOpen : Stage::kFree;
  if (stage_ == Stage::kFree) free();
  if (std::exchange(is_over_, false) || is_unknown) end(rank_);
}

void PassedState::check_open(uint32_t rank, bool sets) const {
  if (stage_ == Stage::kOpen && rank_ == rank && sets_ == sets) return;
  fail_not_open(job_, rank, sets);
}

void PassedState::read(uint32_t rank, uint64_t offset, Reply<PartBytes> reply) {
  check_open(rank, false);
  uplink_.ask(std::move(reply), [&](Parent& parent, const Credential& who, auto answer) {
    parent.read_state(who, offset, std::move(answer));
  });
}

void PassedState::check_piece(uint32_t rank, uint64_t offset, uint64_t bytes) const {
  check_open(rank, true);
  check_piece_of_state(offset, bytes, bytes_);
}

void PassedState::write(uint32_t rank, uint64_t offset, std::string piece,
                        std::shared_ptr<void> charge, Reply<Done> reply) {
  check_piece(rank, offset, piece.size());
  const Reply<Done> keeps_charge = [charge = std::move(charge), reply = std::move(reply)](
                                       const Result<Done>& result) { reply(result); };
  uplink_.ask(keeps_charge, [&](Parent& parent, const Credential& who, auto answer) {
    parent.write_state(who, offset, std::move(piece), std::move(answer));
  });
}

void PassedState::apply(uint32_t rank, Reply<HyperReply> reply) {
  check_open(rank, true);
  uplink_.ask(std::move(reply), [&](Parent& parent, const Credential& who, auto answer) {
    parent.apply_state(who, std::move(answer));
  });
}

void PassedState::end(uint32_t rank, Reply<Done> done) {
  if (next_ && next_->request.rank == rank) {
    const std::unique_ptr<Next> waiting = std::move(next_);
    waiting->reply({ErrorCode::kFenced, fmt::format("rank {} has ended it", rank)});
  }
  const bool is_its = stage_ != Stage::kFree && rank_ == rank;
  if (!is_its) {
    if (done) done(Done{});
    return;
  }
  if (done) ended_.push_back(std::move(done));
  if (stage_ == Stage::kBeginning) is_over_ = true;
  if (stage_ != Stage::kOpen) return;
  stage_ = Stage::kEnding;
  end_at_parent();
}

void PassedState::end_at_parent() {
  asks_ = true;
  const Reply<Done> ended = [this](const Result<Done>& result) {
    asks_ = false;
    if (!result && may_pass(result.code)) return;  // the next tick asks again
    free();
    const std::unique_ptr<Next> waiting = std::move(next_);
    if (!waiting) return;
    const std::optional<Error> failed = error_of([&] { begin(waiting->request, waiting->reply); });
    if (failed) waiting->reply({failed->code(), failed->what()});
  };
  uplink_.ask(ended, [](Parent& parent, const Credential& who, auto answer) {
    parent.end_state(who, std::move(answer));
  });
}

void PassedState::free() {
  stage_ = Stage::kFree;
  for (const Reply<Done>& done : std::exchange(ended_, {})) done(Done{});
}

void PassedState::tick() {
  if (stage_ == Stage::kEnding && !asks_) end_at_parent();
}

void PassedState::refuse(ErrorCode code, const std::string& why) {
  const std::unique_ptr<Next> waiting = std::move(next_);
  if (waiting) waiting->reply({code, why});
  free();
}

}  // namespace phub
