#include "worker/iterstore/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "transport/control/job_spec.h"
#include "transport/error.h"
#include "worker/iterstore/recording.h"
#include "worker/iterstore/saving.h"

namespace phub::iterstore {
namespace {

constexpr uint32_t kMaxThreads = 4096;
constexpr size_t kMaxTableName = 200;  // a key's name has the number of its batch, too

Table checked(const TableSpec& spec) {
  if (spec.name.empty() || spec.name.size() > kMaxTableName) {
    fail(ErrorCode::kInvalid, "table '{}': its name must have 1 to {} characters", spec.name,
         kMaxTableName);
  }
  const auto fold = kernels::parse_fold(spec.type, spec.operation);
  if (!fold) {
    fail(ErrorCode::kInvalid,
         "table '{}': there is no operation '{}' of values of type '{}'; types are f32, f64, i32 "
         "and i64, operations add, multiply, min, max and, of whole numbers, or",
         spec.name, spec.operation, spec.type);
  }
  const uint64_t words = kernels::words_of(fold->type);
  const uint64_t most = spec.columns == 0 ? 0 : kMaxElements / (spec.columns * words);
  if (spec.rows == 0 || spec.rows > most || spec.spare > most - spec.rows) {
    fail(ErrorCode::kInvalid,
         "table '{}' has {} rows and {} spare ones of {} values: there must be some, and at most "
         "{} words of 4 bytes",
         spec.name, spec.rows, spec.spare, spec.columns, kMaxElements);
  }
  if (spec.fixed && spec.spare > 0) {
    fail(ErrorCode::kInvalid, "table '{}' has spare rows, so that it cannot be fixed", spec.name);
  }
  return {.name = spec.name,
          .rows = spec.rows + spec.spare,
          .spare = spec.spare,
          .columns = spec.columns,
          .fold = *fold,
          .fixed = spec.fixed};
}

}  // namespace

void check_options(const StoreOptions& options) {
  const JobSpec& spec = options.worker.spec;
  const auto refuse = [&spec](const std::string& what) {
    fail(ErrorCode::kInvalid, "store '{}': {}", spec.name, what);
  };
  check_job_name(spec.name + ".4294967295-accesses");  // the longest of its jobs
  if (spec.world_size == 0 || spec.world_size > kMaxRanks) {
    refuse(fmt::format("a job has 1 to {} ranks, not {}", kMaxRanks, spec.world_size));
  }
  if (options.worker.rank < 0 && !options.worker.rank_error.empty()) {
    refuse(options.worker.rank_error);
  }
  if (options.worker.rank < 0 || static_cast<uint32_t>(options.worker.rank) >= spec.world_size) {
    refuse(
        fmt::format("its rank is {}, and must be one of 0 to {}, as the application's data is "
                    "divided by it",
                    options.worker.rank, spec.world_size - 1));
  }
  if (spec.quorum > 0) refuse("all ranks take part in each clock: leave out quorum");
  if ((spec.min_ranks != 0 && spec.min_ranks != spec.world_size) ||
      (spec.max_ranks != 0 && spec.max_ranks != spec.world_size)) {
    refuse(
        "all ranks are there from its beginning, and no others: leave out min_ranks and max_ranks");
  }
  if (!spec.keys.empty() || !options.worker.interest.empty()) {
    refuse("keys and interest are made of its tables, and must be empty");
  }
  check_saving(options);
  if (options.worker.memory_device != nullptr) {
    refuse("its rows lie in host memory: leave out the memory_device");
  }
  if (options.threads == 0 || options.threads > kMaxThreads) {
    refuse(fmt::format("it has 1 to {} threads, not {}", kMaxThreads, options.threads));
  }
  if (options.batches == 0 || options.batches > kParts) {
    refuse(fmt::format("a table has 1 to {} batches, not {}", kParts, options.batches));
  }
  if (!(options.gather_again >= 0 && options.gather_again <= 1)) {
    refuse(
        fmt::format("gather_again is {}, and must be a share from 0 to 1", options.gather_again));
  }
  if (options.gather_again > 0 && spec.consistency != "bsp") {
    refuse(
        "gather_again is for lock-step (consistency bsp): otherwise ranks see at different clocks "
        "that the accesses have changed");
  }
  if (options.push_early && spec.consistency != "bsp") {
    refuse(
        "push_early is for lock-step (consistency bsp): otherwise the box applies at once what is "
        "pushed, and others read a part of a clock");
  }
  if (options.push_early && !options.static_index) {
    refuse("push_early needs the static_index, which knows the last access to a batch");
  }
  for (const TableSpec& table : options.tables) {
    if (table.spare == 0 || spec.consistency == "bsp") continue;
    refuse(fmt::format("table '{}' has spare rows, which are for lock-step (consistency bsp)",
                       table.name));
  }
  if (options.gather_again > 0 && !options.static_index) {
    refuse("gather_again needs the static_index, which knows what comes as recorded");
  }
}

std::vector<Table> checked_tables(std::span<const TableSpec> specs) {
  if (specs.empty() || specs.size() > kMaxTables) {
    fail(ErrorCode::kInvalid, "a store has 1 to {} tables, not {}", kMaxTables, specs.size());
  }
  std::vector<Table> tables;
  std::unordered_set<std::string> names;
  for (const TableSpec& spec : specs) {
    tables.push_back(checked(spec));
    if (!names.insert(spec.name).second) {
      fail(ErrorCode::kInvalid, "table '{}' is there twice", spec.name);
    }
  }
  return tables;
}

void begin_rows(const Table& table, std::span<std::byte> rows) {
  if (table.fold.operation == kernels::Operation::kAdd) {  // whose identity is -0
    std::ranges::fill(rows, std::byte{0});
  } else {
    kernels::fill_with_identity(table.fold, rows.data(), rows.size() / sizeof(uint32_t));
  }
}

States first_states(std::span<const Table> tables) {
  States states;
  for (const Table& table : tables) {
    begin_rows(table, states.emplace_back(table.bytes()));
  }
  return states;
}

}  // namespace phub::iterstore
