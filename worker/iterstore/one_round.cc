#include "worker/iterstore/one_round.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "worker/iterstore/saving.h"

namespace phub::iterstore {
namespace {

KeySpec key_of(std::string name, uint64_t values, std::string_view operation,
               std::string_view type = "i32") {
  return {.name = std::move(name),
          .elements = type.ends_with("64") ? 2 * values : values,
          .operation = std::string(operation),
          .value_type = std::string(type)};
}

// Joins, sends what fill() writes to the keys' arrays, and passes on what all ranks have sent.
void exchange(const WorkerOptions& options,
              const std::function<void(size_t key, std::span<std::byte> to)>& fill,
              const std::function<void(size_t key, std::span<const std::byte> all)>& take) {
  Worker worker(options);
  check_is_new(worker);
  for (size_t key = 0; key < worker.keys(); ++key) {
    worker.wait(key);
    fill(key, worker.gradient_bytes(key));
    worker.push(key);
  }
  for (size_t key = 0; key < worker.keys(); ++key) {
    worker.wait(key);
    take(key, worker.parameter_bytes(key));
  }
}

template <class T>
void put(std::span<std::byte> to, size_t at, T value) {
  std::memcpy(to.data() + at * sizeof value, &value, sizeof value);
}
template <class T>
T get(std::span<const std::byte> from, size_t at) {
  T value;
  std::memcpy(&value, from.data() + at * sizeof value, sizeof value);
  return value;
}

WorkerOptions options_of_round(const WorkerOptions& store, const std::string& name,
                               std::vector<KeySpec> keys) {
  WorkerOptions options = options_of_job(store, name, std::move(keys));
  options.spec.consistency = "bsp";
  options.spec.slack = 0;
  options.spec.initial = "zeros";
  options.spec.rank_hosts.clear();
  options.spec.on_loss = "fail";  // what a lost rank has to say is missing
  options.interest.clear();
  return options;
}

// What is exchanged of a row. The state begins with zeros, which is where nobody accesses it.
enum Field : size_t { kAccesses, kUpdating, kRanks, kOwner, kFirstPart, kFields };

}  // namespace

WorkerOptions options_of_job(const WorkerOptions& store, const std::string& name,
                             std::vector<KeySpec> keys) {
  WorkerOptions options = store;
  options.spec.name = name;
  options.spec.optimizer = std::string(kFoldOptimizer);
  options.spec.keys = std::move(keys);
  Saving::leave_out(options);
  return options;
}

void check_is_new(const Worker& worker) {
  if (worker.first_round() == 1) return;
  fail(ErrorCode::kTaken,
       "job '{}' of a store is in round {}: it is that of an earlier run, or this rank was lost "
       "from it. A store begins anew: give it another name, or delete the job",
       worker.spec().name, worker.first_round());
}

AllRecorded use_of_all(const WorkerOptions& store, const std::string& name,
                       std::span<const Table> tables, const Use& mine, uint64_t host) {
  AllRecorded all{.use = {.rows = {}, .sets = RankSets(store.spec.world_size)}};
  const size_t words = all.use.sets.words();
  std::vector<KeySpec> keys;
  for (const Table& table : tables) {
    keys.push_back(key_of(table.name + "/accesses", table.rows, "add"));
    keys.push_back(key_of(table.name + "/updating", table.rows, "add"));
    keys.push_back(key_of(table.name + "/ranks", table.rows * words, "or", "i64"));
    keys.push_back(key_of(table.name + "/owner", table.rows, "max"));
    keys.push_back(key_of(table.name + "/first", table.rows, "max"));
  }
  const size_t key_of_clocks = keys.size(), key_of_hosts = key_of_clocks + 1;
  keys.push_back(key_of("clocks", 1, "max"));
  keys.push_back(key_of("hosts", store.spec.world_size, "or", "i64"));
  const WorkerOptions options = options_of_round(store, name, std::move(keys));
  const auto rank = static_cast<uint32_t>(store.rank);
  const auto most = static_cast<int32_t>(INT32_MAX / store.spec.world_size);
  for (const Table& table : tables) all.use.rows.emplace_back(table.rows);
  exchange(
      options,
      [&](size_t key, std::span<std::byte> to) {
        if (key == key_of_clocks) return put(to, 0, static_cast<int32_t>(mine.clocks));
        if (key == key_of_hosts) return put(to, rank, host);
        const std::vector<RowUse>& rows = mine.rows[key / kFields];
        for (size_t r = 0; r < rows.size(); ++r) {
          const bool here = rows[r].accesses > 0;
          const auto accesses = static_cast<int32_t>(rows[r].accesses);
          switch (key % kFields) {
            case kAccesses:
              put(to, r, std::min(accesses, most));
              break;
            case kUpdating:
              put(to, r, int32_t{rows[r].updated});
              break;
            case kRanks:
              if (here) put(to, r * words + rank / 64, uint64_t{1} << (rank % 64));
              break;
            case kOwner:
              put(to, r, here ? static_cast<int32_t>(rank + 1) : 0);
              break;
            default:
              put(to, r, static_cast<int32_t>(kParts - rows[r].first_part));
          }
        }
      },
      [&](size_t key, std::span<const std::byte> from) {
        if (key == key_of_clocks) {
          all.clocks = static_cast<uint32_t>(get<int32_t>(from, 0));
          return;
        }
        if (key == key_of_hosts) {
          for (size_t r = 0; r < store.spec.world_size; ++r) {
            all.hosts.push_back(get<uint64_t>(from, r));
          }
          return;
        }
        std::vector<SharedUse>& rows = all.use.rows[key / kFields];
        RankSets::Set ranks(words);
        for (size_t r = 0; r < rows.size(); ++r) {
          switch (key % kFields) {
            case kAccesses:
              rows[r].accesses = get<int32_t>(from, r);
              break;
            case kUpdating:
              rows[r].updating = get<int32_t>(from, r);
              break;
            case kRanks:
              for (size_t w = 0; w < words; ++w) ranks[w] = get<uint64_t>(from, r * words + w);
              rows[r].ranks = all.use.sets.number_of(ranks);
              break;
            case kOwner:
              rows[r].owner = get<int32_t>(from, r) - 1;
              break;
            default:
              rows[r].first_part =
                  static_cast<uint8_t>(static_cast<int32_t>(kParts) - get<int32_t>(from, r));
          }
        }
      });
  return all;
}

void unite(const WorkerOptions& store, const std::string& name,
           std::span<const std::span<std::byte>> arrays) {
  std::vector<KeySpec> keys;
  for (size_t k = 0; k < arrays.size(); ++k) {
    keys.push_back(key_of(fmt::format("{}", k), arrays[k].size() / sizeof(int32_t), "or"));
  }
  const WorkerOptions options = options_of_round(store, name, std::move(keys));
  exchange(
      options,
      [&](size_t key, std::span<std::byte> to) {
        std::memcpy(to.data(), arrays[key].data(), to.size());
      },
      [&](size_t key, std::span<const std::byte> from) {
        std::memcpy(arrays[key].data(), from.data(), from.size());
      });
}

}  // namespace phub::iterstore
