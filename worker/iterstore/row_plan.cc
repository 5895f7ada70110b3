#include "worker/iterstore/row_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

namespace phub::iterstore {
namespace {

constexpr std::array kTypeNames = {"f32", "f64", "i32", "i64"};
constexpr std::array kOperationNames = {"", "add", "multiply", "min", "max", "or"};

constexpr uint64_t kChunksOfBatch = 4;  // about; smaller ones have chunks of many owners

uint32_t batches_of(const Table& table, const PlanSettings& settings) {
  const uint64_t chunks = (table.rows * table.row_words() - 1) / settings.chunk_elements + 1;
  return static_cast<uint32_t>(std::clamp<uint64_t>(chunks / kChunksOfBatch, 1, settings.batches));
}

// Rows that are only updated are in the last one.
uint32_t batch_of(const SharedUse& use, uint32_t batches) {
  if (use.owner < 0) return batches;  // after all others
  return std::min(use.first_part, static_cast<uint8_t>(kParts - 1)) * batches / kParts;
}

// Tells at which machine the ranks of a set are.
class Machines {
 public:
  // Keeps references.
  Machines(const std::vector<uint64_t>& rank_hosts, const RankSets& sets)
      : rank_hosts_(rank_hosts), sets_(sets), hosts_(rank_hosts.begin(), rank_hosts.end()) {}
  // From 1 on; 0: at several, or it is unknown.
  uint32_t of(uint32_t set) {
    if (hosts_.size() < 2) return 0;
    known_.resize(sets_.size());
    if (!known_[set]) known_[set] = find(sets_[set]);
    return *known_[set];
  }

 private:
  uint32_t find(const RankSets::Set& set) const {
    uint64_t host = 0;
    for (uint32_t rank = 0; rank < rank_hosts_.size(); ++rank) {
      if ((set[rank / 64] >> (rank % 64) & 1) == 0) continue;
      if (rank_hosts_[rank] == 0 || (host != 0 && rank_hosts_[rank] != host)) return 0;
      host = rank_hosts_[rank];
    }
    if (host == 0) return 0;
    return static_cast<uint32_t>(1 + std::distance(hosts_.begin(), hosts_.find(host)));
  }

  const std::vector<uint64_t>& rank_hosts_;
  const RankSets& sets_;
  const std::set<uint64_t> hosts_;
  std::vector<std::optional<uint32_t>> known_;  // by set
};

// The ranks that access some row of each chunk, of these rows in their order.
std::vector<ExchangedRange> exchanged_by(std::span<const uint64_t> rows,
                                         std::span<const SharedUse> use, const RankSets& sets,
                                         uint64_t row_words, uint32_t chunk_elements) {
  const uint64_t elements = rows.size() * row_words;
  std::vector<ExchangedRange> ranges;
  for (uint64_t begin = 0; begin < elements; begin += chunk_elements) {
    const uint64_t end = std::min<uint64_t>(begin + chunk_elements, elements);
    RankSets::Set ranks(sets.words());
    for (uint64_t i = begin / row_words; i <= (end - 1) / row_words; ++i) {
      const RankSets::Set& of_row = sets[use[rows[i]].ranks];
      for (size_t w = 0; w < ranks.size(); ++w) ranks[w] |= of_row[w];
    }
    if (!ranges.empty() && ranges.back().ranks == ranks) {
      ranges.back().end = end;
    } else {
      ranges.push_back({.end = end, .ranks = std::move(ranks)});
    }
  }
  if (ranges.size() > kMaxExchangedRanges) return {};
  return ranges;
}

// The chunks that have some of the ranges, as ranges of whole chunks. Too many: one from the first
// to the last.
std::vector<ElementRange> in_chunks(const std::vector<bool>& chunks, uint32_t chunk_elements,
                                    uint64_t elements) {
  std::vector<ElementRange> ranges;
  for (size_t c = 0; c < chunks.size(); ++c) {
    if (!chunks[c]) continue;
    const uint64_t begin = c * chunk_elements;
    const uint64_t end = std::min(begin + chunk_elements, elements);
    if (!ranges.empty() && ranges.back().end == begin) {
      ranges.back().end = end;
    } else {
      ranges.push_back({begin, end});
    }
  }
  if (ranges.size() > kMaxInterestRanges) return {{ranges.front().begin, ranges.back().end}};
  return ranges;
}

// A row that is sent alone has its index with it. Rows of others, and chunks that nobody changes,
// do not travel; where that is little, keys are sent whole, which takes less computing.
constexpr double kMostSent = 0.8;  // of the words of a key, by a rank in a clock

bool is_sparse(int64_t updates, uint64_t rows, uint64_t row_words, uint32_t ranks) {
  if (ranks == 0 || rows > kMaxRowsLimit || row_words > kMaxTileColumns) return false;
  const auto sent = static_cast<double>(updates) * static_cast<double>(row_words + 1);
  return sent < kMostSent * static_cast<double>(rows * row_words) * ranks;
}

}  // namespace

RowPlan::RowPlan(std::span<const Table> tables, const AllUse* use, const PlanSettings& settings)
    : rank_hosts_(settings.rank_hosts) {
  tables_.resize(tables.size());
  for (uint32_t t = 0; t < tables.size(); ++t) {
    place_table(t, tables[t], use, settings);
  }
  std::vector<uint32_t> order(keys_.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](uint32_t k) { return keys_[k].part; });
  std::vector<Key> by_use;
  for (const uint32_t k : order) {
    tables_[keys_[k].table].keys.push_back(static_cast<uint32_t>(by_use.size()));
    by_use.push_back(keys_[k]);
  }
  keys_ = std::move(by_use);
  for (OfTable& table : tables_) {
    std::ranges::sort(table.keys, {}, [&](uint32_t k) { return keys_[k].first; });
  }
}

void RowPlan::place_table(uint32_t table, const Table& of, const AllUse* all,
                          const PlanSettings& settings) {
  OfTable& to = tables_[table];
  if (all == nullptr) {
    keys_.push_back({.table = table, .first = 0, .rows = of.rows});
    return;
  }
  const std::vector<SharedUse>& use = all->rows[table];
  const uint32_t batches = batches_of(of, settings);
  // Of a table that nobody recorded it is not known how many rows are updated.
  const bool is_recorded =
      std::ranges::any_of(use, [](const SharedUse& row) { return row.accesses > 0; });
  const uint32_t sparse_ranks = is_recorded ? settings.sparse_ranks : 0;
  if (!settings.placement) {  // batches are ranges of rows
    for (uint32_t b = 0; b < batches; ++b) {
      const uint64_t first = of.rows * b / batches, end = of.rows * (b + 1) / batches;
      if (first == end) continue;
      Key key{.table = table, .first = first, .rows = end - first, .part = kParts};
      int64_t updates = 0;
      for (uint64_t row = first; row < end; ++row) {
        key.part = std::min<uint32_t>(key.part, use[row].first_part);
        updates += use[row].updating;
      }
      key.sparse = is_sparse(updates, key.rows, of.row_words(), sparse_ranks);
      keys_.push_back(key);
    }
    return;
  }
  to.narrow = of.fixed && settings.narrow;
  if (to.narrow) {
    for (const SharedUse& row : use) to.owner.push_back(row.owner);
  }
  Machines machines(rank_hosts_, all->sets);
  const auto machine_of = [&](uint64_t row) { return to.narrow ? machines.of(use[row].ranks) : 0; };
  to.row_at.resize(of.rows);
  std::iota(to.row_at.begin(), to.row_at.end(), 0);
  const std::vector<uint32_t> order = all->sets.order();
  std::ranges::stable_sort(to.row_at, {}, [&](uint64_t row) {
    const SharedUse& u = use[row];
    return std::tuple(batch_of(u, batches), machine_of(row), order[u.ranks], -int64_t{u.accesses});
  });
  to.position.resize(of.rows);
  for (uint64_t i = 0; i < of.rows; ++i) to.position[to.row_at[i]] = i;
  const uint64_t most_rows = sparse_ranks > 0 ? kMaxRowsLimit : of.rows;
  for (uint64_t first = 0; first < of.rows;) {
    const uint32_t batch = batch_of(use[to.row_at[first]], batches);
    if (batch == batches && to.narrow) break;
    const uint32_t machine = machine_of(to.row_at[first]);
    uint64_t end = first;
    int64_t updates = 0;
    while (end < of.rows && end - first < most_rows &&
           batch_of(use[to.row_at[end]], batches) == batch &&
           machine_of(to.row_at[end]) == machine) {
      updates += use[to.row_at[end]].updating;
      ++end;
    }
    keys_.push_back({.table = table,
                     .first = first,
                     .rows = end - first,
                     .part = batch * kParts / batches,
                     .sparse = is_sparse(updates, end - first, of.row_words(), sparse_ranks)});
    if (to.narrow) {
      keys_.back().exchanged_by =
          exchanged_by(std::span(to.row_at).subspan(first, end - first), use, all->sets,
                       of.row_words(), settings.chunk_elements);
    }
    first = end;
  }
}

uint64_t RowPlan::fingerprint() const {
  uint64_t mixed = 0;
  const auto mix = [&mixed](uint64_t value) {
    mixed = (mixed ^ value) * 0x9e3779b97f4a7c15;
    mixed ^= mixed >> 32;
  };
  for (const Key& key : keys_) {
    mix(key.table);
    mix(key.first);
    mix(key.rows);
  }
  for (const OfTable& table : tables_) {
    mix(table.narrow ? 1 : 2);
    for (const uint64_t row : table.row_at) mix(row);
  }
  return mixed;
}

void RowPlan::widen(uint32_t table) {
  OfTable& of = tables_[table];
  of.narrow = false;
  of.owner.clear();
  uint64_t first = 0;
  for (const uint32_t k : of.keys) {
    keys_[k].exchanged_by.clear();
    first += keys_[k].rows;
  }
  if (first == of.row_at.size()) return;
  of.keys.push_back(static_cast<uint32_t>(keys_.size()));
  keys_.push_back(
      {.table = table, .first = first, .rows = of.row_at.size() - first, .part = kParts});
}

std::optional<RowPlace> RowPlan::place(uint32_t table, uint64_t row) const {
  const OfTable& of = tables_[table];
  const uint64_t position = of.position.empty() ? row : of.position[row];
  const auto after =
      std::ranges::upper_bound(of.keys, position, {}, [&](uint32_t k) { return keys_[k].first; });
  if (after == of.keys.begin()) return std::nullopt;
  const uint32_t k = *(after - 1);
  if (position >= keys_[k].first + keys_[k].rows) return std::nullopt;
  return RowPlace{.key = k, .row = position - keys_[k].first};
}

std::vector<KeySpec> key_specs(const RowPlan& plan, std::span<const Table> tables) {
  std::vector<KeySpec> specs;
  for (const RowPlan::Key& key : plan.keys()) {
    const Table& table = tables[key.table];
    specs.push_back({.name = fmt::format("{}/{}", table.name, key.first),
                     .elements = key.rows * table.row_words(),
                     .priority = static_cast<int32_t>(kParts - key.part),
                     .shape = {key.rows, table.row_words()},
                     .operation = kOperationNames[static_cast<size_t>(table.fold.operation)],
                     .value_type = kTypeNames[static_cast<size_t>(table.fold.type)],
                     .exchanged_by = key.exchanged_by});
    if (key.sparse) set_rows_limit(specs.back(), static_cast<uint32_t>(key.rows), true);
  }
  return specs;
}

std::vector<KeyInterest> interest_of(const RowPlan& plan, std::span<const Table> tables,
                                     const Use& use, uint32_t chunk_elements) {
  std::vector<KeyInterest> interests;
  const std::vector<KeySpec> specs = key_specs(plan, tables);
  for (size_t k = 0; k < specs.size(); ++k) {
    const RowPlan::Key& key = plan.keys()[k];
    if (!plan.is_narrow(key.table)) continue;
    const uint64_t words = tables[key.table].row_words();
    const uint64_t chunks = (specs[k].elements - 1) / chunk_elements + 1;
    std::vector<bool> writes(chunks), reads(chunks);
    for (uint64_t i = 0; i < key.rows; ++i) {
      const RowUse& row = use.rows[key.table][plan.row_at(key.table, key.first + i)];
      if (row.accesses == 0) continue;
      for (uint64_t c = i * words / chunk_elements; c <= ((i + 1) * words - 1) / chunk_elements;
           ++c) {
        reads[c] = true;
        if (row.updated) writes[c] = true;
      }
    }
    interests.push_back({.key = specs[k].name,
                         .writes = in_chunks(writes, chunk_elements, specs[k].elements),
                         .reads = in_chunks(reads, chunk_elements, specs[k].elements)});
  }
  return interests;
}

}  // namespace phub::iterstore
