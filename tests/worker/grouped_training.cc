#include "tests/worker/grouped_training.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/kernels.h"
#include "tests/oracle/folds.h"

namespace phub::testing {

using kernels::DType;

JobSpec grouped_spec(const std::string& name, uint32_t ranks, const std::string& groups) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 5000}, {.name = "b", .elements = 7}};
  spec.world_size = ranks;
  spec.chunk_elements = 96;
  spec.groups = groups;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

float GroupedTraining::weight_of(uint32_t rank, uint64_t round, size_t key) const {
  constexpr float kWeights[] = {1, 0.1f, 3, 0x1p-20f, 1000.5f, 1, 7.0f / 3};
  return kWeights[(seed + rank * 11 + round * 5 + key * 3) % std::size(kWeights)];
}

std::vector<float> GroupedTraining::initial_of(size_t key, uint64_t begin,
                                               uint64_t elements) const {
  std::vector<float> initial(elements);
  for (uint64_t i = 0; i < elements && spec.initial == "broadcast"; ++i) {
    initial[i] = static_cast<float>((begin + i) * 7919 % 2001 + key) / 1000 - 1;
  }
  return initial;
}

std::vector<float> GroupedTraining::initial() const {
  std::vector<float> all;
  for (size_t key = 0; key < spec.keys.size(); ++key) {
    const auto of_key = initial_of(key, 0, spec.keys[key].elements);
    all.insert(all.end(), of_key.begin(), of_key.end());
  }
  return all;
}

void GroupedTraining::fill(uint32_t rank, uint64_t round, const ChunkPlace& place,
                           std::byte* out) const {
  if (place.factors.pairs > 0) return fill_factors(rank, round, place, out);
  if (place.rows.columns > 0) return fill_rows(rank, round, place, out);
  const DType type = memory_dtype(spec, place.key);
  std::minstd_rand random(
      static_cast<uint32_t>(seed + round * 9973 + rank * 1103 + place.key * 17 + place.begin));
  for (uint32_t i = 0; i < place.elements; ++i) {
    const float value = static_cast<float>(random() % 2001) / 1000 - 1;
    // The largest of some ranks are smaller than those of others.
    const auto exponent = static_cast<int>(random() % 20 + (rank + round) % 3 * 4);
    reference::store(out, type, i, std::ldexp(value, -exponent));
  }
  const float bad = seed % 2 == 0 ? INFINITY : NAN;
  if (is_bad(rank, round, place)) reference::store(out, type, place.elements / 2, bad);
}

// A left vector's elements depend on their row and a right one's on their column, wherever they
// are.
void GroupedTraining::fill_factors(uint32_t rank, uint64_t round, const ChunkPlace& place,
                                   std::byte* out) const {
  const reference::Factors& factors = place.factors;
  const uint64_t first_row = place.begin / factors.columns;
  const auto count =
      static_cast<uint32_t>((seed + rank * 7 + round * 3 + place.key) % (factors.pairs + 1));
  const auto value = [&](uint64_t pair, uint64_t i) {
    std::minstd_rand random(static_cast<uint32_t>(seed + round * 9973 + rank * 1103 +
                                                  place.key * 17 + pair * 131071 + i * 31));
    random();
    return std::ldexp(static_cast<float>(random() % 2001) / 1000 - 1,
                      -static_cast<int>(random() % 10));
  };
  for (uint32_t pair = 0; pair < factors.pairs; ++pair) {
    for (size_t i = 0; i < factors.rows; ++i) {
      factors.left(out, pair)[i] = value(2 * pair, first_row + i);
    }
    for (size_t i = 0; i < factors.columns; ++i)
      factors.right(out, pair)[i] = value(2 * pair + 1, i);
  }
  factors.set_count(out, count);
  if (is_bad(rank, round, place)) factors.left(out, 0)[factors.rows / 2] = NAN;
}

// Of all chunks of a key that push_factors() takes at once.
Pushed GroupedTraining::push_factors(Worker& worker, uint32_t rank, uint64_t round,
                                     size_t key) const {
  const KeySpec& of = spec.keys[key];
  std::vector<float> left(of.rank_limit * of.shape[0]), right;
  uint32_t count = 0;
  for (const ChunkPlace& place : chunks_of(spec)) {
    if (place.key != key) continue;
    ChunkPlace at = place;
    if (is_rows(of)) at.factors = {place.rows.rows, place.rows.columns, place.rows.pairs};
    std::vector<std::byte> slot(at.factors.floats() * sizeof(float));
    fill_factors(rank, round, at, slot.data());
    count = at.factors.count(slot.data());
    for (size_t pair = 0; pair < count; ++pair) {
      const float* from = at.factors.left(slot.data(), pair);
      std::copy_n(from, at.factors.rows,
                  left.data() + pair * of.shape[0] + place.begin / of.shape[1]);
    }
    right.assign(at.factors.right(slot.data(), 0), at.factors.right(slot.data(), at.factors.pairs));
  }
  // As two devices would have them.
  const uint32_t first = count / 3;
  const FactorPairs parts[] = {
      {left.data(), right.data(), first},
      {left.data() + first * of.shape[0], right.data() + first * of.shape[1], count - first}};
  return worker.push_factors(key, parts, {});
}

std::vector<GroupedTraining::Row> GroupedTraining::rows_of(uint32_t rank, uint64_t round,
                                                           size_t key) const {
  const KeySpec& of = spec.keys[key];
  std::mt19937 random(static_cast<uint32_t>(seed + round * 9973 + rank * 1103 + key * 17));
  const uint64_t one_in = 1 + (seed + rank + round) % 7;
  std::vector<Row> rows;
  uint32_t different = 0;
  for (uint64_t row = 0; row < of.shape[0] && different < of.rows_limit; ++row) {
    if (random() % one_in != 0) continue;
    ++different;
    for (uint32_t times = random() % 4 == 0 ? 2 + random() % 2 : 1; times > 0; --times) {
      Row& next = rows.emplace_back(Row{static_cast<int64_t>(row), {}});
      for (uint64_t column = 0; column < of.shape[1]; ++column) {
        const float value = static_cast<float>(random() % 2001) / 1000 - 1;
        next.elements.push_back(
            random() % 8 == 0 ? -0.0f : std::ldexp(value, -static_cast<int>(random() % 20)));
      }
    }
  }
  for (const ChunkPlace& place : chunks_of(spec)) {
    if (place.key != key || !is_bad(rank, round, place)) continue;
    for (Row& row : rows) {
      const uint64_t at = static_cast<uint64_t>(row.index) * of.shape[1];
      if (at < place.begin || at >= place.begin + place.elements) continue;
      row.elements[of.shape[1] / 2] = NAN;
      break;
    }
  }
  return rows;
}

// Of a key that may go both ways.
bool GroupedTraining::sends_pairs(uint32_t rank, uint64_t round, size_t key) const {
  return spec.keys[key].rank_limit > 0 && (seed + 5 * rank + 3 * round + key) % 4 < 2;
}

void GroupedTraining::fill_rows(uint32_t rank, uint64_t round, const ChunkPlace& place,
                                std::byte* out) const {
  if (sends_pairs(rank, round, place.key)) {
    ChunkPlace as_factors = place;
    as_factors.factors = {place.rows.rows, place.rows.columns, place.rows.pairs};
    std::vector<std::byte> slot(as_factors.factors.floats() * sizeof(float));
    fill_factors(rank, round, as_factors, slot.data());
    const uint32_t count = as_factors.factors.count(slot.data());
    place.rows.set_pairs(out, as_factors.factors, slot.data(), count);
    if (count == 0) place.rows.set_count(out, 0);  // a null
    return;
  }
  const auto first = static_cast<int64_t>(place.begin / place.rows.columns);
  const auto end = first + static_cast<int64_t>(place.rows.rows);
  uint32_t count = 0;
  int64_t latest = -1;
  for (const Row& row : rows_of(rank, round, place.key)) {
    if (row.index < first || row.index >= end) continue;
    const bool again = row.index == latest;
    if (!again) place.rows.set_row(out, count++, static_cast<uint32_t>(row.index - first));
    float* const to = place.rows.elements(out, count - 1);
    if (again && folds(spec)) {
      reference::Fold(spec.keys[place.key]).add(row.elements, {to, place.rows.columns});
    } else {
      for (size_t i = 0; i < place.rows.columns; ++i) {
        to[i] = again ? to[i] + row.elements[i] : row.elements[i];
      }
    }
    latest = row.index;
  }
  place.rows.set_count(out, count);
}

// In any order, but for those that come twice.
Pushed GroupedTraining::push_rows(Worker& worker, uint32_t rank, uint64_t round, size_t key) const {
  std::vector<Row> rows = rows_of(rank, round, key);
  std::ranges::stable_sort(rows, {}, [](const Row& row) { return row.index * 2654435761 % 1009; });
  std::vector<int64_t> indices;
  std::vector<float> elements;
  for (const Row& row : rows) {
    indices.push_back(row.index);
    elements.insert(elements.end(), row.elements.begin(), row.elements.end());
  }
  return worker.push_rows(key, {indices, elements});
}

void GroupedTraining::fill_key(uint32_t rank, uint64_t round, size_t key,
                               std::span<std::byte> gradient) const {
  const size_t element = gradient.size() / spec.keys[key].elements;
  for (const ChunkPlace& place : chunks_of(spec)) {
    if (place.key == key) fill(rank, round, place, gradient.data() + place.begin * element);
  }
}

bool operator==(const Results& a, const Results& b) {
  if (a.keys != b.keys || a.verdict.has_value() != b.verdict.has_value()) return false;
  if (!a.verdict || a.verdict == b.verdict) return true;
  return a.verdict->round == b.verdict->round && a.verdict->skipped == b.verdict->skipped &&
         std::isnan(a.verdict->norm) && std::isnan(b.verdict->norm);
}

Results results_of(const Worker& worker) {
  Results results{.keys = {}, .verdict = worker.verdict()};
  for (size_t key = 0; key < worker.keys(); ++key) {
    const auto bytes = worker.parameter_bytes(key);
    results.keys.emplace_back(bytes.begin(), bytes.end());
  }
  return results;
}

std::vector<Results> alone(const GroupedTraining& run, const JobSpec& spec,
                           std::span<const LogRecord> log, const Replay::Heritage& heritage) {
  const std::vector<ChunkPlace> places = chunks_of(spec);
  const Participation participation(log, static_cast<uint32_t>(places.size()),
                                    fragments_by_chunk(spec, places));
  const HyperHistory hyper(spec, log);
  std::vector<Replay> chunks;
  for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
    const ChunkPlace& place = places[chunk];
    chunks.emplace_back(
        spec, participation, hyper, chunk, run.initial_of(place.key, place.begin, place.elements),
        [&run, place](const Member& from, uint64_t round, std::byte* out) {
          if (run.is_null(from.rank, round, place.key)) return false;
          run.fill(from.rank, round, place, out);
          return !place.is_empty(out);  // else it is a null
        },
        heritage,
        [&run, key = place.key](const Member& from, uint64_t round) {
          return run.weight_of(from.rank, round, key);
        });
  }
  std::vector<Results> all;
  const auto take = [&](const std::function<const Replay&(uint32_t)>& chunk_of) {
    Results& results = all.emplace_back();
    results.keys.resize(spec.keys.size());
    for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
      const std::vector<std::byte> result = chunk_of(chunk).result();
      auto& key = results.keys[places[chunk].key];
      key.insert(key.end(), result.begin(), result.end());
    }
  };
  if (GatedReplay::is_gated(spec)) {
    GatedReplay replay(spec, hyper, std::move(chunks));
    while (all.size() < run.rounds) {
      replay.next_round();
      take([&](uint32_t chunk) -> const Replay& { return replay.chunk(chunk); });
      all.back().verdict = replay.verdict();
    }
    return all;
  }
  while (all.size() < run.rounds) {
    for (Replay& chunk : chunks) chunk.next_round();
    take([&](uint32_t chunk) -> const Replay& { return chunks[chunk]; });
  }
  return all;
}

void train_round(const GroupedTraining& run, Worker& worker, uint32_t rank, uint64_t round,
                 std::span<std::vector<std::byte>> gradients) {
  for (size_t key = 0; key < worker.keys(); ++key) {
    if (run.spec.weights == Weights::kYes) worker.set_weight(run.weight_of(rank, round, key));
    if (run.is_null(rank, round, key)) {
      worker.push_null(key);
      continue;
    }
    if (is_factors(run.spec.keys[key])) {
      run.push_factors(worker, rank, round, key);
      continue;
    }
    if (run.sends_pairs(rank, round, key) && is_rows(run.spec.keys[key])) {
      run.push_factors(worker, rank, round, key);
      continue;
    }
    if (is_rows(run.spec.keys[key])) {
      run.push_rows(worker, rank, round, key);
      continue;
    }
    const bool own = key < gradients.size() && !gradients[key].empty();
    run.fill_key(rank, round, key, own ? gradients[key] : worker.gradient_bytes(key));
    if (round % 2 == 0) {
      worker.push(key, static_cast<int32_t>(key));
    } else {
      worker.push(key);
    }
  }
  worker.wait(0);
  if (is_gated(run.spec)) {
    const std::optional<RoundVerdict> verdict = worker.verdict();
    EXPECT_TRUE(verdict && verdict->round == round) << "it comes with the first result";
  }
  worker.wait_all();
}

std::vector<std::vector<Results>> train(const GroupedTraining& run, const OptionsOf& options_of) {
  std::vector<std::vector<Results>> seen(run.spec.world_size);
  each_rank(run.spec.world_size, [&](uint32_t rank) {
    WorkerOptions options = options_of(rank);
    options.rank = static_cast<int32_t>(rank);
    const size_t keys = run.spec.keys.size();
    Memory gradients(keys), results(keys);  // live longer than the worker
    Worker worker(options);
    for (size_t key = 0; key < keys; ++key) {
      if (!run.own_memory || is_compact(run.spec.keys[key])) continue;
      gradients[key].resize(worker.gradient_bytes(key).size());
      results[key].resize(worker.parameter_bytes(key).size());
      worker.register_memory(
          key, {.gradient = gradients[key].data(), .parameters = results[key].data()});
    }
    if (run.spec.initial == "broadcast") {
      worker.broadcast(rank == 0 ? run.initial() : std::vector<float>());
    }
    worker.wait_all();
    EXPECT_FALSE(worker.verdict().has_value()) << "there was no round";
    for (uint64_t round = 1; round <= run.rounds; ++round) {
      train_round(run, worker, rank, round, gradients);
      Results& now = seen[rank].emplace_back(results_of(worker));
      for (size_t key = 0; key < keys; ++key) {
        if (!results[key].empty()) now.keys[key] = results[key];
      }
    }
    worker.barrier();
  });
  return seen;
}

void expect_as_alone(const GroupedTraining& run, const OptionsOf& options_of,
                     const std::function<std::vector<LogRecord>()>& log) {
  const JobSpec& s = run.spec;
  const bool lazy = std::ranges::any_of(s.keys, &KeySpec::lazy);
  SCOPED_TRACE(fmt::format("{}: {} ranks {}, {}{} {}, {} to {}, {} {}{}, max_norm {}", s.name,
                           s.world_size, s.groups, s.optimizer, lazy ? " (lazy)" : "", s.reduction,
                           s.gradient_dtype, s.parameter_dtype, s.on_nonfinite, s.unused,
                           run.has_nulls ? ", nulls" : "", s.hyper.contains("max_norm")));
  const auto seen = train(run, options_of);
  const std::vector<Results> want = alone(run, run.spec, log());
  for (uint32_t rank = 0; rank < run.spec.world_size; ++rank) {
    ASSERT_EQ(seen[rank].size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      for (size_t key = 0; key < run.spec.keys.size(); ++key) {
        EXPECT_TRUE(seen[rank][i].keys[key] == want[i].keys[key])
            << "rank " << rank << ", round " << i + 1 << ", key " << run.spec.keys[key].name;
      }
      EXPECT_TRUE(seen[rank][i] == want[i]) << "rank " << rank << ", round " << i + 1;
    }
  }
}

void expect_as_alone(Box& box, const GroupedTraining& run) {
  expect_as_alone(
      run, [&](uint32_t) { return box.options(run.spec); }, [&] { return box.log(run.spec.name); });
}

}  // namespace phub::testing
