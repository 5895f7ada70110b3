// Rounds that are applied as a whole: clipped to a norm, or skipped. Every rank sees the bytes of a
// process that computes alone, and is told the same of every round.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "tests/oracle/replay.h"
#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace gated_test {

using kernels::DType;
using testing::Box;
using testing::each_rank;
using testing::expect_error;

struct Training {
  JobSpec spec;
  uint64_t rounds = 8;
  uint64_t bad_round = 0;  // in which rank 0 sends one element that is not finite; 0: in none
  uint32_t seed = 1;
};

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 5000, .priority = 1},
               {.name = "b", .elements = 7, .lr_scale = 0.5},
               {.name = "c", .elements = 640}};
  spec.world_size = ranks;
  spec.chunk_elements = 96;
  spec.optimizer = "adam";
  spec.reduction = "mean";
  spec.hyper = {{"lr", 0.01}, {"weight_decay", 0.001}};
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

void fill(const Training& run, uint32_t rank, uint64_t round, size_t key,
          std::span<std::byte> out) {
  const DType type = memory_dtype(run.spec, static_cast<uint32_t>(key));
  std::minstd_rand random(static_cast<uint32_t>(run.seed + round * 97 + rank * 11 + key));
  const size_t elements = out.size() / kernels::bytes_of(type);
  for (size_t i = 0; i < elements; ++i) {
    const float value = static_cast<float>(random() % 2001) / 1000 - 1;
    reference::store(out.data(), type, i, value);
  }
  if (round == run.bad_round && rank == 0 && key == 2) {
    const float bad = run.seed % 2 == 0 ? std::numeric_limits<float>::infinity()
                                        : std::numeric_limits<float>::quiet_NaN();
    reference::store(out.data(), type, elements / 2, bad);
  }
}

// Of key c: in every third round nobody has a gradient, in the others one rank.
bool is_null(const Training& run, uint32_t rank, uint64_t round, size_t key) {
  return run.spec.unused == "skip" && key == 2 && round % 3 != rank + 1;
}

struct Seen {
  std::vector<std::vector<std::byte>> results;  // by key
  std::optional<RoundVerdict> verdict;
};

// What one process computes in `rounds` rounds.
std::vector<Seen> alone(const Training& run, std::span<const LogRecord> log) {
  const std::vector<ChunkPlace> places = chunks_of(run.spec);
  const Participation participation(log, static_cast<uint32_t>(places.size()));
  const HyperHistory hyper(run.spec, log);
  std::map<std::tuple<uint32_t, uint64_t, uint32_t>, std::vector<std::byte>> made;
  const auto gradient_of = [&](uint32_t rank, uint64_t round, uint32_t key) -> const std::byte* {
    std::vector<std::byte>& bytes = made[{rank, round, key}];
    if (bytes.empty()) {
      bytes.resize(run.spec.keys[key].elements * kernels::bytes_of(memory_dtype(run.spec, key)));
      fill(run, rank, round, key, bytes);
    }
    return bytes.data();
  };
  std::vector<Replay> chunks;
  for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
    const ChunkPlace& place = places[chunk];
    chunks.emplace_back(
        run.spec, participation, hyper, chunk, std::vector<float>(place.elements),
        [&run, &gradient_of, place](const Member& from, uint64_t round, std::byte* out) {
          if (is_null(run, from.rank, round, place.key)) return false;
          const size_t element = kernels::bytes_of(memory_dtype(run.spec, place.key));
          std::memcpy(out, gradient_of(from.rank, round, place.key) + place.begin * element,
                      place.elements * element);
          return true;
        });
  }
  GatedReplay replay(run.spec, hyper, std::move(chunks));
  std::vector<Seen> all;
  for (uint64_t round = 1; round <= run.rounds; ++round) {
    replay.next_round();
    Seen seen{.results = std::vector<std::vector<std::byte>>(run.spec.keys.size()),
              .verdict = replay.verdict()};
    for (uint32_t chunk = 0; chunk < places.size(); ++chunk) {
      const std::vector<std::byte> result = replay.chunk(chunk).result();
      auto& key = seen.results[places[chunk].key];
      key.insert(key.end(), result.begin(), result.end());
    }
    all.push_back(std::move(seen));
  }
  return all;
}

void expect_same(const Seen& seen, const Seen& want, uint64_t round, uint32_t rank) {
  SCOPED_TRACE(fmt::format("round {}, rank {}", round, rank));
  ASSERT_TRUE(seen.verdict.has_value());
  EXPECT_EQ(seen.verdict->round, round);
  EXPECT_EQ(seen.verdict->skipped, want.verdict->skipped);
  if (std::isnan(want.verdict->norm)) {
    EXPECT_TRUE(std::isnan(seen.verdict->norm));
  } else {
    EXPECT_EQ(seen.verdict->norm, want.verdict->norm);
  }
  EXPECT_TRUE(seen.results == want.results);
}

// All ranks train; what each saw is compared with what one process computes.
std::vector<Seen> train(Box& box, const Training& run) {
  SCOPED_TRACE(fmt::format("{}, PHUB_SEED={}", run.spec.name, run.seed));
  std::vector<std::vector<Seen>> seen(run.spec.world_size);
  each_rank(run.spec.world_size, [&](uint32_t r) {
    WorkerOptions options = box.options(run.spec);
    options.rank = static_cast<int32_t>(r);
    Worker worker(options);
    worker.wait_all();
    EXPECT_FALSE(worker.verdict().has_value());
    for (uint64_t round = 1; round <= run.rounds; ++round) {
      for (size_t key = run.spec.keys.size(); key-- > 0;) {
        if (is_null(run, r, round, key)) {
          worker.push_null(key);
          continue;
        }
        fill(run, r, round, key, worker.gradient_bytes(key));
        worker.push(key);
      }
      Seen now;
      for (size_t key = 0; key < run.spec.keys.size(); ++key) {
        worker.wait(key);
        if (key == 0) now.verdict = worker.verdict();  // with the first result already
        const auto bytes = worker.parameter_bytes(key);
        now.results.emplace_back(bytes.begin(), bytes.end());
      }
      seen[r].push_back(std::move(now));
    }
    worker.barrier();
  });
  const std::vector<Seen> want = alone(run, box.log(run.spec.name));
  for (uint64_t round = 1; round <= run.rounds; ++round) {
    for (uint32_t r = 0; r < run.spec.world_size; ++r) {
      expect_same(seen[r][round - 1], want[round - 1], round, r);
    }
  }
  return want;
}

TEST(Gated, ClipsToANormOfTheWholeModelAsOneProcessDoes) {
  const auto seeds = testing::fresh_seeds(2);
  for (const char* topology :
       {"pack:1 core:1 pu:1", "pack:1 core:3 pu:1", "pack:2 [numa(memory=1GB)] core:2 pu:1"}) {
    Box box{std::string(topology)};
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
      for (const uint32_t ranks : {1u, 2u, 4u}) {
        Training run{.spec = spec_of(fmt::format("clip{}-{}", ranks, seed), ranks),
                     .seed = static_cast<uint32_t>(seed)};
        // The mean's norm is about 43 over the root of the ranks: now and then it is less.
        run.spec.hyper["max_norm"] = 43.4 / std::sqrt(ranks);
        if (seed % 2 == 0) run.spec.parameter_dtype = "bf16";
        train(box, run);
      }
    }
  }
}

TEST(Gated, ARoundThatIsNotFiniteIsSkippedByAll) {
  Box box(2);
  for (const char* optimizer : {"sgd", "momentum", "adam"}) {
    for (const bool clips : {false, true}) {
      for (const std::string dtype : {"f32", "f16", "int8"}) {
        Training run{.spec = spec_of(fmt::format("skip-{}-{}-{}", optimizer, clips, dtype), 3),
                     .bad_round = 3,
                     .seed = clips ? 2u : 1u};
        run.spec.optimizer = optimizer;
        run.spec.gradient_dtype = dtype;
        run.spec.parameter_dtype = dtype == "int8" ? "f32" : dtype;
        run.spec.on_nonfinite = "skip";
        if (clips) run.spec.hyper["max_norm"] = 1;
        const std::vector<Seen> want = train(box, run);
        for (uint64_t round = 1; round <= run.rounds; ++round) {
          EXPECT_EQ(want[round - 1].verdict->skipped, round == 3);
        }
        EXPECT_EQ(want[2].results, want[1].results) << "nothing changes";
      }
    }
  }
}

// The norm is of what the box decodes.
TEST(Gated, CodedGradientsAreClipped) {
  Box box(2);
  for (const char* rounding : {"nearest", "stochastic"}) {
    Training run{.spec = spec_of(fmt::format("coded-{}", rounding), 3)};
    run.spec.keys[0].format = "fp8-e4m3";
    run.spec.keys[2].format = "topk";
    run.spec.rounding = rounding;
    run.spec.hyper["max_norm"] = 20;
    train(box, run);
  }
}

TEST(Gated, TheNormMayChangeBetweenRounds) {
  Box box(2);
  Training run{.spec = spec_of("changes", 2)};
  run.spec.hyper["max_norm"] = 0;
  run.spec.schedule = {{3, {{"max_norm", 5}}}, {5, {{"max_norm", 0.1}}}, {6, {{"max_norm", 0}}}};
  train(box, run);
}

// The optimizer's steps are rounds without those that were skipped.
TEST(Gated, StepsThatWereSkippedAreNotCounted) {
  Box box(2);
  Training run{.spec = spec_of("steps", 1), .bad_round = 2};
  run.spec.on_nonfinite = "skip";
  WorkerOptions options = box.options(run.spec);
  Worker worker(options);
  worker.wait_all();
  for (uint64_t round = 1; round <= 4; ++round) {
    for (size_t key = 0; key < 3; ++key) {
      fill(run, 0, round, key, worker.gradient_bytes(key));
      worker.push(key);
    }
    worker.wait_all();
    std::vector<float> p(7), m(7), v(7);
    KeyState state{.key = 1, .arrays = {p, m, v}};
    EXPECT_EQ(worker.get_state({&state, 1}), round);
    EXPECT_EQ(state.step, round == 1 ? 1u : round < 4 ? round - 1 : 41u);
    if (round != 3) continue;
    state.step = 40;
    worker.set_state({&state, 1});
  }
}

// What nobody has a gradient of is none of the optimizer's steps, also behind a gate, and in rounds
// that are skipped.
TEST(Gated, UnusedKeysAreLeftOut) {
  Box box(2);
  for (const bool skips : {false, true}) {
    Training run{.spec = spec_of(fmt::format("unused{}", skips), 2),
                 .rounds = 9,
                 .bad_round = skips ? 1u : 0u};
    run.spec.unused = "skip";
    run.spec.hyper["max_norm"] = 20;
    if (skips) run.spec.on_nonfinite = "skip";
    train(box, run);

    run.spec.name += "-steps";
    run.spec.world_size = 1;
    WorkerOptions options = box.options(run.spec);
    Worker worker(options);
    worker.wait_all();
    for (uint64_t round = 1, steps = 0; round <= run.rounds; ++round) {
      const bool null = is_null(run, 0, round, 2);
      for (size_t key = 0; key < 3; ++key) {
        fill(run, 0, round, key, worker.gradient_bytes(key));
        key == 2 && null ? worker.push_null(key) : worker.push(key);
      }
      worker.wait_all();
      if (!null && round != run.bad_round) ++steps;
      std::vector<float> p(640), m(640), v(640);
      KeyState state{.key = 2, .arrays = {p, m, v}};
      EXPECT_EQ(worker.get_state({&state, 1}), round);
      EXPECT_EQ(state.step, steps) << "round " << round;
    }
  }
}

// A result waits for all keys: who waits for one before it pushed another learns what is missing.
TEST(Gated, AKeyThatIsLeftOutIsNamed) {
  Box box(2);
  JobSpec spec = spec_of("left-out", 2);
  spec.hyper["max_norm"] = 1;
  spec.progress_limit_ms = 20'000;  // after a tenth of it the server is asked who is missing
  each_rank(2, [&](uint32_t r) {
    WorkerOptions options = box.options(spec);
    options.rank = static_cast<int32_t>(r);
    options.wait_timeout_ms = 5'000;
    Worker worker(options);
    worker.wait_all();
    worker.push(0);
    worker.push(1);
    expect_error(ErrorCode::kTimeout, "has not sent key 'c' of round 1", [&] { worker.wait(0); });
    worker.push(2);
    worker.wait_all();
    EXPECT_EQ(worker.verdict()->round, 1u);
    worker.barrier();
  });
}

TEST(Gated, JobsThatCannotBeGatedAreRefused) {
  Box box;
  const auto refused = [&](const char* what, const std::function<void(JobSpec&)>& change) {
    JobSpec spec = spec_of("refused", 1);
    spec.hyper["max_norm"] = 1;
    change(spec);
    expect_error(ErrorCode::kInvalid, what, [&] { Worker worker(box.options(spec)); });
  };
  refused("consistency 'async'", [](JobSpec& spec) { spec.consistency = "async"; });
  refused("max_norm is applied by the server's optimizer",
          [](JobSpec& spec) { spec.optimizer = "none"; });
  refused("on_nonfinite 'skip' is applied", [](JobSpec& spec) {
    spec.optimizer = "none";
    spec.on_nonfinite = "skip";
    spec.hyper.clear();
  });
  refused("work must be 'all'", [](JobSpec& spec) { spec.work = "sum"; });
  refused("max_norm", [](JobSpec& spec) { spec.hyper["max_norm"] = -1; });
  refused("the same for all groups", [](JobSpec& spec) {
    spec.keys[1].group = 1;
    spec.hyper["max_norm@1"] = 1;
  });
  Worker worker(box.options(spec_of("plain", 1)));
  expect_error(ErrorCode::kInvalid, "a job that began with one", [&] {
    worker.set_hyper({{"max_norm", 1}});
  });
}

}  // namespace gated_test
}  // namespace phub
