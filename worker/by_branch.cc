#include "worker/by_branch.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "transport/control/branch_runs.h"
#include "transport/error.h"
#include "worker/bytes.h"

namespace phub {
namespace {

// How saved() begins: then, of each branch, its number and that of its state; the states' bytes,
// 64 bits each; the states.
struct Head {
  uint64_t next;
  uint32_t branch, waiting, states, zero;
};

}  // namespace

ByBranch::ByBranch(Save save, Load load) : save_(std::move(save)), load_(std::move(load)) {}

uint32_t ByBranch::begin(Worker& worker, uint64_t round) {
  return begin(worker.branches(), round > 0 ? round : worker.round(0) + 1);
}

uint32_t ByBranch::begin(const BranchReply& branches, uint64_t round) {
  if (round + 1 < next_) {
    fail(ErrorCode::kInvalid,
         "round {} was begun before: after rejoin() restore what was saved, or begin with another "
         "ByBranch",
         round);
  }
  const uint32_t now = run_in(branches.runs, round).branch;
  Waiting waiting = waiting_;
  // Of a branch that runs no more, or not yet, or is about to wait.
  const auto state_of = [&](uint32_t branch) -> std::shared_ptr<const State>& {
    std::shared_ptr<const State>& state = waiting[branch];
    if (state) return state;
    if (branch != branch_) {
      fail(ErrorCode::kInvalid,
           "there is no state of branch {}: its fork was missed; call begin() before each round, "
           "from the first on",
           branch);
    }
    return state = std::make_shared<const State>(save_());
  };
  if (next_ == 0) {
    branch_ = now;
    for (const uint32_t branch : waiting_in(round, branches)) waiting[branch] = state_of(now);
  } else {
    for (const BranchFork& fork : branches.forks) {
      if (fork.round < next_ || fork.round > round) continue;
      waiting[fork.branch] = state_of(fork.parent);
    }
    if (now != branch_) {
      const std::shared_ptr<const State> state = state_of(now);
      waiting_[branch_] =
          state_of(branch_);  // that is what it has, if only a part of `state` comes
      load_(*state);
    }
  }
  waiting.erase(now);
  const std::set<uint32_t> needed = needed_after(round, branches);
  std::erase_if(waiting, [&](const auto& each) { return !needed.contains(each.first); });
  waiting_ = std::move(waiting);
  branch_ = now;
  next_ = round + 1;
  return now;
}

ByBranch::State ByBranch::saved() const {
  std::vector<const State*> states;
  std::vector<uint32_t> of;
  for (const auto& [branch, state] : waiting_) {
    if (branch == branch_) continue;
    auto at = std::ranges::find(states, state.get());
    if (at == states.end()) at = states.insert(at, state.get());
    of.push_back(branch);
    of.push_back(static_cast<uint32_t>(at - states.begin()));
  }
  const Head head = {.next = next_,
                     .branch = branch_,
                     .waiting = static_cast<uint32_t>(of.size() / 2),
                     .states = static_cast<uint32_t>(states.size()),
                     .zero = 0};
  State saved;
  append_value(saved, head);
  append_array<uint32_t>(saved, of);
  for (const State* state : states) append_value(saved, uint64_t{state->size()});
  for (const State* state : states) append_array<std::byte>(saved, *state);
  return saved;
}

void ByBranch::restore(std::span<const std::byte> saved) {
  ByteReader reader(saved, "what was saved of branches is cut short, or something else");
  const auto head = reader.value<Head>();
  reader.check(head.states <= head.waiting);
  const std::vector<uint32_t> of = reader.array<uint32_t>(uint64_t{2} * head.waiting);
  const std::vector<uint64_t> bytes = reader.array<uint64_t>(head.states);
  std::vector<std::shared_ptr<const State>> states;
  for (const uint64_t of_one : bytes) {
    states.push_back(std::make_shared<State>(reader.array<std::byte>(of_one)));
  }
  Waiting waiting;
  for (size_t i = 0; i < of.size(); i += 2) {
    reader.check(of[i + 1] < states.size());
    waiting[of[i]] = states[of[i + 1]];
  }
  reader.check(reader.at_end() && waiting.size() == head.waiting && !waiting.contains(head.branch));
  waiting_ = std::move(waiting);
  branch_ = head.branch;
  next_ = head.next;
}

}  // namespace phub
