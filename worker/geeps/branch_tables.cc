#include "worker/geeps/branch_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "transport/control/branch_runs.h"
#include "transport/error.h"

namespace phub::geeps {
namespace {

// Names in the rank's own state: of the head, and with a table's name of its BranchRows.
constexpr const char* kSaved = "geeps.branches";

struct Head {
  uint64_t next_round;
  uint64_t branch;
};

std::string branches_entry(const Table& table) {
  return fmt::format("{}/{}", kSaved, table.spec.name);
}

bool is_by_branch(const Table& table) { return table.branches != nullptr; }

}  // namespace

void BranchTables::begin() {
  if (std::ranges::none_of(mover_.tables, is_by_branch)) return;
  const std::optional<Exchange::Branches> at = mover_.exchange.branches(0);
  if (!at) return;
  any_ = true;
  if (load()) return enter(*at);
  branch_ = run_in(at->all.runs, at->round).branch;
  const std::set<uint32_t> waiting = waiting_in(at->round, at->all);
  for (Table& table : mover_.tables) {
    if (!table.branches) continue;
    for (const uint32_t branch : waiting) table.branches->fork_running(branch);
  }
  forks_from_ = at->round + 1;
}

void BranchTables::begin_next_round(const Exchange::Branches& at) {
  try {
    enter(at);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kFull) throw;
    // That has an effect, here: the tables are in between two branches.
    fail(ErrorCode::kInternal, "while the branch changed: {}", e.what());
  }
  ++rounds_;
}

bool BranchTables::all_are_clocked() const {
  uint32_t clocked = 0, parameters = 0;
  for (const Table& table : mover_.tables) {
    if (table.spec.local) continue;
    ++parameters;
    if (table.clocks > rounds_) ++clocked;
  }
  if (clocked == 0 || clocked == parameters) return clocked > 0;
  const auto found = std::ranges::find_if(mover_.tables, [&](const Table& table) {
    return !table.spec.local && table.clocks <= rounds_;
  });
  fail(ErrorCode::kInvalid,
       "save_point before TableClock of '{}': others were clocked since the last",
       found->spec.name);
}

void BranchTables::enter(const Exchange::Branches& at) {
  const uint32_t running = run_in(at.all.runs, at.round).branch;
  std::vector<BranchFork> forks;
  for (const BranchFork& fork : at.all.forks) {
    if (forks_from_ <= fork.round && fork.round <= at.round) forks.push_back(fork);
  }
  const bool changes = running != branch_;
  if (changes || !forks.empty()) copies_.settle(is_by_branch);  // nothing writes there any more
  if (changes) hold_fills();
  const std::set<uint32_t> needed = needed_after(at.round, at.all);
  for (Table& table : mover_.tables) {
    if (!table.branches) continue;
    for (const BranchFork& fork : forks) {
      if (fork.parent == branch_) {
        table.branches->fork_running(fork.branch);
      } else {
        table.branches->fork(fork.parent, fork.branch);
      }
    }
    if (changes) table.branches->enter(running, branch_);
    table.branches->retain(needed);
  }
  if (changes) go_on_with_rows();
  branch_ = running;
  forks_from_ = at.round + 1;
}

// Nothing reads the tables' memory any more.
void BranchTables::hold_fills() {
  if (!mover_.schedule) return;
  {
    CacheWaits::Lock lock(waits_);
    for (Table& table : mover_.tables) {
      if (table.branches) mover_.table_use.begin_replacing(table);
    }
    lock.wait([&] { return mover_.failure.happened() || !mover_.table_use.fills_replaced(); }, {});
    mover_.failure.check();
  }
  for (const PlannedAccess& access : mover_.schedule->accesses) {
    const ListPlan& list = mover_.schedule->lists[access.list];
    if (!mover_.tables[list.table].branches) continue;
    for (const auto& ready : access.ready) ready->wait();
  }
}

// Other rows are in the tables' memory.
void BranchTables::go_on_with_rows() {
  if (!mover_.schedule) return;
  copies_.load_pinned_of(is_by_branch);
  const CacheWaits::Lock lock(waits_);
  for (Table& table : mover_.tables) {
    if (table.branches) mover_.table_use.end_replacing(table);
  }
}

std::map<std::string, std::vector<std::byte>> BranchTables::saved() const {
  std::map<std::string, std::vector<std::byte>> state;
  if (!any_) return state;
  const Head head = {forks_from_, branch_};
  const auto bytes = std::as_bytes(std::span(&head, 1));
  state[kSaved] = {bytes.begin(), bytes.end()};
  for (const Table& table : mover_.tables) {
    if (table.branches) state[branches_entry(table)] = table.branches->saved();
  }
  return state;
}

// False: there is nothing saved.
bool BranchTables::load() {
  const auto saved = mover_.exchange.restored(kSaved);
  if (!saved) return false;
  Head head = {};
  if (saved->size() != sizeof head) {
    fail(ErrorCode::kMismatch, "what was saved of branches has {} bytes, not {}", saved->size(),
         sizeof head);
  }
  std::memcpy(&head, saved->data(), sizeof head);
  if (head.branch > std::numeric_limits<uint32_t>::max()) {
    fail(ErrorCode::kMismatch, "what was saved is of branch {}, which cannot be", head.branch);
  }
  forks_from_ = head.next_round;
  branch_ = static_cast<uint32_t>(head.branch);
  for (Table& table : mover_.tables) {
    if (!table.branches) continue;
    const auto rows = mover_.exchange.restored(branches_entry(table));
    if (!rows) {
      fail(ErrorCode::kMismatch, "local table '{}' is by branch, and was not when it was saved",
           table.spec.name);
    }
    table.branches->restore(*rows, table.spec.name);
  }
  return true;
}

}  // namespace phub::geeps
