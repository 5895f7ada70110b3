// Random programs of a store's threads, and what they must read: computed in one thread, over flat
// arrays. It shares no code with the store, nor with the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "worker/iterstore/store.h"

namespace phub::testing {

struct Call {
  bool update = false;
  uint32_t table = 0;
  uint64_t row = 0;
  uint64_t seed = 0;  // of the values, if it is an update
};
using Calls = std::vector<Call>;  // of one thread in one clock

// Words of 4 bytes.
using Words = std::vector<uint32_t>;

// Every operation on every type that it is of, some of them fixed.
std::vector<iterstore::TableSpec> some_tables(std::mt19937_64& random);
// Of a thread that has a share of the rows, and some of all rows.
Calls some_calls(std::span<const iterstore::TableSpec> tables, uint32_t share, uint32_t shares,
                 std::mt19937_64& random);
// Others in about the same order: some left out, some more. `strays`: once in a while of rows of
// tables that are fixed that are not in `calls`; else never.
Calls like(const Calls& calls, std::span<const iterstore::TableSpec> tables, bool strays,
           std::mt19937_64& random);

Words values(const iterstore::TableSpec& table, uint64_t seed);  // of a row

// The tables, and what a thread has updated since the last clock.
class Oracle {
 public:
  explicit Oracle(std::vector<iterstore::TableSpec> tables);

  // A thread's calls of a clock: what its reads return, in their order.
  std::vector<Words> run(uint32_t rank, uint32_t thread, const Calls& calls);
  void clock();
  const Words& table(uint32_t table) const { return states_[table]; }

 private:
  void fold(uint32_t table, const Words& from, uint32_t* to) const;

  using Pending = std::map<std::pair<uint32_t, uint64_t>, Words>;  // by table and row
  std::vector<iterstore::TableSpec> tables_;
  std::vector<Words> states_;
  std::map<std::pair<uint32_t, uint32_t>, Pending> pending_;  // by rank and thread
};

uint32_t words_of(const iterstore::TableSpec& table);  // of a row

// The same by the store. Returns what its reads return.
std::vector<Words> run(iterstore::StoreThread& store, std::span<const iterstore::TableSpec> tables,
                       const Calls& calls);

}  // namespace phub::testing
