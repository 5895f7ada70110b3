// Jobs whose gradients are added in groups of ranks, on a whole box: every rank sees the bytes of a
// process that adds them in this order alone.
#include "tests/oracle/groups.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "tests/oracle/replay.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace {

using kernels::DType;
using testing::Box;
using testing::each_rank;
using testing::expect_error;

constexpr uint64_t kRounds = 6;

JobSpec spec_of(const std::string& name, uint32_t ranks, const std::string& groups) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 5000}, {.name = "b", .elements = 7}};
  spec.world_size = ranks;
  spec.chunk_elements = 96;
  spec.groups = groups;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

struct Training {
  JobSpec spec;
  uint64_t seed = 1;
  bool has_nulls = false;

  bool is_null(uint32_t rank, uint64_t round, size_t key) const {
    return has_nulls && (seed + rank * 5 + round * 3 + key) % 4 == 0;
  }
  // Writes these elements of a gradient: large and small ones, whose sums are rounded in any
  // format.
  void fill(uint32_t rank, uint64_t round, const ChunkPlace& place, std::byte* out) const {
    const DType type = *kernels::parse_dtype(spec.gradient_dtype);
    std::minstd_rand random(
        static_cast<uint32_t>(seed + round * 9973 + rank * 1103 + place.key * 17 + place.begin));
    for (uint32_t i = 0; i < place.elements; ++i) {
      const float value = static_cast<float>(random() % 2001) / 1000 - 1;
      reference::store(out, type, i, std::ldexp(value, -static_cast<int>(random() % 20)));
    }
  }
};

using Results = std::vector<std::vector<std::byte>>;  // by key

// What one process computes, round by round, in the order that `spec` says.
std::vector<Results> alone(const Training& run, const JobSpec& spec,
                           std::span<const LogRecord> log) {
  const std::vector<ChunkPlace> places = chunks_of(spec);
  const Participation participation(log, static_cast<uint32_t>(places.size()));
  const HyperHistory hyper(spec, log);
  std::vector<Replay> chunks;
  for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
    const ChunkPlace& place = places[chunk];
    chunks.emplace_back(spec, participation, hyper, chunk, std::vector<float>(place.elements),
                        [&run, place](const Member& from, uint64_t round, std::byte* out) {
                          if (run.is_null(from.rank, round, place.key)) return false;
                          run.fill(from.rank, round, place, out);
                          return true;
                        });
  }
  std::vector<Results> all;
  const auto take = [&](const std::function<const Replay&(uint32_t)>& chunk_of) {
    Results& results = all.emplace_back(spec.keys.size());
    for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
      const std::vector<std::byte> result = chunk_of(chunk).result();
      auto& key = results[places[chunk].key];
      key.insert(key.end(), result.begin(), result.end());
    }
  };
  if (GatedReplay::is_gated(spec)) {
    GatedReplay replay(spec, hyper, std::move(chunks));
    while (all.size() < kRounds) {
      replay.next_round();
      take([&](uint32_t chunk) -> const Replay& { return replay.chunk(chunk); });
    }
    return all;
  }
  while (all.size() < kRounds) {
    for (Replay& chunk : chunks) chunk.next_round();
    take([&](uint32_t chunk) -> const Replay& { return chunks[chunk]; });
  }
  return all;
}

// All ranks train. What each saw is what one process computes. Returns whether other bits came
// without groups.
bool differs_from_flat(Box& box, const Training& run) {
  SCOPED_TRACE(
      fmt::format("{}, groups {}, PHUB_SEED={}", run.spec.name, run.spec.groups, run.seed));
  std::vector<std::vector<Results>> seen(run.spec.world_size);
  each_rank(run.spec.world_size, [&](uint32_t rank) {
    WorkerOptions options = box.options(run.spec);
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.wait_all();
    for (uint64_t round = 1; round <= kRounds; ++round) {
      for (size_t key = 0; key < worker.keys(); ++key) {
        if (run.is_null(rank, round, key)) {
          worker.push_null(key);
          continue;
        }
        const std::span<std::byte> gradient = worker.gradient_bytes(key);
        for (const ChunkPlace& place : chunks_of(run.spec)) {
          const size_t element = gradient.size() / run.spec.keys[key].elements;
          if (place.key != key) continue;
          run.fill(rank, round, place, gradient.data() + place.begin * element);
        }
        worker.push(key);
      }
      worker.wait_all();
      Results& results = seen[rank].emplace_back();
      for (size_t key = 0; key < worker.keys(); ++key) {
        const auto bytes = worker.parameter_bytes(key);
        results.emplace_back(bytes.begin(), bytes.end());
      }
    }
    worker.barrier();
  });
  const std::vector<LogRecord> log = box.log(run.spec.name);
  const std::vector<Results> want = alone(run, run.spec, log);
  for (uint32_t rank = 0; rank < run.spec.world_size; ++rank) {
    EXPECT_TRUE(seen[rank] == want) << "rank " << rank;
  }
  JobSpec flat = run.spec;
  flat.groups.clear();
  return alone(run, flat, log) != want;
}

TEST(Groups, EveryTreeGivesTheBytesOfOneProcess) {
  const auto seeds = testing::fresh_seeds(6);
  Box box("pack:2 core:2 pu:1");
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    const auto ranks = static_cast<uint32_t>(3 + random() % 6);
    const std::string groups =
        reference::some_groups(ranks, [&random](uint64_t n) { return random() % n; });
    Training run{.spec = spec_of(fmt::format("tree{}", seed), ranks, groups),
                 .seed = seed,
                 .has_nulls = random() % 2 == 0};
    if (random() % 2 == 0) run.spec.optimizer = "adam";
    if (random() % 2 == 0) run.spec.reduction = "mean";
    const char* const kTypes[] = {"f32", "bf16", "f16"};
    run.spec.gradient_dtype = kTypes[random() % 3];
    run.spec.parameter_dtype = kTypes[random() % 3];
    differs_from_flat(box, run);
  }
}

TEST(Groups, ThreeLevelsGiveOtherBitsThanTwoAndOne) {
  Box box(2);
  const Training run{.spec = spec_of("three", 8, "(2,2),(2,2)"), .seed = 5};
  EXPECT_TRUE(differs_from_flat(box, run));
  const std::vector<LogRecord> log = box.log("three");
  JobSpec two = run.spec;
  two.groups = "4,4";
  EXPECT_NE(alone(run, run.spec, log), alone(run, two, log));
}

TEST(Groups, ClippedRoundsAndRoundsThatAreSkipped) {
  Box box(2);
  Training run{.spec = spec_of("gated", 5, "2,(1,2)"), .seed = 9};
  run.spec.optimizer = "adam";
  run.spec.hyper = {{"max_norm", 10}};
  run.spec.on_nonfinite = "skip";
  EXPECT_TRUE(differs_from_flat(box, run));
}

// Ranks that never come have their places.
TEST(Groups, OfRanksThatAreNotThere) {
  Box box(2);
  Training run{.spec = spec_of("spare", 3, "1,(1,4)"), .seed = 3};
  run.spec.max_ranks = 6;
  EXPECT_TRUE(differs_from_flat(box, run));
}

TEST(Groups, WhatCannotBeIsRefused) {
  Box box;
  const auto refused = [&](ErrorCode code, const char* what,
                           const std::function<void(JobSpec&)>& change) {
    JobSpec spec = spec_of("refused", 1, "1");
    change(spec);
    expect_error(code, what, [&] { Worker worker(box.options(spec)); });
  };
  refused(ErrorCode::kInvalid, "groups order the sum of a round, and with consistency 'async'",
          [](JobSpec& spec) { spec.consistency = "async"; });
  refused(ErrorCode::kInvalid, "with consistency 'ssp' there are none: it must be bsp",
          [](JobSpec& spec) { spec.consistency = "ssp"; });
  refused(ErrorCode::kInvalid, "groups: '1' has 1 ranks, and max_ranks is 2",
          [](JobSpec& spec) { spec.max_ranks = 2; });
  refused(ErrorCode::kInvalid, "groups: expected", [](JobSpec& spec) { spec.groups = "one"; });

  JobSpec spec = spec_of("agreed", 1, "1,2");
  spec.max_ranks = 3;
  const Worker worker(box.options(spec));
  spec.groups = "2,1";
  expect_error(ErrorCode::kMismatch, "groups is '2,1' here and '1,2' in the job",
               [&] { Worker other(box.options(spec)); });
}

}  // namespace
}  // namespace phub
