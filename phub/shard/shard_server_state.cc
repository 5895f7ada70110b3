// A shard: its part of the state of keys that a rank reads or sets. Before the boundary there is
// memory for it, and what is set; behind it the cores copy, and what they have copied goes to the
// server.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/shard/shard_server.h"
#include "transport/error.h"

namespace phub {

void ShardServer::make_state(uint64_t number, Served& part, const ShardKeys& order) {
  std::shared_ptr<StateShare> share;
  const std::optional<Error> refused = error_of([&] {
    const bool is_taken = std::ranges::any_of(
        part.states, [&order](const auto& each) { return each->what.number == order.number; });
    if (order.number == 0 || is_taken) {
      fail(ErrorCode::kInvalid, "state {} is there already, or is none", order.number);
    }
    share = std::make_shared<StateShare>(*part.job, order);
    if (budget_.has_room(share->memory_bytes())) return;
    fail(ErrorCode::kFull,
         "the {} bytes, for which the box has no room now: {}raise --memory-limit",
         fmt::format("{} {}", share->is_branch() ? "branch takes" : "state has",
                     share->memory_bytes()),
         share->is_branch() ? "" : "ask for fewer keys at a time, or ");
  });
  if (refused) return refuse_state(number, order.number, *refused);
  budget_.grow(0, share->memory_bytes());
  share->is_busy = true;
  part.states.push_back(share);
  ++part.tasks;
  builder_.run([share, job = part.job] { share->allocate(*job); },
               [this, number, share](const std::optional<Error>& failed) {
                 Served& part = parts_[number];
                 --part.tasks;
                 share->is_busy = false;
                 if (failed && !share->is_over) refuse_state(number, share->what.number, *failed);
                 if (failed || share->is_over) return drop_state(part, share);
                 if (share->what.set) return move_state(number, part, share);
                 state_is_there(number, *share);
               });
}

void ShardServer::refuse_state(uint64_t number, uint64_t state, const Error& why) {
  ShardReport& answer = report(ShardSays::kStateThere, number);
  answer.state = state;
  answer.refuse(why);
}

void ShardServer::state_is_there(uint64_t number, StateShare& share) {
  if (share.what.set) share.take_steps();
  share.stage = StateShare::Stage::kThere;
  report(ShardSays::kStateThere, number).state = share.what.number;
}

void ShardServer::drop_state(Served& part, uint64_t state) {
  for (const auto& share : part.states) {
    if (share->what.number == state) return drop_state(part, share);
  }
}

// Memory is given back beside this thread.
void ShardServer::drop_state(Served& part, const std::shared_ptr<StateShare>& share) {
  share->is_over = true;
  if (share->is_busy || share->stage == StateShare::Stage::kCopying) return;
  const auto move = std::ranges::find(part.moves, share->what.number,
                                      [](const Move& each) { return each.place.state; });
  if (move != part.moves.end()) {
    move->is_over = true;
    if (move->is_busy) return;
    part.moves.erase(move);
  }
  const uint64_t bytes = share->memory_bytes();
  std::shared_ptr<StateShare> rest = share;
  std::erase(part.states, rest);
  builder_.run([this, bytes, rest = std::move(rest)]() mutable {
    rest.reset();
    budget_.release(bytes);
  });
}

// Throws Error(kInvalid): it is not there.
StateShare& ShardServer::state_for_boundary(Served& part, uint64_t state, bool is_branch) {
  for (const auto& share : part.states) {
    const bool is_it = share->what.number == state && share->is_branch() == is_branch;
    if (is_it && share->stage == StateShare::Stage::kThere) return *share;
  }
  fail(ErrorCode::kInvalid, "{} {}, which a boundary moves, is not there",
       is_branch ? "branch" : "state of keys", state);
}

// The boundary reads or sets it.
void ShardServer::place_state(Served& part, uint64_t state) {
  StateShare& share = state_for_boundary(part, state, false);
  share.stage = StateShare::Stage::kCopying;
  if (share.what.set) {
    part.boundary.set_state = &share.where;
  } else {
    part.boundary.get_state = &share.where;
  }
}

// Into the dock that one of the boundary's moves copies from.
void ShardServer::place_branch(Served& part, const ShardBoundary& order) {
  StateShare& share = state_for_boundary(part, order.branch, true);
  const uint32_t shelves = part.job->spec().branches;
  const auto move = std::ranges::find_if(
      order.moves, [shelves](const BranchMove& each) { return each.from > shelves; });
  if (move == order.moves.end() || move->from > 2 * shelves) return;
  JobPart::Shelf branch = std::move(share.branch);
  budget_.grow(share.memory_bytes(), branch.bytes());
  std::erase_if(part.states, [&share](const auto& each) { return each.get() == &share; });
  drop_shelf(part.job->exchange_dock(move->from - shelves, std::move(branch)));
}

void ShardServer::free_dock(Served& part, uint64_t shelf) {
  if (shelf == 0 || shelf > part.job->spec().branches) return;
  drop_shelf(part.job->exchange_dock(static_cast<uint32_t>(shelf), {}));
}

// Memory is given back beside this thread.
void ShardServer::drop_shelf(JobPart::Shelf shelf) {
  if (shelf.arrays.empty()) return;
  builder_.run([this, rest = std::make_shared<JobPart::Shelf>(std::move(shelf))]() mutable {
    const uint64_t bytes = rest->bytes();
    rest.reset();
    budget_.release(bytes);
  });
}

// By a core. All of a get's cores say so when the server has what they copied.
void ShardServer::state_copied(CoreOfPart from, Served& part, bool was_set) {
  const auto at = std::ranges::find_if(part.states, [was_set](const auto& share) {
    return share->stage == StateShare::Stage::kCopying && share->what.set == was_set;
  });
  const std::shared_ptr<StateShare> share = *at;
  if (was_set) report(ShardSays::kSetState, from.part).core = from.core;
  if (++share->cores < part.job->cores()) return;
  share->stage = StateShare::Stage::kMoving;
  if (was_set || share->is_over) return drop_state(part, share);
  share->send_steps();
  move_state(from.part, part, share);
}

// What is set comes from the server; what cores have copied goes there.
void ShardServer::move_state(uint64_t number, Served& part,
                             const std::shared_ptr<StateShare>& share) {
  share->stage = StateShare::Stage::kMoving;
  const auto done = [this, number, share](const std::optional<Error>& failed) {
    Served& part = parts_[number];
    if (share->is_over) return drop_state(part, share);
    if (failed && !share->what.set) return report_failed(number, failed->what());
    if (failed) {
      refuse_state(number, share->what.number, *failed);
      return drop_state(part, share);
    }
    if (share->what.set) return state_is_there(number, *share);
    for (uint32_t core = 0; core < part.job->cores(); ++core) {
      report(ShardSays::kGotState, number).core = core;
    }
    drop_state(part, share);
  };
  begin_move(part, {.place = {.job = number, .state = share->what.number},
                    .to_server = !share->what.set,
                    .image = share->image,
                    .done = done});
}

}  // namespace phub
