// The options and the tables of a store, checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/fold.h"
#include "worker/iterstore/store.h"

namespace phub::iterstore {

inline constexpr size_t kMaxTables = 1024;

struct Table {
  std::string name;
  uint64_t rows = 0;  // with the spare rows
  uint64_t spare = 0;
  uint32_t columns = 0;
  kernels::Fold fold;
  bool fixed = false;

  uint64_t row_words() const { return columns * kernels::words_of(fold.type); }
  uint64_t row_bytes() const { return row_words() * sizeof(uint32_t); }
  uint64_t bytes() const { return rows * row_bytes(); }
};

// Throws Error(kInvalid) that names the store and the option. Looks at no table.
void check_options(const StoreOptions& options);

// Throws Error(kInvalid) that names the table and what is wrong with it.
std::vector<Table> checked_tables(std::span<const TableSpec> specs);

// All rows of each table, one after another.
using States = std::vector<std::vector<std::byte>>;

// Fills rows of a table with its initial values.
void begin_rows(const Table& table, std::span<std::byte> rows);
States first_states(std::span<const Table> tables);  // the initial states of the tables

}  // namespace phub::iterstore
