// A job whose gradients are added in groups of ranks, what its workers see, and what one process
// that adds them in this order sees alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/oracle/replay.h"
#include "tests/worker/box.h"
#include "transport/control/messages.h"
#include "transport/verdict.h"
#include "worker/worker.h"

namespace phub::testing {

struct GroupedTraining {
  JobSpec spec;
  uint64_t seed = 1;
  bool has_nulls = false;
  bool has_nans = false;
  uint64_t rounds = 6;
  bool own_memory = false;  // keys that are sent whole have gradients and results in the caller's

  bool is_null(uint32_t rank, uint64_t round, size_t key) const {
    return has_nulls && (seed + rank * 5 + round * 3 + key) % 4 == 0;
  }
  // Of a push, in a job with weights: from small to large, and 1 now and then.
  float weight_of(uint32_t rank, uint64_t round, size_t key) const;
  // What rank 0 broadcasts of these elements of a key, where it does.
  std::vector<float> initial_of(size_t key, uint64_t begin, uint64_t elements) const;
  std::vector<float> initial() const;  // of all keys
  bool is_bad(uint32_t rank, uint64_t round, const ChunkPlace& place) const {
    const KeySpec& key = spec.keys[place.key];
    const uint64_t chunk =
        place.begin / (has_tiles(key) ? key.tile_rows * key.shape[1] : spec.chunk_elements);
    return has_nans && round % 2 == 0 && (seed + rank * 3 + round + chunk) % 5 == 0;
  }
  // Writes these elements of a gradient: large and small ones, whose sums are rounded in any
  // format.
  void fill(uint32_t rank, uint64_t round, const ChunkPlace& place, std::byte* out) const;
  void fill_key(uint32_t rank, uint64_t round, size_t key, std::span<std::byte> gradient) const;
  void fill_factors(uint32_t rank, uint64_t round, const ChunkPlace& place, std::byte* out) const;
  Pushed push_factors(Worker& worker, uint32_t rank, uint64_t round, size_t key) const;
  // What a rank gives push_rows(): by ascending row, some of them twice.
  struct Row {
    int64_t index = 0;
    std::vector<float> elements;
  };
  std::vector<Row> rows_of(uint32_t rank, uint64_t round, size_t key) const;
  bool sends_pairs(uint32_t rank, uint64_t round, size_t key) const;
  void fill_rows(uint32_t rank, uint64_t round, const ChunkPlace& place, std::byte* out) const;
  Pushed push_rows(Worker& worker, uint32_t rank, uint64_t round, size_t key) const;
};

JobSpec grouped_spec(const std::string& name, uint32_t ranks, const std::string& groups);

struct Results {
  std::vector<std::vector<std::byte>> keys;
  std::optional<RoundVerdict> verdict = {};  // where rounds are applied as a whole

  friend bool operator==(const Results& a, const Results& b);
};
Results results_of(const Worker& worker);

// What one process computes, round by round, in the order that `spec` says. `heritage`: of
// residuals.
std::vector<Results> alone(const GroupedTraining& run, const JobSpec& spec,
                           std::span<const LogRecord> log, const Replay::Heritage& heritage = {});
using Memory = std::vector<std::vector<std::byte>>;  // by key
// Pushes the gradients of a round, and waits for its results. `gradients`: of keys that have memory
// there.
void train_round(const GroupedTraining& run, Worker& worker, uint32_t rank, uint64_t round,
                 std::span<std::vector<std::byte>> gradients = {});
// All ranks train, in a thread each. What each saw, by rank and round.
using OptionsOf = std::function<WorkerOptions(uint32_t rank)>;
std::vector<std::vector<Results>> train(const GroupedTraining& run, const OptionsOf& options_of);
// Every rank sees what one process computes. `log`: of the job.
void expect_as_alone(const GroupedTraining& run, const OptionsOf& options_of,
                     const std::function<std::vector<LogRecord>()>& log);
void expect_as_alone(Box& box, const GroupedTraining& run);

}  // namespace phub::testing
