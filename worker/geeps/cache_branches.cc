// Tables by branch: at the end of a round they get the rows of the branch that runs in the next
// one.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "transport/control/branch_runs.h"
#include "transport/error.h"
#include "worker/geeps/cache_impl.h"

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

}  // namespace

// REQUIRES: there is no sequence yet, and local tables are restored.
void Cache::Impl::begin_branches() {
  if (std::ranges::none_of(specs_, &TableSpec::by_branch)) return;
  const std::optional<Exchange::Branches> at = mover_.exchange.branches(0);
  if (!at) return;
  has_branches_ = true;
  if (load_branches()) return enter_round(*at);
  branch_ = run_in(at->all.runs, at->round).branch;
  const std::set<uint32_t> waiting = waiting_in(at->round, at->all);
  for (Table& table : mover_.tables) {
    if (!table.branches) continue;
    for (const uint32_t branch : waiting) table.branches->fork_running(branch);
  }
  next_round_ = at->round + 1;
}

// Whether a round is over now, and all its results are here.
bool Cache::Impl::ends_round() {
  if (!has_branches_ || virtual_) return false;
  {
    const Lock lock(*this);
    mover_.throw_if_failed();
    check_at_save_point();
    if (!is_clocked()) return false;
  }
  wait_all();
  return true;
}

void Cache::Impl::begin_next_round(const Exchange::Branches& at) {
  try {
    enter_round(at);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kFull) throw;
    // That has an effect, here: the tables are in between two branches.
    fail(ErrorCode::kInternal, "while the branch changed: {}", e.what());
  }
  ++rounds_;
}

// Whether this round's updates are clocked. REQUIRES: the lock is held.
bool Cache::Impl::is_clocked() const {
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

// REQUIRES: the results of all clocked updates are here.
void Cache::Impl::enter_round(const Exchange::Branches& at) {
  const uint32_t running = run_in(at.all.runs, at.round).branch;
  std::vector<BranchFork> forks;
  for (const BranchFork& fork : at.all.forks) {
    if (next_round_ <= fork.round && fork.round <= at.round) forks.push_back(fork);
  }
  const bool changes = running != branch_;
  if (changes || !forks.empty()) settle_branches();
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
  next_round_ = at.round + 1;
}

// The tables' memory has what was saved, and nothing writes there any more.
void Cache::Impl::settle_branches() {
  if (work_.in_stream()) work_.stream()->synchronize();
  store_dirty([](const Table& table) { return table.branches != nullptr; });
  for (const Table& table : mover_.tables) {
    if (!table.branches) continue;
    for (const Table::Part& part : table.parts) part.saved->wait();
  }
}

// Nothing reads the tables' memory any more.
void Cache::Impl::hold_fills() {
  if (!mover_.schedule) return;
  {
    Lock lock(*this);
    for (Table& table : mover_.tables) {
      if (table.branches) mover_.begin_replacing(table);
    }
    lock.wait([&] { return mover_.failed() || !mover_.fills_replaced(); }, {});
    mover_.throw_if_failed();
  }
  for (const PlannedAccess& access : mover_.schedule->accesses) {
    const ListPlan& list = mover_.schedule->lists[access.list];
    if (!mover_.tables[list.table].branches) continue;
    for (const uint32_t partition : list.partitions) access.ready[partition]->wait();
  }
}

// Other rows are in the tables' memory.
void Cache::Impl::go_on_with_rows() {
  if (!mover_.schedule) return;
  for (const PlacedEntry& entry : mover_.schedule->entries) {
    const Table& table = mover_.tables[entry.table];
    if (!entry.pinned || !table.branches) continue;
    for (const EntryPart& part : entry.parts) {
      own_lane_.rows->fetch(entry.rows, table.rows, nullptr, part.runs, table.row_floats);
    }
  }
  own_lane_.stream->synchronize();
  const Lock lock(*this);
  for (Table& table : mover_.tables) {
    if (table.branches) mover_.end_replacing(table);
  }
}

void Cache::Impl::save_branches(RankState& state) const {
  if (!has_branches_) return;
  const Head head = {next_round_, branch_};
  const auto bytes = std::as_bytes(std::span(&head, 1));
  state[kSaved] = {bytes.begin(), bytes.end()};
  for (const Table& table : mover_.tables) {
    if (table.branches) state[branches_entry(table)] = table.branches->saved();
  }
}

// False: there is nothing saved.
bool Cache::Impl::load_branches() {
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
  next_round_ = head.next_round;
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
