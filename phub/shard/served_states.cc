#include "phub/shard/served_states.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/error.h"

namespace phub {

void ServedStates::make(const ShardKeys& order) {
  std::shared_ptr<StateShare> share;
  const std::optional<Error> refused = error_of([&] {
    const bool is_taken = std::ranges::any_of(
        states_, [&order](const auto& each) { return each->what.number == order.number; });
    if (order.number == 0 || is_taken) {
      fail(ErrorCode::kInvalid, "state {} is there already, or is none", order.number);
    }
    share = std::make_shared<StateShare>(job_, order);
    if (budget_.has_room(share->memory_bytes())) return;
    fail(ErrorCode::kFull,
         "the {} bytes, for which the box has no room now: {}raise --memory-limit",
         fmt::format("{} {}", share->is_branch() ? "branch takes" : "state has",
                     share->memory_bytes()),
         share->is_branch() ? "" : "ask for fewer keys at a time, or ");
  });
  if (refused) return refuse(order.number, *refused);
  budget_.grow(0, share->memory_bytes());
  share->is_busy = true;
  states_.push_back(share);
  ++tasks_;
  builder_.run([this, share] { share->allocate(job_); },
               [this, share](const std::optional<Error>& failed) {
                 --tasks_;
                 share->is_busy = false;
                 if (failed && !share->is_over) refuse(share->what.number, *failed);
                 if (failed || share->is_over) return drop(share);
                 if (share->what.set) return move(share);
                 is_there(*share);
               });
}

void ServedStates::refuse(uint64_t state, const Error& why) {
  ShardReport& answer = reports_.report(ShardSays::kStateThere);
  answer.state = state;
  answer.refuse(why);
}

void ServedStates::is_there(StateShare& share) {
  if (share.what.set) share.take_steps();
  share.stage = StateShare::Stage::kThere;
  reports_.report(ShardSays::kStateThere).state = share.what.number;
}

void ServedStates::drop(uint64_t state) {
  for (const auto& share : states_) {
    if (share->what.number == state) return drop(share);
  }
}

// Memory is given back beside this thread.
void ServedStates::drop(const std::shared_ptr<StateShare>& share) {
  share->is_over = true;
  if (share->is_busy || share->stage == StateShare::Stage::kCopying) return;
  if (moves_.drop(share->what.number)) return;
  const uint64_t bytes = share->memory_bytes();
  std::shared_ptr<StateShare> rest = share;
  std::erase(states_, rest);
  builder_.run([&budget = budget_, bytes, rest = std::move(rest)]() mutable {
    rest.reset();
    budget.release(bytes);
  });
}

// Throws Error(kInvalid): it is not there.
StateShare& ServedStates::find_for_boundary(uint64_t state, bool is_branch) const {
  for (const auto& share : states_) {
    const bool is_it = share->what.number == state && share->is_branch() == is_branch;
    if (is_it && share->stage == StateShare::Stage::kThere) return *share;
  }
  fail(ErrorCode::kInvalid, "{} {}, which a boundary moves, is not there",
       is_branch ? "branch" : "state of keys", state);
}

void ServedStates::at_boundary(const ShardBoundary& order, Boundary& boundary) {
  if (order.branch > 0) place_branch(order);
  if (order.state == 0) return;
  StateShare& share = find_for_boundary(order.state, false);
  share.stage = StateShare::Stage::kCopying;
  if (share.what.set) {
    boundary.set_state = &share.where;
  } else {
    boundary.get_state = &share.where;
  }
}

// Into the dock that one of the boundary's moves copies from.
void ServedStates::place_branch(const ShardBoundary& order) {
  StateShare& share = find_for_boundary(order.branch, true);
  const uint32_t shelves = job_.spec().branches;
  const auto move = std::ranges::find_if(
      order.moves, [shelves](const BranchMove& each) { return each.from > shelves; });
  if (move == order.moves.end() || move->from > 2 * shelves) return;
  JobPart::Shelf branch = std::move(share.branch);
  budget_.grow(share.memory_bytes(), branch.bytes());
  std::erase_if(states_, [&share](const auto& each) { return each.get() == &share; });
  drop_shelf(job_.exchange_dock(move->from - shelves, std::move(branch)));
}

void ServedStates::free_dock(uint64_t shelf) {
  if (shelf == 0 || shelf > job_.spec().branches) return;
  drop_shelf(job_.exchange_dock(static_cast<uint32_t>(shelf), {}));
}

// Memory is given back beside this thread.
void ServedStates::drop_shelf(JobPart::Shelf shelf) {
  if (shelf.arrays.empty()) return;
  builder_.run(
      [&budget = budget_, rest = std::make_shared<JobPart::Shelf>(std::move(shelf))]() mutable {
        const uint64_t bytes = rest->bytes();
        rest.reset();
        budget.release(bytes);
      });
}

// All cores of a get say so when the server has what they copied.
void ServedStates::core_copied(uint32_t core, bool was_set) {
  const auto at = std::ranges::find_if(states_, [was_set](const auto& share) {
    return share->stage == StateShare::Stage::kCopying && share->what.set == was_set;
  });
  const std::shared_ptr<StateShare> share = *at;
  if (was_set) reports_.report(ShardSays::kSetState).core = core;
  if (++share->cores < job_.cores()) return;
  share->stage = StateShare::Stage::kMoving;
  if (was_set || share->is_over) return drop(share);
  share->send_steps();
  move(share);
}

// A state that is set comes from the server; one that cores have copied goes there.
void ServedStates::move(const std::shared_ptr<StateShare>& share) {
  share->stage = StateShare::Stage::kMoving;
  const auto done = [this, share](const std::optional<Error>& failed) {
    if (share->is_over) return drop(share);
    if (failed && !share->what.set) return reports_.report_failed(failed->what());
    if (failed) {
      refuse(share->what.number, *failed);
      return drop(share);
    }
    if (share->what.set) return is_there(*share);
    for (uint32_t core = 0; core < job_.cores(); ++core) {
      reports_.report(ShardSays::kGotState).core = core;
    }
    drop(share);
  };
  moves_.begin({.job = number_, .state = share->what.number}, !share->what.set, share->image, done);
}

}  // namespace phub
