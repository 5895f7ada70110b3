// Boxes below a parent, with workers (any_job_test: every rank sees the bytes of a process that
// adds in the order of the job's groups alone, as of one box).
#include "tests/worker/racks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "phub/rack/parent_client.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"
#include "worker/session/session.h"

namespace phub {
namespace racks_test {

using testing::Box;
using testing::expect_as_alone;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Racks;

// Joins a rank at the box of its rack.
std::unique_ptr<Worker> join(Racks& racks, const JobSpec& spec, uint32_t rank) {
  WorkerOptions options = racks.of(rank).options(spec, rank);
  return std::make_unique<Worker>(options);
}

// All racks have the chunks that the root decided.
TEST(Racks, TheRootDecidesHowAMatrixIsCut) {
  Racks racks("2,2", 4);
  JobSpec spec = grouped_spec("decided", 4, "2,2");
  spec.keys = {{.name = "m", .elements = 300 * 8, .shape = {300, 8}}};
  set_rank_limit(spec.keys[0], 1);
  const auto cores = static_cast<uint32_t>(2 * (1 + racks.root().status().shards.size()));
  testing::each_rank(4, [&](uint32_t rank) {
    Worker worker(racks.of(rank).options(spec, rank));
    worker.wait_all();
    EXPECT_EQ(worker.spec().keys[0].tile_rows,
              tile_rows_for(spec.keys[0], cores, spec.chunk_elements));
    const std::vector<float> left(300, 1.0f + static_cast<float>(rank)), right(8, 2.0f);
    worker.push_factors(0, {left.data(), right.data(), 1});
    worker.wait(0);
    EXPECT_THAT(worker.parameters(0), ::testing::Each(20.0f));
    worker.barrier();
  });
}

// A chunk's uplink is one gradient, whatever the number of ranks; and its result comes once.
TEST(Racks, TheBytesThatGoUpAreThoseOfOneGradient) {
  Racks racks("3,3", 6);
  const GroupedTraining run{.spec = grouped_spec("bytes", 6, "3,3")};
  uint64_t elements = 0;
  for (const KeySpec& key : run.spec.keys) elements += key.elements;
  std::vector<Flow> flows;
  testing::each_rank(6, [&](uint32_t rank) {
    Worker worker(racks.of(rank).options(run.spec, rank));
    worker.wait_all();
    for (uint64_t round = 1; round <= run.rounds; ++round) train_round(run, worker, rank, round);
    worker.barrier();
    if (rank == 0) {
      const uint64_t bytes = run.rounds * elements * sizeof(float);
      EXPECT_TRUE(
          testing::becomes([&] { return racks.flow_at_root("bytes").bytes_in >= 2 * bytes; }));
      EXPECT_EQ(racks.flow_at_root("bytes").bytes_in, 2 * bytes) << "of 2 racks";
    }
    worker.barrier();
  });
}

TEST(Racks, ABarrierIsForTheRanksOfAllRacks) {
  Racks racks("2,2", 4);
  std::atomic<uint32_t> arrived = 0;
  testing::each_rank(4, [&](uint32_t rank) {
    const auto worker = join(racks, grouped_spec("barrier", 4, "2,2"), rank);
    for (uint32_t time = 1; time <= 3; ++time) {
      if (rank == 3) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ++arrived;
      worker->barrier();
      EXPECT_GE(arrived, time * 4);
      worker->barrier();
    }
  });
}

TEST(Racks, HyperparametersAreSetAtTheRoot) {
  Racks racks("2,1", 3);
  JobSpec spec = grouped_spec("hyper", 3, "2,1");
  spec.optimizer = "sgd";
  spec.hyper = {{"lr", 1}};
  testing::each_rank(3, [&](uint32_t rank) {
    const auto worker = join(racks, spec, rank);
    worker->wait_all();
    const auto round = [&] {
      for (size_t key = 0; key < worker->keys(); ++key) {
        std::ranges::fill(worker->gradient(key), 1.0f);
        worker->push(key);
      }
      worker->wait_all();
      return worker->parameters(0)[0];
    };
    EXPECT_EQ(round(), -3);
    worker->barrier();
    if (rank == 1) {
      EXPECT_EQ(worker->set_hyper({{"lr", 10}}), 2u);
    }
    worker->barrier();
    EXPECT_EQ(round(), -33);
    worker->barrier();
  });
}

// The rack of the rank names it, the others their root's reason.
TEST(Racks, ANaNEndsTheJobEverywhere) {
  Racks racks("2,2", 4);
  testing::each_rank(4, [&](uint32_t rank) {
    const auto worker = join(racks, grouped_spec("nan", 4, "2,2"), rank);
    worker->wait_all();
    const char* const why = rank < 2
                                ? "rank 1 sent a NaN or an infinity in key 'b', elements 0 to 6"
                                : "rank 0 sent a NaN or an infinity in key 'b'";
    testing::expect_error(ErrorCode::kNonFinite, why, [&] {
      worker->gradient(1)[3] = rank == 1 ? NAN : 1;
      worker->push(1);
      worker->wait(1);
    });
  });
}

// To the root the rack is one rank. Who is gone holds up nobody.
TEST(Racks, TheStateOfKeysIsOfOneRankAtATime) {
  Racks racks("2,1", 3);
  JobSpec spec = grouped_spec("state", 3, "2,1");
  spec.optimizer = "adam";
  const auto options = [&](uint32_t rank) {
    WorkerOptions options = racks.of(rank).options(spec, rank);
    options.transport = "tcp";
    options.await_ranks = false;
    return options;
  };
  Worker same(options(1)), other(options(2));
  ControlClient raw(racks.of(0).address());
  const JoinReply reply = raw.join({.spec = spec, .rank = 0, .transport = "tcp"}, 60'000);
  const Credential who{spec.name, reply.rank, reply.incarnation, reply.offer.ticket, reply.epoch};
  EXPECT_EQ(raw.begin_state(who, {.set = true, .keys = {1}, .steps = {4}}).bytes, 7u * 3 * 4);

  std::vector<std::vector<float>> arrays(3, std::vector<float>(5000));
  KeyState state{.key = 0, .arrays = {arrays[0], arrays[1], arrays[2]}};
  testing::expect_error(ErrorCode::kTaken, "rank 0 sets the state of job 'state'", [&] {
    same.get_state({&state, 1});
  });
  testing::expect_error(ErrorCode::kTaken, "a rank of rack 0 sets the state of job 'state'", [&] {
    other.get_state({&state, 1});
  });
  testing::expect_error(ErrorCode::kInvalid, "no piece", [&] { raw.write_state(who, 84, "1234"); });
  testing::expect_error(ErrorCode::kInvalid, "behind the 0",
                        [&] { raw.write_state(who, 4, "1234"); });
  raw.write_state(who, 0, "1234");
  testing::expect_error(ErrorCode::kInvalid, "4 of the 84 bytes", [&] { raw.apply_state(who); });
  raw.leave(who);
  EXPECT_EQ(same.get_state({&state, 1}), 0u);
  EXPECT_EQ(other.get_state({&state, 1}), 0u);
}

// In other tests here racks send so, unless workers are asked for a transport.
TEST(Racks, ARackOnTheHostOfItsRootSendsOverMemory) {
  Box root(1);
  ControlClient control(root.address());
  for (const char* transport : {"auto", "tcp"}) {
    ParentClient parent({.server = root.address(), .transport = transport});
    JobSpec spec = grouped_spec(transport, 1, "");
    spec.rack_ranks = {2};
    const JoinReply reply = testing::join_parent(
        parent, {.spec = spec, .rank = 0, .transport = parent.transport(), .id = transport});
    EXPECT_EQ(reply.offer.transport, "tcp");
    const auto link = parent.connect(reply.offer, link_layout_of(reply));
    const bool is_near = link->describe().find("over memory of this host") != std::string::npos;
    EXPECT_EQ(is_near, transport == std::string("auto")) << link->describe();
    control.leave({spec.name, reply.rank, reply.incarnation, reply.offer.ticket, reply.epoch});
  }
}

// As budget_test has it of workers and boxes: the bits are those without one, and no more goes up
// than it lets.
TEST(Racks, ABudgetOfTheWayUpChangesNoBitsAndIsKept) {
  constexpr uint64_t kRate = 1'000'000;
  Racks racks("2,2", 4, 1, {.transport = "tcp", .nic_bytes_per_s = kRate});
  GroupedTraining run{.spec = grouped_spec("paced", 4, "2,2"), .seed = 24};
  run.rounds = 40;
  run.spec.optimizer = "adam";
  const auto start = std::chrono::steady_clock::now();
  expect_as_alone(
      run, [&](uint32_t rank) { return racks.of(rank).options(run.spec); },
      [&] { return racks.log(run.spec.name); });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  uint64_t elements = 0;
  for (const KeySpec& key : run.spec.keys) elements += key.elements;
  const uint64_t bytes = run.rounds * elements * sizeof(float);
  constexpr uint64_t kSavedUp = 2 * (64 << 10);  // by two cores
  ASSERT_GT(bytes, 3 * kSavedUp) << "it is not held up";
  EXPECT_GE(took.count(), static_cast<double>(bytes - kSavedUp) / kRate);
  const ServerStatus status = racks.of(0).status();
  EXPECT_FALSE(status.parent.empty());
  EXPECT_EQ(status.parent_budget_bytes_per_s, kRate);
  EXPECT_EQ(racks.root().status().parent, "");
}

TEST(Racks, WhatTheRootRefusesIsRefused) {
  Racks racks("1", 1);
  JobSpec spec = grouped_spec("refused-state", 1, "1");
  spec.optimizer = "none";
  const auto worker = join(racks, spec, 0);
  worker->wait_all();
  std::vector<float> memory(5000);
  KeyState state{.key = 0, .arrays = {memory}};
  testing::expect_error(ErrorCode::kInvalid, "in jobs in lock-step with an optimizer", [&] {
    worker->get_state({&state, 1});
  });
  testing::expect_error(ErrorCode::kInvalid, "this server keeps no checkpoints",
                        [&] { worker->checkpoint(); });
}

TEST(Racks, ACheckpointThatARankAsksForIsTheRoots) {
  const TemporaryDirectory folder = TemporaryDirectory::in_memory();
  Box root("pack:1 core:2 pu:1", uint64_t{1} << 33, {}, {.folder = folder.path()});
  Box rack("pack:1 core:2 pu:1", uint64_t{1} << 33, {}, {}, root.address());
  JobSpec spec = grouped_spec("asked", 1, "1");
  spec.optimizer = "adam";
  Worker worker(rack.options(spec));
  worker.wait_all();
  for (uint64_t round = 1; round <= 3; ++round) {
    for (size_t key = 0; key < worker.keys(); ++key) worker.push(key);
    worker.wait_all();
  }
  EXPECT_EQ(worker.checkpoint(), 3u);
  worker.await_checkpoint(3);
  EXPECT_EQ(root.status().jobs.at(0).durable_round, 3u);
}

TEST(Racks, WhatNoRackCanDoIsRefused) {
  Racks racks("2,2", 4);
  const auto refused = [&](const char* what, const std::function<void(WorkerOptions&)>& change) {
    WorkerOptions options = racks.of(0).options(grouped_spec("refused", 4, "2,2"));
    options.rank = 0;
    change(options);
    testing::expect_error(ErrorCode::kInvalid, what, [&] { Worker worker(options); });
  };
  refused("job 'refused' has no groups; give it groups, one for each rack, or join the parent",
          [](WorkerOptions& options) { options.spec.groups = ""; });
  refused("job 'refused' has min_ranks; change that, or join the parent itself",
          [](WorkerOptions& options) { options.spec.min_ranks = 2; });
  refused("job 'refused' has branches; change that, or join the parent itself",
          [](WorkerOptions& options) {
            options.spec.optimizer = "sgd";
            options.spec.branches = 1;
          });
  refused(
      "a server with --parent: it is one of several racks, which take part in every round, and its "
      "parent counts racks",
      [](WorkerOptions& options) {
        options.interest = {{"b", {}, {}}};
      });

  // The first rank decides which group a box serves.
  JobSpec spec = grouped_spec("agreed", 1, "2,2");
  spec.max_ranks = 4;
  WorkerOptions options = racks.of(0).options(spec);
  options.rank = 0;
  const Worker worker(options);
  options.rank = 3;
  testing::expect_error(ErrorCode::kInvalid, "rank 3 is of another group of job 'agreed': this box",
                        [&] { Worker other(options); });
}

}  // namespace racks_test
}  // namespace phub
