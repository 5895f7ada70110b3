// Jobs whose int32 gradients go through a switch that adds: what workers see is what one process
// computes, whatever becomes of packets, switch and workers.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/box.h"
#include "tests/worker/data_connections.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "tests/worker/udp_switch.h"
#include "worker/worker.h"

namespace phub {
namespace switched_test {

using testing::alone;
using testing::Box;
using testing::control_port;
using testing::data_connections;
using testing::each_rank;
using testing::GroupedTraining;
using ::testing::HasSubstr;
using testing::Results;
using testing::results_of;
using testing::train_round;
using testing::UdpSwitch;
using testing::UdpSwitchOptions;

std::unique_ptr<Box> box_behind(const UdpSwitch& through, uint32_t cores,
                                uint32_t rounds_between = 0) {
  SwitchOptions of_box = through.of_box();
  of_box.rounds_between = rounds_between;
  return std::make_unique<Box>(fmt::format("pack:1 core:{} pu:1", cores), uint64_t{1} << 33,
                               Box::Wrap(), CheckpointOptions(), "", &of_box);
}

WorkerOptions options_over_tcp(const Box& box, const JobSpec& spec, uint32_t rank) {
  WorkerOptions options = box.options(spec);
  options.transport = "tcp";
  options.rank = static_cast<int32_t>(rank);
  return options;
}

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec = testing::grouped_spec(name, ranks, "");
  spec.keys = {{.name = "a", .elements = 3000},
               {.name = "b", .elements = 7},
               {.name = "c", .elements = 500},
               {.name = "d", .elements = 700}};
  spec.keys[2].format = "f32";
  spec.gradient_dtype = "int32";
  spec.chunk_elements = 320;
  return spec;
}

uint64_t switched_chunks(const JobSpec& spec) {
  uint64_t chunks = 0;
  for (const ChunkPlace& place : chunks_of(spec)) chunks += is_int32(spec, place.key) ? 1 : 0;
  return chunks;
}

// As testing::train(), with what each rank does after its rounds, and what becomes of the job.
struct Seen {
  std::vector<std::vector<Results>> of;  // by rank and round
  std::vector<LogRecord> log;
  JobStatus status;
};
using AfterRound = std::function<bool(uint32_t rank, uint64_t round)>;  // false: it leaves
Seen train(Box& box, const GroupedTraining& run, const AfterRound& after = {}) {
  Seen seen;
  seen.of.resize(run.spec.world_size);
  std::mutex mutex;
  each_rank(run.spec.world_size, [&](uint32_t rank) {
    Worker worker(options_over_tcp(box, run.spec, rank));
    worker.wait_all();
    for (uint64_t round = 1; round <= run.rounds; ++round) {
      train_round(run, worker, rank, round);
      seen.of[rank].push_back(results_of(worker));
      if (after && !after(rank, round)) return worker.leave();
    }
    worker.barrier();
    const std::lock_guard lock(mutex);
    if (!seen.log.empty()) return;
    seen.log = box.log(run.spec.name);
    // The numbers are those of a probe, which may be a moment old.
    for (int i = 0; i < 3000; ++i) {
      seen.status = box.status().jobs.at(0);
      if (seen.status.completed_round >= run.rounds) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  return seen;
}

void expect_as_alone(const Seen& seen, const GroupedTraining& run) {
  const std::vector<Results> want = alone(run, run.spec, seen.log);
  for (uint32_t rank = 0; rank < run.spec.world_size; ++rank) {
    for (size_t i = 0; i < seen.of[rank].size(); ++i) {
      ASSERT_TRUE(seen.of[rank][i] == want[i]) << "rank " << rank << ", round " << i + 1;
    }
  }
}

TEST(Switched, EveryResultIsThatOfOneProcessWhateverIsLost) {
  const auto seeds = testing::fresh_seeds(8);
  const double shares[] = {0, 0.01, 0.1, 0.3};
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto any = [&random](size_t n) { return static_cast<uint32_t>(random() % n); };
    const UdpSwitchOptions of_switch{.seed = seed,
                                     .slots = static_cast<uint16_t>(4 + any(60)),
                                     .loss = shares[(seed - seeds.first) % 4],
                                     .twice = shares[any(4)],
                                     .late = shares[any(3)]};
    UdpSwitch through(of_switch);
    const auto box = box_behind(through, 1 + any(3));
    GroupedTraining run{.spec = spec_of("switched", 1 + any(4)),
                        .seed = seed,
                        .has_nulls = any(2) == 0,
                        .rounds = 4};
    const char* optimizers[] = {"none", "sgd", "adam", "nesterov"};
    run.spec.optimizer = optimizers[any(4)];
    run.spec.reduction = any(2) == 0 ? "mean" : "sum";
    if (any(3) == 0) run.spec.parameter_dtype = "bf16";
    if (run.spec.optimizer != "none" && any(2) == 0) run.spec.hyper["max_norm"] = 0.5;
    const Seen seen = train(*box, run);
    expect_as_alone(seen, run);
    EXPECT_GT(through.sums(), 0u);
    EXPECT_GT(seen.status.switch_chunks, 0u);
    // Without losses nobody has a reason to send directly.
    if (of_switch.loss == 0 && of_switch.late == 0) {
      EXPECT_EQ(seen.status.switch_chunks, run.rounds * switched_chunks(run.spec));
    }
  }
}

// In the middle of a run the switch passes everything on as it is, is gone altogether, forgets, or
// comes back; a rank leaves; all connections break, and what was on its way comes directly. Nothing
// counts twice, and after two rounds without the switch all goes through it again.
TEST(Switched, WhateverHappensNothingCountsTwice) {
  using State = UdpSwitch::State;
  struct Trouble {
    const char* name;
    double loss;
    uint64_t rounds;
    uint64_t at_least;  // so many rounds go through the switch, and not all; 0: any
    std::function<bool(UdpSwitch& through, const Box& box, uint32_t rank, uint64_t round)> after;
  };
  const auto becomes = [](State state) {
    return [state](UdpSwitch& through, const Box&, uint32_t rank, uint64_t round) {
      if (rank == 0 && round == 4) through.become(state);
      return true;
    };
  };
  const Trouble kTroubles[] = {
      {"passes", 0.01, 9, 4, becomes(State::kPasses)},
      {"silent", 0.01, 9, 4, becomes(State::kSilent)},
      {"forgets", 0.05, 8, 0,
       [](UdpSwitch& through, const Box&, uint32_t rank, uint64_t) {
         if (rank == 1) through.forget();
         return true;
       }},
      {"again", 0.01, 60, 12,
       [](UdpSwitch& through, const Box&, uint32_t rank, uint64_t round) {
         if (rank == 0 && round == 4) through.become(State::kPasses);
         if (rank == 0 && round == 6) through.become(State::kAdds);
         return true;
       }},
      {"leaves", 0.02, 8, 0,
       [](UdpSwitch&, const Box&, uint32_t rank, uint64_t round) {
         return rank != 2 || round < 4;
       }},
      {"breaks", 0, 40, 10,
       [](UdpSwitch&, const Box& box, uint32_t rank, uint64_t round) {
         if (rank != 0 || round != 14) return true;
         for (const int fd : data_connections({control_port(box)})) shutdown(fd, SHUT_RDWR);
         return true;
       }},
  };
  const uint64_t seed = testing::fresh_seeds(1).first;
  for (const Trouble& trouble : kTroubles) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}, {}", seed, trouble.name));
    UdpSwitch through({.seed = seed, .loss = trouble.loss});
    const auto box = box_behind(through, 2, 2);
    GroupedTraining run{.spec = spec_of(trouble.name, 3), .seed = seed, .rounds = trouble.rounds};
    run.spec.optimizer = "momentum";
    if (seed % 2 == 0) run.spec.reduction = "mean";
    if (seed % 3 == 0) run.spec.hyper["max_norm"] = 0.5;
    const Seen seen = train(*box, run, [&](uint32_t rank, uint64_t round) {
      return trouble.after(through, *box, rank, round);
    });
    expect_as_alone(seen, run);
    EXPECT_GT(seen.status.switch_chunks, 0u);
    if (trouble.at_least == 0) continue;
    EXPECT_GE(seen.status.switch_chunks, trouble.at_least * switched_chunks(run.spec));
    EXPECT_LT(seen.status.switch_chunks, run.rounds * switched_chunks(run.spec));
  }
}

// The box dies, and another one goes on from its checkpoint: with a switch, from the first round.
TEST(Switched, RanksThatJoinAgainSendThroughTheSwitch) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed});
  const TemporaryDirectory folder = TemporaryDirectory::in_memory();
  const auto serve = [&](const std::string& listen) {
    return std::make_unique<Box>("pack:1 core:2 pu:1", uint64_t{1} << 33, Box::Wrap(),
                                 CheckpointOptions{.folder = folder.path(), .every = 5}, "",
                                 &through.of_box(), Box::Uplink(), listen);
  };
  auto box = serve("127.0.0.1:0");
  const std::string address = box->address();
  GroupedTraining run{.spec = spec_of("rejoins", 3), .seed = seed};
  run.spec.optimizer = "momentum";
  const uint64_t rounds_after = 20;
  std::vector<std::vector<Results>> seen(3);
  std::atomic<uint64_t> again_from{0};
  std::atomic<bool> counted{false};
  const WorkerOptions options = options_over_tcp(*box, run.spec, 0);
  auto ranks = std::async(std::launch::async, [&] {
    each_rank(3, [&](uint32_t rank) {
      WorkerOptions own = options;
      own.rank = static_cast<int32_t>(rank);
      auto worker = std::make_unique<Worker>(own);
      worker->wait_all();
      for (uint64_t round = 1; again_from == 0 || round < again_from + rounds_after; ++round) {
        try {
          train_round(run, *worker, rank, round);
          seen[rank].push_back(results_of(*worker));
        } catch (const Error& error) {
          ASSERT_EQ(error.code(), ErrorCode::kRewound) << error.what();
          worker = worker->rejoin();
          worker->wait_all();
          EXPECT_THAT(worker->connection(), HasSubstr("through a switch"));
          again_from = worker->first_round();
          round = worker->first_round() - 1;
          seen[rank].resize(round);
        }
      }
      while (!counted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      worker->barrier();
    });
  });
  uint64_t durable = 0, chunks = 0;
  const auto train_on = [&] {
    for (const JobStatus& job : box->status().jobs) {
      durable = std::max(durable, job.durable_round);
      chunks = job.switch_chunks;
      // The numbers are those of a probe, which may be a moment old.
      if (again_from > 0 && job.completed_round + 1 >= again_from + rounds_after) counted = true;
    }
    return ranks.wait_for(std::chrono::milliseconds(5)) == std::future_status::timeout;
  };
  while (durable < 5 && train_on()) {
  }
  const std::vector<LogRecord> log = box->log(run.spec.name);
  box.reset();
  box = serve(address);
  while (train_on()) {
  }
  ranks.get();
  ASSERT_GT(again_from, 5u);
  EXPECT_GE(chunks, (rounds_after - 5) * switched_chunks(run.spec));
  run.rounds = again_from + rounds_after - 1;
  const std::vector<Results> want = alone(run, run.spec, log);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(seen[rank].size(), run.rounds);
    for (size_t i = 0; i < seen[rank].size(); ++i) {
      ASSERT_TRUE(seen[rank][i] == want[i]) << "rank " << rank << ", round " << i + 1;
    }
  }
}

// The next job has it at once, without a refusal, when the one before it has ended.
TEST(Switched, JobsAfterEachOtherUseTheSwitch) {
  UdpSwitch through({});
  const auto box = box_behind(through, 1);
  for (int i = 0; i < 8; ++i) {
    Worker worker(options_over_tcp(*box, spec_of(fmt::format("job{}", i), 1), 0));
    EXPECT_THAT(worker.connection(), HasSubstr("through a switch to 127.0.0.1"));
    worker.wait_all();
    worker.leave();
  }
}

// Nobody sends anything: the box's cores sleep.
TEST(Switched, AnIdleJobCostsNoTime) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  UdpSwitch through({.seed = seed});
  const auto box = box_behind(through, 1);
  const GroupedTraining run{.spec = spec_of("idle", 1), .seed = seed, .rounds = 2};
  Worker worker(options_over_tcp(*box, run.spec, 0));
  worker.wait_all();
  for (uint64_t round = 1; round <= run.rounds; ++round) train_round(run, worker, 0, round);
  const auto passes = [&] {
    const CoreStatus core = box->status().nodes.at(0).cores.at(0);
    return core.busy_passes + core.idle_passes;
  };
  bool sleeps = false;
  for (int i = 0; i < 1000 && !sleeps; ++i) {
    const uint64_t before = passes();
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    sleeps = passes() == before;
  }
  EXPECT_TRUE(sleeps);
}

// A chunk that takes longer than the progress limit, as so much is lost: at any time the switch
// waits for some part of every rank.
TEST(Switched, ARankWhosePartsComeHasNotSentNothing) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed, .slots = 16, .loss = 0.3});
  const auto box = box_behind(through, 1);
  GroupedTraining run{.spec = spec_of("long", 3), .seed = seed, .rounds = 1};
  run.spec.chunk_elements = 250 * kSwitchElements;
  run.spec.keys = {{.name = "a", .elements = run.spec.chunk_elements}};
  run.spec.progress_limit_ms = 3000;
  const Seen seen = train(*box, run);
  expect_as_alone(seen, run);
  EXPECT_EQ(seen.status.switch_chunks, 1u);
}

TEST(Switched, WhatASwitchCannotAddIsRefusedWithAReason) {
  UdpSwitch through({});
  const auto box = box_behind(through, 1);
  const auto refusal = [&](const std::function<void(WorkerOptions&)>& change) -> std::string {
    WorkerOptions options = options_over_tcp(*box, spec_of("refused", 2), 0);
    options.spec.optimizer = "sgd";
    change(options);
    try {
      options.await_ranks = false;
      const Worker worker(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(
      refusal([](WorkerOptions& o) { o.spec.unused = "skip"; }),
      "int32 at a server with --switch: a switch adds what all ranks send in a round, in any "
      "order, and does not tell whose it is, and job 'refused' has unused 'skip'; change that, "
      "or use another format, or a server without a switch");
  EXPECT_THAT(refusal([](WorkerOptions& o) { o.spec.branches = 1; }), HasSubstr("has branches"));
  EXPECT_THAT(refusal([](WorkerOptions& o) {
                o.interest = {{o.spec.keys[0].name, {{0, 1}}, {{0, 1}}}};
              }),
              HasSubstr("has interest"));
  EXPECT_THAT(refusal([](WorkerOptions& o) { o.spec.world_size = 65; }),
              HasSubstr("at most 64 ranks send, and the job has 65"));
  EXPECT_THAT(refusal([](WorkerOptions& o) { o.transport = "shm"; }),
              HasSubstr("needs tcp or verbs, and the job runs over shm"));
  EXPECT_THAT(refusal([](WorkerOptions& o) { o.nic_budget = "1gbit"; }), HasSubstr("nic_budget"));
}

// One job at a time has the switch; others are told so, and those without int32 do not need it.
TEST(Switched, OneJobAtATimeUsesASwitch) {
  UdpSwitch through({});
  const auto box = box_behind(through, 1);
  const Worker first(options_over_tcp(*box, spec_of("first", 1), 0));
  EXPECT_THAT(first.connection(), HasSubstr("through a switch to 127.0.0.1"));
  testing::expect_error(ErrorCode::kFull, "job 'first' has that", [&] {
    const Worker second(options_over_tcp(*box, spec_of("second", 1), 0));
  });
  JobSpec plain = spec_of("plain", 1);
  plain.gradient_dtype = "f32";
  const Worker third(options_over_tcp(*box, plain, 0));
  EXPECT_EQ(third.connection().find("switch"), std::string::npos);
}

// What is not a number stops the job, also where the sum does not tell whose it was.
TEST(Switched, WhatIsNotANumberEndsTheJobAsThePolicySays) {
  UdpSwitch through({});
  const auto box = box_behind(through, 1);
  const JobSpec spec = spec_of("nan", 2);
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_over_tcp(*box, spec, rank));
    worker.wait_all();
    for (size_t key = 0; key < worker.keys(); ++key) {
      std::ranges::fill(worker.gradient(key), rank == 1 && key == 3 ? NAN : 1.0f);
      worker.push(key);
    }
    testing::expect_error(ErrorCode::kNonFinite, "came through the switch",
                          [&] { worker.wait_all(); });
  });
}

}  // namespace switched_test
}  // namespace phub
