#include "tests/iterstore/programs.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

namespace phub::testing {
namespace {

using iterstore::StoreThread;
using iterstore::TableSpec;

template <class T>
T identity_of(const std::string& operation) {
  if (operation == "multiply") return 1;
  using Limits = std::numeric_limits<T>;
  if (operation == "min") return Limits::has_infinity ? Limits::infinity() : Limits::max();
  if (operation == "max") return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  return 0;
}

template <class T>
T together(const std::string& operation, T a, T b) {
  if (operation == "min") return std::min(a, b);
  if (operation == "max") return std::max(a, b);
  if constexpr (std::is_floating_point_v<T>) {
    return operation == "add" ? a + b : a * b;
  } else {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<T>(operation == "add" ? x + y : operation == "or" ? x | y : x * y);
  }
}

// f(T()) for the table's type.
template <class F>
auto with_type(const TableSpec& table, F f) {
  if (table.type == "f32") return f(float());
  if (table.type == "f64") return f(double());
  if (table.type == "i32") return f(int32_t());
  return f(int64_t());
}

template <class T>
T value_of(std::mt19937_64& random) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(0.7 + static_cast<double>(random() % 100'000) * 6e-6);  // to 1.3
  } else {
    return static_cast<T>(random());
  }
}

}  // namespace

uint32_t words_of(const TableSpec& table) {
  return table.columns * (table.type.ends_with("64") ? 2 : 1);
}

std::vector<TableSpec> some_tables(std::mt19937_64& random) {
  std::vector<TableSpec> tables;
  for (const std::string operation : {"add", "multiply", "min", "max", "or"}) {
    for (const std::string type : {"f32", "f64", "i32", "i64"}) {
      if (operation == "or" && type[0] == 'f') continue;
      if (random() % 3 > 0 && !(tables.empty() && operation == "or")) continue;
      tables.push_back({.name = operation + "-" + type,
                        .rows = 1 + random() % 150,
                        .columns = static_cast<uint32_t>(1 + random() % 9),
                        .type = type,
                        .operation = operation,
                        .fixed = random() % 2 == 0});
    }
  }
  return tables;
}

Calls some_calls(std::span<const TableSpec> tables, uint32_t share, uint32_t shares,
                 std::mt19937_64& random) {
  Calls calls(random() % 200);
  for (Call& call : calls) {
    call.table = static_cast<uint32_t>(random() % tables.size());
    const uint64_t rows = tables[call.table].rows;
    const uint64_t first = rows * share / shares, end = rows * (share + 1) / shares;
    call.row = first < end && random() % 4 > 0 ? first + random() % (end - first) : random() % rows;
    if (random() % 4 == 0) call.row = std::min<uint64_t>(call.row, 2);  // that many share
    call.update = random() % 2 == 0;
    call.seed = random();
  }
  return calls;
}

Calls like(const Calls& calls, std::span<const TableSpec> tables, bool strays,
           std::mt19937_64& random) {
  Calls others;
  const uint64_t changes = random() % 3;  // none in a third
  for (const Call& call : calls) {
    if (changes > 0 && random() % 20 == 0) continue;
    others.push_back(call);
    others.back().seed = random();
    if (changes == 0 || random() % 20 > 0) continue;
    Call more = calls[random() % calls.size()];
    more.seed = random();
    if (!tables[more.table].fixed || (strays && random() % 10 == 0)) {
      more.row = random() % tables[more.table].rows;
      more.update = random() % 2 == 0;
    }
    others.push_back(more);
  }
  return others;
}

Words values(const TableSpec& table, uint64_t seed) {
  std::mt19937_64 random(seed);
  Words words(words_of(table));
  with_type(table, [&](auto type) {
    using T = decltype(type);
    for (uint32_t c = 0; c < table.columns; ++c) {
      const T value = value_of<T>(random);
      std::memcpy(reinterpret_cast<std::byte*>(words.data()) + c * sizeof value, &value,
                  sizeof value);
    }
  });
  return words;
}

Oracle::Oracle(std::vector<TableSpec> tables) : tables_(std::move(tables)) {
  for (const TableSpec& table : tables_) {
    Words& state = states_.emplace_back(table.rows * words_of(table));
    with_type(table, [&](auto type) {
      using T = decltype(type);
      const T value = identity_of<T>(table.operation);
      for (size_t at = 0; at < state.size() * 4; at += sizeof value) {
        std::memcpy(reinterpret_cast<std::byte*>(state.data()) + at, &value, sizeof value);
      }
    });
  }
}

void Oracle::fold(uint32_t table, const Words& from, uint32_t* to) const {
  with_type(tables_[table], [&](auto type) {
    using T = decltype(type);
    for (uint32_t c = 0; c < tables_[table].columns; ++c) {
      T a, b;
      std::byte* const at = reinterpret_cast<std::byte*>(to) + c * sizeof a;
      std::memcpy(&a, at, sizeof a);
      std::memcpy(&b, reinterpret_cast<const std::byte*>(from.data()) + c * sizeof b, sizeof b);
      const T both = together(tables_[table].operation, a, b);
      std::memcpy(at, &both, sizeof both);
    }
  });
}

std::vector<Words> Oracle::run(uint32_t rank, uint32_t thread, const Calls& calls) {
  std::vector<Words> seen;
  Pending& pending = pending_[{rank, thread}];
  for (const Call& call : calls) {
    const auto at = pending.find({call.table, call.row});
    if (!call.update) {
      const uint32_t words = words_of(tables_[call.table]);
      const auto row = states_[call.table].begin() + static_cast<ptrdiff_t>(call.row * words);
      seen.emplace_back(row, row + words);
      if (at != pending.end()) fold(call.table, at->second, seen.back().data());
    } else if (at == pending.end()) {
      pending[{call.table, call.row}] = values(tables_[call.table], call.seed);
    } else {
      fold(call.table, values(tables_[call.table], call.seed), at->second.data());
    }
  }
  return seen;
}

void Oracle::clock() {
  std::map<uint32_t, Pending> of_ranks;  // ranks ascending, as are the threads of each
  for (const auto& [who, pending] : pending_) {
    Pending& of_rank = of_ranks[who.first];
    for (const auto& [row, update] : pending) {
      const auto [at, first] = of_rank.try_emplace(row, update);
      if (!first) fold(row.first, update, at->second.data());
    }
  }
  Pending all;
  for (const auto& [rank, pending] : of_ranks) {
    for (const auto& [row, update] : pending) {
      const auto [at, first] = all.try_emplace(row, update);
      if (!first) fold(row.first, update, at->second.data());
    }
  }
  for (const auto& [row, update] : all) {
    fold(row.first, update, states_[row.first].data() + row.second * words_of(tables_[row.first]));
  }
  pending_.clear();
}

std::vector<Words> run(StoreThread& store, std::span<const TableSpec> tables, const Calls& calls) {
  std::vector<Words> seen;
  for (const Call& call : calls) {
    const TableSpec& table = tables[call.table];
    with_type(table, [&](auto type) {
      using T = decltype(type);
      std::vector<T> row(table.columns);
      Words words(words_of(table));
      if (call.update) {
        words = values(table, call.seed);
        std::memcpy(row.data(), words.data(), words.size() * 4);
        store.update(call.table, call.row, std::span<const T>(row));
        return;
      }
      store.read(call.table, call.row, std::span<T>(row));
      std::memcpy(words.data(), row.data(), words.size() * 4);
      seen.push_back(words);
    });
  }
  return seen;
}

}  // namespace phub::testing
