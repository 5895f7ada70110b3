// Jobs whose int32 gradients go through a switch that adds: what workers see is what one process
// computes, whatever becomes of packets, switch and workers.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
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
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "tests/worker/udp_switch.h"
#include "worker/worker.h"

namespace phub {
namespace switched_test {

using testing::alone;
using testing::Box;
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

// In the middle of a run it passes everything on as it is, is gone altogether, or forgets.
TEST(Switched, ASwitchThatDiesHasCountedNothingTwice) {
  for (const auto state : {UdpSwitch::State::kPasses, UdpSwitch::State::kSilent}) {
    const uint64_t seed = testing::fresh_seeds(1).first;
    SCOPED_TRACE(fmt::format("PHUB_SEED={}, silent {}", seed, state == UdpSwitch::State::kSilent));
    UdpSwitch through({.seed = seed, .loss = 0.01});
    const auto box = box_behind(through, 2);
    GroupedTraining run{.spec = spec_of("dies", 3), .seed = seed, .rounds = 9};
    run.spec.optimizer = "momentum";
    const Seen seen = train(*box, run, [&](uint32_t rank, uint64_t round) {
      if (rank == 0 && round == 4) through.become(state);
      return true;
    });
    expect_as_alone(seen, run);
    EXPECT_GE(seen.status.switch_chunks, 4 * switched_chunks(run.spec));
    EXPECT_LT(seen.status.switch_chunks, run.rounds * switched_chunks(run.spec));
  }
}

TEST(Switched, ASwitchThatForgetsHasCountedNothingTwice) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed, .loss = 0.05});
  const auto box = box_behind(through, 2);
  GroupedTraining run{.spec = spec_of("forgets", 3), .seed = seed, .rounds = 8};
  const Seen seen = train(*box, run, [&](uint32_t rank, uint64_t) {
    if (rank == 1) through.forget();
    return true;
  });
  expect_as_alone(seen, run);
  EXPECT_GT(seen.status.switch_chunks, 0u);
}

TEST(Switched, WithFewerSlotsThanTheBoxWasToldAllIsSentDirectly) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  UdpSwitch through({.seed = seed, .slots = 1});
  SwitchOptions wrong = through.of_box();
  wrong.slots = 64;
  Box box("pack:1 core:1 pu:1", uint64_t{1} << 33, Box::Wrap(), CheckpointOptions(), "", &wrong);
  const GroupedTraining run{.spec = spec_of("full", 2), .seed = seed, .rounds = 3};
  const Seen seen = train(box, run);
  expect_as_alone(seen, run);
  EXPECT_LT(seen.status.switch_chunks, run.rounds * switched_chunks(run.spec));
}

// Two ranks of one host: one of them cannot hear the box's answers.
TEST(Switched, ARankWithoutAPortSendsDirectlyAndSoDoAll) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  UdpSwitch through({.seed = seed});
  SwitchOptions one_port = through.of_box();
  one_port.worker_port = SwitchSocket(0).port();
  Box box("pack:1 core:1 pu:1", uint64_t{1} << 33, Box::Wrap(), CheckpointOptions(), "", &one_port);
  const GroupedTraining run{.spec = spec_of("port", 2), .seed = seed, .rounds = 4};
  const Seen seen = train(box, run);
  expect_as_alone(seen, run);
  EXPECT_EQ(seen.status.switch_chunks, 0u);
}

// It adds nothing for two rounds, and then all goes through it again; also when ranks that were
// lost have come back.
TEST(Switched, AnotherGenerationBeginsWhenTheSwitchIsThereAgain) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed, .loss = seed % 2 == 0 ? 0 : 0.01});
  const auto box = box_behind(through, 2, 2);
  GroupedTraining run{.spec = spec_of("again", 3), .seed = seed, .rounds = 60};
  run.spec.optimizer = "momentum";
  if (seed % 3 == 0) run.spec.hyper["max_norm"] = 0.5;
  const Seen seen = train(*box, run, [&](uint32_t rank, uint64_t round) {
    if (rank == 0 && round == 4) through.become(UdpSwitch::State::kPasses);
    if (rank == 0 && round == 6) through.become(UdpSwitch::State::kAdds);
    return true;
  });
  expect_as_alone(seen, run);
  EXPECT_GE(seen.status.switch_chunks, 12 * switched_chunks(run.spec));
  EXPECT_LT(seen.status.switch_chunks, run.rounds * switched_chunks(run.spec));
}

TEST(Switched, ARankThatCameBackSendsThroughTheSwitchAgain) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed});
  const auto box = box_behind(through, 2, 2);
  GroupedTraining run{.spec = spec_of("back", 3), .seed = seed, .rounds = 40};
  run.spec.optimizer = "sgd";
  run.spec.on_loss = "wait";
  std::vector<std::vector<Results>> seen(3);
  std::vector<LogRecord> log;
  std::atomic<uint64_t> chunks_before{0}, chunks{0};
  each_rank(3, [&](uint32_t rank) {
    auto worker = std::make_unique<Worker>(options_over_tcp(*box, run.spec, rank));
    worker->wait_all();
    for (uint64_t round = 1; round <= run.rounds; ++round) {
      train_round(run, *worker, rank, round);
      seen[rank].push_back(results_of(*worker));
      if (rank != 1 || round != 5) continue;
      // It is gone, and its successor comes after the round that the others may have begun.
      worker->end("it is to vanish");
      worker.reset();
      chunks_before = box->status().jobs.at(0).switch_chunks;
      WorkerOptions again = options_over_tcp(*box, run.spec, rank);
      again.replace = true;
      worker = std::make_unique<Worker>(again);
      worker->wait_all();
      while (seen[rank].size() + 1 < worker->first_round()) seen[rank].emplace_back();
      round = worker->first_round() - 1;
    }
    if (rank == 0) log = box->log(run.spec.name);
    worker->barrier();
    if (rank == 0) {
      for (int i = 0; i < 3000 && box->status().jobs.at(0).completed_round < run.rounds; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      chunks = box->status().jobs.at(0).switch_chunks;
    }
    worker->barrier();
  });
  const std::vector<Results> want = alone(run, run.spec, log);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    for (size_t i = 0; i < seen[rank].size(); ++i) {
      if (seen[rank][i].keys.empty()) continue;
      ASSERT_TRUE(seen[rank][i] == want[i]) << "rank " << rank << ", round " << i + 1;
    }
  }
  EXPECT_GE(chunks, chunks_before + 10 * switched_chunks(run.spec));
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

// A rank leaves on the way; the others go on, and their rounds have what the log says.
TEST(Switched, ARankThatLeavesEndsTheGenerationAndNoRound) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed, .loss = 0.02});
  const auto box = box_behind(through, 2);
  GroupedTraining run{.spec = spec_of("leaves", 3), .seed = seed, .rounds = 8};
  run.spec.optimizer = "sgd";
  run.spec.reduction = "mean";
  const Seen seen =
      train(*box, run, [](uint32_t rank, uint64_t round) { return rank != 2 || round < 4; });
  expect_as_alone(seen, run);
  EXPECT_EQ(seen.of[2].size(), 4u);
  EXPECT_GT(seen.status.switch_chunks, 0u);
}

// One is gone without a word, in the middle of a round: its lease ends.
TEST(Switched, ARankThatVanishesIsLostAndTheOthersSendDirectly) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed});
  const auto box = box_behind(through, 2);
  GroupedTraining run{.spec = spec_of("vanishes", 3), .seed = seed, .rounds = 6};
  run.spec.lease_ms = 3000;
  run.spec.optimizer = "sgd";
  std::vector<std::vector<Results>> seen(3);
  std::vector<LogRecord> log;
  each_rank(3, [&](uint32_t rank) {
    auto worker = std::make_unique<Worker>(options_over_tcp(*box, run.spec, rank));
    worker->wait_all();
    for (uint64_t round = 1; round <= run.rounds; ++round) {
      if (rank == 1 && round == 4) {
        // One key of the round is on its way, and no other will be.
        run.fill_key(rank, round, 0, worker->gradient_bytes(0));
        worker->push(0);
        return worker->end("it is to vanish");
      }
      train_round(run, *worker, rank, round);
      seen[rank].push_back(results_of(*worker));
    }
    if (rank == 0) log = box->log(run.spec.name);
    worker->barrier();
  });
  const std::vector<Results> want = alone(run, run.spec, log);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    for (size_t i = 0; i < seen[rank].size(); ++i) {
      ASSERT_TRUE(seen[rank][i] == want[i]) << "rank " << rank << ", round " << i + 1;
    }
  }
  EXPECT_EQ(seen[0].size(), run.rounds);
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

// Somebody hangs, and sends nothing: others have sent nothing directly that would show it.
TEST(Switched, ARankThatHangsIsLostByTheProgressLimit) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  UdpSwitch through({.seed = seed});
  const auto box = box_behind(through, 1);
  GroupedTraining run{.spec = spec_of("hangs", 2), .seed = seed, .rounds = 4};
  run.spec.keys.erase(run.spec.keys.begin() + 2);  // nothing goes directly
  run.spec.progress_limit_ms = 3000;
  std::atomic<bool> done{false};
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_over_tcp(*box, run.spec, rank));
    worker.wait_all();
    for (uint64_t round = 1; round <= run.rounds; ++round) {
      if (rank == 1 && round == 3) {
        while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return;
      }
      train_round(run, worker, rank, round);
    }
    done = true;
  });
}

uint16_t port_of(const sockaddr_in& address) { return ntohs(address.sin_port); }

// All connections for data, both ends of which are in this process.
void break_connections(uint16_t control_port) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    sockaddr_in own{}, peer{};
    socklen_t own_size = sizeof own, peer_size = sizeof peer;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0) continue;
    if (own.sin_family != AF_INET) continue;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) continue;
    if (port_of(own) == control_port || port_of(peer) == control_port) continue;
    shutdown(fd, SHUT_RDWR);
  }
}

// They are made anew; what was on its way comes directly, and counts once.
TEST(Switched, ConnectionsThatBreakEndTheGenerationAndNoRound) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  UdpSwitch through({.seed = seed});
  const auto box = box_behind(through, 2);
  const std::string& address = box->address();
  const auto control = static_cast<uint16_t>(std::stoul(address.substr(address.rfind(':') + 1)));
  GroupedTraining run{.spec = spec_of("breaks", 3), .seed = seed, .rounds = 40};
  run.spec.optimizer = "adam";
  const Seen seen = train(*box, run, [&](uint32_t rank, uint64_t round) {
    if (rank == 0 && round == 10 + seed % 10) break_connections(control);
    return true;
  });
  expect_as_alone(seen, run);
  EXPECT_GE(seen.status.switch_chunks, 10 * switched_chunks(run.spec));
  EXPECT_LT(seen.status.switch_chunks, run.rounds * switched_chunks(run.spec));
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
