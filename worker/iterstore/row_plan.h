// The places of the rows of all tables: the rows of each key of the job, and their order. A pure
// function of the accesses of all ranks, so that all ranks have the same.
//
// Rows that are first read in the same part of the iteration lie together (a batch, which is a key:
// it comes as a whole), and within a batch those that the same ranks access: so the chunks of a key
// have few owners, and travel only to them. Among rows of the same ranks, those that are accessed
// most come first. If it is known at which machines ranks are, rows that ranks of one machine alone
// access have keys of their own in a narrow table: so these chunks can lie at that machine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/control/interest.h"
#include "worker/iterstore/recording.h"

namespace phub::iterstore {

// Sets of ranks, with a number for each: bit r % 64 of word r / 64 for each rank r. The first one
// is empty.
class RankSets {
 public:
  using Set = std::vector<uint64_t>;  // words

  explicit RankSets(uint32_t ranks) : words_((ranks + 63) / 64) { number_of(Set(words_)); }
  size_t words() const { return words_; }
  const Set& operator[](uint32_t number) const { return sets_[number]; }
  uint32_t size() const { return static_cast<uint32_t>(sets_.size()); }
  uint32_t number_of(const Set& set) {  // a new one if it is not there
    const auto [at, is_new] = numbers_.try_emplace(set, size());
    if (is_new) sets_.push_back(set);
    return at->second;
  }
  // The places of the sets in an order that does not depend on that of their numbers.
  std::vector<uint32_t> order() const {
    std::vector<uint32_t> places(sets_.size());
    uint32_t place = 0;
    for (const auto& [set, number] : numbers_) places[number] = place++;
    return places;
  }

 private:
  size_t words_;
  std::map<Set, uint32_t> numbers_;
  std::vector<Set> sets_;
};

// The use of a row by all ranks.
struct SharedUse {
  int32_t accesses = 0;
  int32_t updating = 0;  // the number of ranks that update it
  uint32_t ranks = 0;    // the number of the set of those that access it
  int32_t owner = -1;    // one rank that accesses it; -1: nobody does
  uint8_t first_part = kParts;
};
struct AllUse {
  std::vector<std::vector<SharedUse>> rows;  // by table and row
  RankSets sets;
};

struct PlanSettings {
  bool placement = true;
  bool narrow = true;  // tables that are fixed: only rows that somebody accesses are in the job,
                       // whose keys say which ranks exchange which rows
  uint32_t batches = 8;
  // The ranks, where a key of which each of them updates few rows is to send those rows alone,
  // unless nobody has recorded its table; 0: keys are sent whole. For jobs out of lock-step, which
  // have no narrow tables.
  uint32_t sparse_ranks = 0;
  uint32_t chunk_elements = 8192;
  std::vector<uint64_t> rank_hosts = {};  // the machine of each rank; empty: it is unknown
};

struct RowPlace {
  uint32_t key = 0;
  uint64_t row = 0;  // index within the key
};

class RowPlan {
 public:
  struct Key {
    uint32_t table = 0;
    uint64_t first = 0, rows = 0;  // positions of the table
    uint32_t part = 0;             // the part in which it is first read, 0 …
                                   // kParts
    bool sparse = false;           // only the rows that were updated are sent (KeySpec::rows_limit)
    std::vector<ExchangedRange> exchanged_by = {};  // for a narrow table; empty: all ranks exchange
                                                    // all of it
  };

  // Without `use`, all rows are in their order, in one batch.
  RowPlan(std::span<const Table> tables, const AllUse* use, const PlanSettings& settings);

  const std::vector<Key>& keys() const { return keys_; }  // in the order of their first read
  const std::vector<uint64_t>& rank_hosts() const { return rank_hosts_; }
  // Rows that nobody accesses are not in the job.
  bool is_narrow(uint32_t table) const { return tables_[table].narrow; }
  bool has_narrow() const { return std::ranges::any_of(tables_, &OfTable::narrow); }
  // Ends is_narrow(). Rows that had a place keep it; the other rows are in a key behind all others.
  void widen(uint32_t table);
  // Returns nullopt if the row is not in the job.
  std::optional<RowPlace> place(uint32_t table, uint64_t row) const;
  // A rank that accesses this row of a narrow table; -1: there is none.
  int32_t owner(uint32_t table, uint64_t row) const { return tables_[table].owner[row]; }
  // Tells plans with rows in other places apart, and the same plan is the same in every run.
  uint64_t fingerprint() const;
  uint64_t row_at(uint32_t table, uint64_t position) const {
    return tables_[table].row_at.empty() ? position : tables_[table].row_at[position];
  }

 private:
  struct OfTable {
    bool narrow = false;
    std::vector<uint64_t> row_at;    // by position; empty: all rows are at their own positions
    std::vector<uint64_t> position;  // by row
    std::vector<int32_t> owner;      // by row, if narrow
    std::vector<uint32_t> keys;      // by ascending position
  };
  void place_table(uint32_t table, const Table& of, const AllUse* all,
                   const PlanSettings& settings);

  std::vector<uint64_t> rank_hosts_;
  std::vector<Key> keys_;
  std::vector<OfTable> tables_;
};

// The keys of the job, without the clock's.
std::vector<KeySpec> key_specs(const RowPlan& plan, std::span<const Table> tables);

// The parts of narrow tables' keys that a rank writes and reads: whole chunks of the rows that it
// uses.
std::vector<KeyInterest> interest_of(const RowPlan& plan, std::span<const Table> tables,
                                     const Use& use, uint32_t chunk_elements);

}  // namespace phub::iterstore
