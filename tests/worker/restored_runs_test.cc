// Jobs of any kind whose box is killed, and that go on from their checkpoint on another box: with
// other cores and nodes, over another transport, over more boxes or fewer, in lock-step or not; and
// jobs of several boxes of which one is killed. In the end every rank has what one process computes
// that adds all updates once.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "tests/oracle/reference.h"
#include "tests/seeds.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/any_job.h"
#include "tests/worker/box.h"
#include "tests/worker/server_process.h"
#include "tests/worker/shard_process.h"
#include "tests/worker/training.h"

namespace phub::testing {
namespace restored_runs_test {

constexpr uint64_t kRoundsAfter = 8;  // after the checkpoint
constexpr uint64_t kMostLead = 5;     // of a rank, with any slack

struct Place {
  std::string topology = "pack:1 core:2 pu:1", transport = "shm";
  uint32_t shards = 0;  // boxes that serve under the server
};
const Place kTwoCores, kTcp{.transport = "tcp"};
const Place kTwoBoxes{.transport = "tcp", .shards = 1};
const Place kThreeBoxes{.topology = "pack:2 core:2 pu:1", .transport = "tcp", .shards = 2};
const struct {
  Place before, after;
} kMoves[] = {{{"pack:1 core:1 pu:1"}, {"pack:1 core:3 pu:1"}},
              {{"pack:1 core:4 pu:1"}, {"pack:1 core:1 pu:1"}},
              {kTwoCores, {"pack:2 core:2 pu:1"}},
              {{"pack:4 core:1 pu:1"}, kTwoCores},
              {kTwoCores, kTcp},
              {kTcp, kTwoCores},
              {kTwoBoxes, kThreeBoxes},
              {kThreeBoxes, kTwoCores},
              {kTwoCores, kTwoBoxes}};

class RestoredRuns : public ::testing::Test {
 protected:
  using TrainRound = std::function<void(Worker& worker, uint32_t rank, uint64_t round)>;
  struct Outcome {
    uint64_t last = 0;          // round
    std::vector<Results> seen;  // by rank, after it
    std::vector<LogRecord> log;
  };

  void serve(const Place& place, std::string listen = "127.0.0.1:0") {
    shards_.clear();
    Flags flags = {"--checkpoints", directory_.path() + "/checkpoints", "--checkpoint-every", "3"};
    flags.insert(flags.end(), kShortShardLease.begin(), kShortShardLease.end());
    server_.emplace(PHUB_BINARY, flags, listen, place.topology);
    for (uint32_t i = 0; i < place.shards; ++i) {
      shards_.push_back(std::make_unique<ShardProcess>(PHUB_BINARY, server_->address()));
    }
    ASSERT_TRUE(becomes([&] { return status().shards.size() == place.shards; }));
  }
  static void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(3)); }
  ServerStatus status() const { return ControlClient(server_->address()).status(); }
  // How many boxes have a part of the job.
  size_t boxes() const {
    std::set<uint32_t> boxes;
    for (const JobStatus& job : status().jobs) {
      for (const JobCoreStatus& core : job.cores) boxes.insert(core.box);
    }
    return boxes.size();
  }
  bool saves(uint64_t round) const {
    return becomes([&] {
      const std::vector<JobStatus> jobs = status().jobs;
      return !jobs.empty() && jobs.front().durable_round >= round;
    });
  }
  std::unique_ptr<Worker> join(const JobSpec& spec, const Place& place, uint32_t rank,
                               bool saves) const {
    WorkerOptions options = server_->options(spec);
    options.transport = place.transport;
    options.rank = static_cast<int32_t>(rank);
    if (saves) {
      options.saver = [](uint64_t round) {
        return RankState{{"round", std::vector<std::byte>(round)}};
      };
    }
    return std::make_unique<Worker>(options);
  }

  // What a shard has left out of a sum comes into the log later than the result to the ranks.
  std::vector<LogRecord> settled_log(const std::string& job) {
    std::vector<LogRecord> log;
    for (int same = 0; same < 5; ++same) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::vector<LogRecord> now = ControlClient(server_->address()).log(job);
      if (now.size() != log.size()) same = -1;
      log = std::move(now);
    }
    return log;
  }

  // Trains until a box has died: the server, which is followed by one at another place, or, without
  // `after`, a shard. Then each rank goes on from the checkpoint. `saves`: ranks have parts.
  Outcome train_through(const GroupedTraining& run, const Place& before, const Place* after,
                        bool saves, const TrainRound& train) {
    const JobSpec& spec = run.spec;
    const bool waits = spec.on_loss == "wait";
    Outcome outcome{.seen = std::vector<Results>(spec.world_size)};
    std::vector<std::atomic<uint64_t>> at(spec.world_size);  // rounds
    std::atomic<uint64_t> first_round = 0;
    std::promise<void> done;
    const std::shared_future<void> is_back = done.get_future().share();
    serve(before);
    const auto begin = [&](Worker& worker, uint32_t rank) {
      if (spec.initial == "broadcast") {
        worker.broadcast(rank == 0 ? run.initial() : std::vector<float>());
      }
      worker.wait_all();
    };
    std::vector<std::jthread> ranks;
    for (uint32_t rank = 0; rank < spec.world_size; ++rank) {
      ranks.emplace_back([&, rank] {
        std::unique_ptr<Worker> worker = join(spec, before, rank, saves);
        try {
          begin(*worker, rank);
          for (uint64_t round = 1;; ++round) {
            at.at(rank) = round;
            while (round > *std::ranges::min_element(at) + kMostLead) pause();
            train(*worker, rank, round);
            pause();
          }
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kRewound) << error.what();
        }
        at.at(rank) = ~uint64_t{0} - kMostLead;  // it is not waited for
        if (after) {
          worker.reset();
          is_back.wait();
          worker = join(spec, *after, rank, saves);
        } else {
          worker = worker->rejoin();
        }
        begin(*worker, rank);
        const auto all = after ? after->shards + 1 : before.shards + waits;
        EXPECT_EQ(boxes(), steps_whole_keys(spec) ? 1 : all);
        const uint64_t first = worker->first_round(), last = first + kRoundsAfter;
        uint64_t others = 0;
        EXPECT_TRUE(first_round.compare_exchange_strong(others, first) || others == first);
        const auto part = worker->restored("round");
        ASSERT_EQ(part.has_value(), saves);
        if (saves) {
          EXPECT_EQ(part->size(), first - 1);
        }
        for (uint64_t round = first; round <= last; ++round) train(*worker, rank, round);
        worker->barrier();
        if (spec.consistency != "bsp") {  // an update of nothing brings what the others did
          for (size_t key = 0; key < worker->keys(); ++key) worker->push_null(key);
          worker->wait_all();
        }
        outcome.seen[rank] = results_of(*worker);
        if (rank == 0) outcome.log = settled_log(spec.name);
        worker->barrier();
        worker->leave();
      });
    }
    EXPECT_TRUE(this->saves(6));
    EXPECT_EQ(boxes(), steps_whole_keys(spec) ? 1 : before.shards + 1);
    if (after) {
      EXPECT_EQ(server_->end(SIGKILL), -SIGKILL);
      serve(*after, server_->address());
    } else {
      shards_.front()->end(SIGKILL);
    }
    if (!after && waits) {
      EXPECT_TRUE(becomes([&] { return status().jobs.empty(); }));
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      EXPECT_TRUE(status().jobs.empty()) << "it waits for that box";
      shards_.front() = std::make_unique<ShardProcess>(PHUB_BINARY, server_->address());
    }
    done.set_value();
    EXPECT_TRUE(becomes([&] { return first_round > 0; }));
    EXPECT_GT(first_round, 6u);
    ranks.clear();
    outcome.last = first_round + kRoundsAfter;
    return outcome;
  }

  // Of a job in lock-step.
  void expect_as_alone(GroupedTraining run, const Place& before, const Place* after, bool saves) {
    const Outcome outcome = train_through(run, before, after, saves,
                                          [&](Worker& worker, uint32_t rank, uint64_t round) {
                                            train_round(run, worker, rank, round);
                                          });
    run.rounds = outcome.last;
    const auto saved_residuals = [](const Member& who) {
      return who.incarnation == 1 ? std::nullopt
                                  : std::optional(Member{who.rank, who.incarnation - 1});
    };
    const Results want = alone(run, run.spec, outcome.log, saved_residuals).back();
    for (const Results& seen : outcome.seen) EXPECT_TRUE(seen == want) << "round " << run.rounds;
  }

  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  std::vector<std::unique_ptr<ShardProcess>> shards_;  // end after the server, which ends its jobs
  std::optional<ServerProcess> server_;
};

// A job of few ranks, which may save state.
GroupedTraining draw(Jobs& jobs) {
  GroupedTraining run = jobs.draw();
  while (run.spec.world_size > 3 || run.spec.quorum > 0) run = jobs.draw();
  run.own_memory = false;
  return run;
}

TEST_F(RestoredRuns, EndAsOneProcessThatAddsEverythingOnce) {
  const uint64_t seed = fresh_seeds(1).first;
  Jobs jobs(seed);
  for (size_t i = 0; i < scaled(2 * std::size(kMoves)) && !HasFailure(); ++i) {
    const GroupedTraining run = draw(jobs);
    SCOPED_TRACE(fmt::format("PHUB_SEED={}: {} {}", seed, i, fmt::join(features_of(run), " ")));
    const auto& [before, after] = kMoves[i % std::size(kMoves)];
    // All-reduce goes on with what its ranks saved.
    expect_as_alone(run, before, &after, run.spec.optimizer == "none" || i % 3 == 0);
  }
}

TEST_F(RestoredRuns, GoOnFromTheCheckpointWhereAShardDies) {
  const uint64_t seed = fresh_seeds(1).first;
  Jobs jobs(seed);
  for (size_t i = 0; i < 4 && !HasFailure(); ++i) {
    GroupedTraining run = draw(jobs);
    while (steps_whole_keys(run.spec)) run = draw(jobs);  // no shard has a part of it
    if (i == 2) run.spec.on_loss = "wait";
    SCOPED_TRACE(fmt::format("PHUB_SEED={}: {} {}", seed, i, fmt::join(features_of(run), " ")));
    expect_as_alone(run, i % 2 == 0 ? kTwoBoxes : kThreeBoxes, nullptr,
                    run.spec.optimizer == "none" || i == 1);
  }
}

// Whole numbers, whose sum is the same in any order.
TEST_F(RestoredRuns, OutOfLockStepEveryUpdateCountsOnce) {
  const struct {
    const char *consistency, *optimizer, *parameter_dtype;
    Place before, after;
  } kJobs[] = {{"ssp", "sgd", "f32", kTwoBoxes, kThreeBoxes},
               {"async", "none", "f32", kThreeBoxes, kTwoBoxes},
               {"ssp", "none", "f32", kTcp, kTwoCores},
               {"async", "sgd", "bf16", kTwoCores, kTcp}};
  const auto gradient = [](uint32_t rank, uint64_t round, size_t key, size_t i) {
    return static_cast<float>((rank * 7 + round * 5 + key * 3 + i) % 15) - 7;
  };
  for (const auto& job : kJobs) {
    SCOPED_TRACE(fmt::format("{} {}", job.consistency, job.optimizer));
    GroupedTraining run{
        .spec = grouped_spec(fmt::format("{}-{}", job.consistency, job.optimizer), 3, "")};
    run.spec.consistency = job.consistency;
    run.spec.slack = run.spec.consistency == "ssp" ? 4 : 0;
    run.spec.optimizer = job.optimizer;
    const bool adds = run.spec.optimizer == "none";
    if (!adds) run.spec.hyper = {{"lr", 1}};
    run.spec.parameter_dtype = job.parameter_dtype;
    const Outcome outcome = train_through(
        run, job.before, &job.after, adds, [&](Worker& worker, uint32_t rank, uint64_t round) {
          for (size_t key = 0; key < worker.keys(); ++key) {
            const std::span<float> out = worker.gradient(key);
            for (size_t i = 0; i < out.size(); ++i) out[i] = gradient(rank, round, key, i);
            worker.push(key);
            // Some ranks are slower than others.
            if (key == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1 + 2 * rank));
          }
          worker.wait_all();
        });
    Results want;
    for (size_t key = 0; key < run.spec.keys.size(); ++key) {
      std::vector<float> sums(run.spec.keys[key].elements);
      for (uint64_t round = 1; round <= outcome.last; ++round) {
        for (uint32_t rank = 0; rank < 3; ++rank) {
          for (size_t i = 0; i < sums.size(); ++i) {
            sums[i] += (adds ? 1 : -1) * gradient(rank, round, key, i);
          }
        }
      }
      const auto type = *kernels::parse_dtype(run.spec.parameter_dtype);
      std::vector<std::byte>& bytes = want.keys.emplace_back(sums.size() * kernels::bytes_of(type));
      reference::convert(sums.data(), kernels::DType::kF32, bytes.data(), type, sums.size());
    }
    for (const Results& seen : outcome.seen) EXPECT_TRUE(seen == want);
  }
}

}  // namespace restored_runs_test
}  // namespace phub::testing
