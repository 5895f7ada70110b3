#include "worker/iterstore/saving.h"

#include <fmt/format.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/error.h"

namespace phub::iterstore {
namespace {

constexpr const char* kEntry = "phub-store";
constexpr std::chrono::milliseconds kBetweenJoins{50};

}  // namespace

void check_saving(const StoreOptions& options) {
  if (!options.worker.saver) return;
  const JobSpec& spec = options.worker.spec;
  const auto refuse = [&spec](const std::string& what) {
    fail(ErrorCode::kInvalid, "store '{}' with a saver: {}", spec.name, what);
  };
  if (spec.on_loss != OnLoss::kFail) {
    refuse("it goes on with all of its ranks, or ends: on_loss must be 'fail'");
  }
  if (options.gather_again > 0) refuse("rows are placed once: leave out gather_again");
  for (const TableSpec& table : options.tables) {
    if (table.spare == 0) continue;
    refuse(fmt::format("table '{}' has spare rows, whose names no checkpoint has", table.name));
  }
}

void Saving::check_may_record(uint64_t placed) const {
  if (!is_on() || placed == 0) return;
  fail(ErrorCode::kInvalid,
       "a store with a saver records once: who goes on from its checkpoint finds the rows where "
       "that recording places them");
}

void Saving::leave_out(WorkerOptions& job) {
  job.spec.saved = Saved::kNo;
  job.saver = nullptr;
}

void Saving::add_to(WorkerOptions& job, uint64_t plan) {
  at_ = {.clocks = 0, .plan = plan, .ranks = store_.spec.world_size};
  job.spec.saved = Saved::kYes;
  job.saver = [this](uint64_t) { return state(); };
}

RankState Saving::state() const {
  RankState state = store_.saver(at_.clocks);
  std::vector<std::byte> bytes(sizeof at_);
  std::memcpy(bytes.data(), &at_, sizeof at_);
  if (!state.emplace(kEntry, std::move(bytes)).second) {
    fail(ErrorCode::kInvalid, "saver: '{}' is the name of the store's own entry", kEntry);
  }
  return state;
}

std::optional<Saving::Entry> Saving::entry_of(const Worker& worker) {
  const auto bytes = worker.restored(kEntry);
  Entry saved;
  if (!bytes || bytes->size() != sizeof saved) return std::nullopt;
  std::memcpy(&saved, bytes->data(), sizeof saved);
  return saved;
}

std::unique_ptr<Worker> Saving::join(const WorkerOptions& job) {
  using Clock = std::chrono::steady_clock;
  const uint32_t ranks = job.spec.world_size;
  const auto give_up = Clock::now() + std::chrono::milliseconds(job.spec.join_limit_ms);
  for (;;) {
    try {
      auto worker = std::make_unique<Worker>(job);
      if (!job.saver || worker->first_round() == 1) return worker;
      if (const auto saved = entry_of(*worker)) {
        if (saved->ranks == ranks) return worker;
        fail(ErrorCode::kMismatch,
             "job '{}' of a store was saved after {} clocks by {} ranks, and now has {}: start as "
             "many, or delete the job to begin anew",
             job.spec.name, saved->clocks, saved->ranks, ranks);
      }
      if (Clock::now() > give_up) {
        fail(
            ErrorCode::kTaken,
            "job '{}' of a store is in round {}, and rank {} of {} has saved nothing that it could "
            "go on with: fewer ranks have saved it, this one was lost from it, or the job is "
            "another program's. End all ranks and start as many as have saved it, give the store "
            "another name, or delete the job",
            job.spec.name, worker->first_round(), worker->rank(), ranks);
      }
      worker->abandon();
    } catch (const Error& error) {
      const bool has_failed = job.saver && error.code() == ErrorCode::kRankLost;
      if (!has_failed || Clock::now() > give_up) throw;
    }
    std::this_thread::sleep_for(kBetweenJoins);
  }
}

uint64_t Saving::clocks_of(const Worker& worker) const {
  const Entry saved = entry_of(worker).value();
  if (saved.plan != at_.plan) {
    fail(ErrorCode::kMismatch,
         "store '{}' was saved after {} clocks with its rows in other places: what is recorded "
         "before the first finish() must be what the run that saved it recorded, on all ranks. "
         "Record the same, or delete the job to begin anew",
         store_.spec.name, saved.clocks);
  }
  return saved.clocks;
}

void Saving::save_if_due(Worker& worker, uint64_t round, uint64_t clocks) {
  if (!worker.saves() || round < worker.next_saved()) return;
  worker.wait_all();
  at_.clocks = clocks;
  worker.save({});
}

}  // namespace phub::iterstore
