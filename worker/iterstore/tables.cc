#include "worker/iterstore/tables.h"

#include <algorithm>
#include <unordered_set>

#include "transport/control/job_spec.h"
#include "transport/error.h"

namespace phub::iterstore {
namespace {

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
