#include "worker/by_branch.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "transport/control/branch_runs.h"
#include "transport/error.h"

namespace phub {
namespace {

// How saved() begins: then, of each branch, its number and that of its state; the states' bytes,
// 64 bits each; the states.
struct Head {
  uint64_t next;
  uint32_t branch, waiting, states, zero;
};

void append(ByBranch::State& to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  to.resize(to.size() + bytes);
  std::memcpy(to.data() + to.size() - bytes, from, bytes);
}

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
  append(saved, &head, sizeof head);
  append(saved, of.data(), of.size() * sizeof(uint32_t));
  for (const State* state : states) {
    const uint64_t bytes = state->size();
    append(saved, &bytes, sizeof bytes);
  }
  for (const State* state : states) append(saved, state->data(), state->size());
  return saved;
}

void ByBranch::restore(std::span<const std::byte> saved) {
  const auto check = [](bool holds) {
    if (holds) return;
    fail(ErrorCode::kMismatch, "what was saved of branches is cut short, or something else");
  };
  const auto take = [&](void* to, uint64_t bytes) {
    check(saved.size() >= bytes);
    if (bytes > 0) std::memcpy(to, saved.data(), bytes);
    saved = saved.subspan(bytes);
  };
  Head head = {};
  take(&head, sizeof head);
  check(head.waiting <= saved.size() / (2 * sizeof(uint32_t)) && head.states <= head.waiting);
  std::vector<uint32_t> of(size_t{2} * head.waiting);
  take(of.data(), of.size() * sizeof(uint32_t));
  std::vector<uint64_t> bytes(head.states);
  take(bytes.data(), bytes.size() * sizeof(uint64_t));
  std::vector<std::shared_ptr<const State>> states;
  for (const uint64_t size : bytes) {
    check(size <= saved.size());
    auto state = std::make_shared<State>(size);
    take(state->data(), size);
    states.push_back(std::move(state));
  }
  Waiting waiting;
  for (size_t i = 0; i < of.size(); i += 2) {
    check(of[i + 1] < states.size());
    waiting[of[i]] = states[of[i + 1]];
  }
  check(saved.empty() && waiting.size() == head.waiting && !waiting.contains(head.branch));
  waiting_ = std::move(waiting);
  branch_ = head.branch;
  next_ = head.next;
}

}  // namespace phub
