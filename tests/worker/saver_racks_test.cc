// Ranks below a parent with state of their own: it goes up to the root, which saves it, and comes
// down again to who goes on. The boxes are processes, of which the root is killed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"
#include "tests/worker/saving_program.h"
#include "transport/control/control_client.h"
#include "transport/control/rank_tree.h"

namespace phub::testing {
namespace saver_racks_test {

using ::testing::HasSubstr;

class SaverRacks : public SavedBoxTest {
 protected:
  SaverRacks() : SavedBoxTest(PHUB_BINARY) {}
  // A rack for each group of the last level, with boxes of the levels between.
  void serve_racks(uint64_t every, const std::string& groups, uint32_t ranks) {
    serve(every);
    const RankTree tree(groups, ranks);
    at_.assign(ranks, server_->address());
    for (uint32_t level = 1; level < tree.levels(); ++level) {
      for (uint32_t first = 0; first < ranks; first = tree.end(level, first)) {
        racks_.push_back(std::make_unique<ServerProcess>(
            program_, std::vector<std::string>{"--parent", at_[first]}));
        std::fill(at_.begin() + first, at_.begin() + tree.end(level, first),
                  racks_.back()->address());
      }
    }
  }
  ~SaverRacks() override {
    while (!racks_.empty()) racks_.pop_back();  // those below go first
  }
  WorkerOptions below(const JobSpec& spec, uint32_t rank) const {
    WorkerOptions mine = options(spec, static_cast<int32_t>(rank));
    mine.server = at_[rank];
    return mine;
  }
  static JobSpec grouped(const std::string& name, uint32_t ranks, const std::string& groups) {
    JobSpec spec = saving_spec(name, ranks);
    spec.groups = groups;
    return spec;
  }

  std::vector<std::string> at_;  // by rank
  std::vector<std::unique_ptr<ServerProcess>> racks_;
};

// Gradients are coded, so ranks have residuals beside the state of the program.
TEST_F(SaverRacks, ARunWhoseRootIsKilledEndsAsOneThatIsNot) {
  constexpr uint64_t kRounds = 120;
  const uint64_t seed = fresh_seeds(1).first;
  SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
  std::mt19937_64 random(seed);
  for (const std::string groups : {"2,1", "(1,2),(1)"}) {
    SCOPED_TRACE(groups);
    const uint32_t ranks = groups == "2,1" ? 3 : 4;
    while (!racks_.empty()) racks_.pop_back();
    serve_racks(7, groups, ranks);
    JobSpec spec = grouped("one-box", ranks, groups);
    spec.keys[1].format = "int8";
    const auto options_of_all = [&](bool at_racks) {
      std::vector<WorkerOptions> all;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        all.push_back(at_racks ? below(spec, rank) : options(spec, static_cast<int32_t>(rank)));
      }
      return all;
    };
    const std::string expected =
        run_saving(options_of_all(false), kRounds, std::atomic<uint64_t>(kRounds), false);
    ASSERT_FALSE(expected.empty());
    spec.name = "racks";
    std::atomic<uint64_t> allowed = 0;
    std::string result;
    std::jthread training([&, options = options_of_all(true)] {
      result = run_saving(options, kRounds, allowed, false, true);
    });
    uint64_t durable = 0;
    for (int kill = 0; kill < 2; ++kill) {
      EXPECT_TRUE(becomes_status(spec.name, [&](const JobStatus& job) {
        allowed = std::max<uint64_t>(allowed, std::min(kRounds - 1, job.next_saved_round + 3));
        return job.durable_round > durable;
      }));
      allowed = std::min(kRounds - 1, allowed + random() % 10);
      durable = std::max(durable, status(spec.name).durable_round);
      EXPECT_EQ(durable % 7, 0u);
      die_and_come_back(7);
      allowed = std::min(kRounds - 1, allowed + 1);
    }
    allowed = kRounds;
    training.join();
    EXPECT_EQ(result, expected);
  }
}

// Ranks in lock-step with this test.
class SaverRacksSteps : public SaverRacks {
 protected:
  void join(const JobSpec& spec, uint32_t rank, bool saves = true) {
    WorkerOptions mine = below(spec, rank);
    mine.await_ranks = false;
    if (saves) {
      mine.saver = [this, rank](uint64_t round) {
        if (on_save_[rank]) on_save_[rank](round);
        return RankState{{"round", bytes_of(fmt::format("{} of {}", round, rank))}};
      };
    }
    workers_[rank].reset();
    workers_[rank] = std::make_unique<Worker>(mine);
    workers_[rank]->wait_all();
  }
  void step() {
    for (const auto& worker : workers_) {
      for (size_t key = 0; worker && key < worker->keys(); ++key) worker->push_null(key);
    }
    for (const auto& worker : workers_) {
      if (worker) worker->wait_all();
    }
  }
  // Rounds, until the root has saved one after this.
  bool saves_after(const std::string& job, uint64_t round) {
    return becomes(
        [&] {
          step();
          return status(job).durable_round > round;
        },
        std::chrono::seconds(120));
  }

  std::unique_ptr<Worker> workers_[3];
  std::function<void(uint64_t round)> on_save_[3];
};

TEST_F(SaverRacksSteps, ARankThatIsLostBeforeItsPartVoidsThatSnapshotOnly) {
  serve_racks(2, "2,1", 3);
  JobSpec spec = grouped("void", 3, "2,1");
  spec.lease_ms = 3000;
  std::vector<std::jthread> joining;
  for (uint32_t rank = 0; rank < 3; ++rank) joining.emplace_back([&, rank] { join(spec, rank); });
  joining.clear();
  ASSERT_TRUE(
      becomes_status("void", [](const JobStatus& job) { return job.next_saved_round == 2; }));
  on_save_[1] = [this](uint64_t) { workers_[1]->end("this rank dies"); };
  step();
  step();
  workers_[1].reset();
  EXPECT_TRUE(becomes_status("void", [](const JobStatus& job) { return job.void_snapshots == 1; }));
  EXPECT_EQ(status("void").durable_round, 0u);
  EXPECT_TRUE(becomes([&] {
    return server_->output().find(
               "round 2 was not saved, the last that is remains round 0: rank 1 "
               "was lost before it had sent its part") != std::string::npos;
  })) << server_->output();
  EXPECT_TRUE(saves_after("void", 2)) << "the others' next one";
  EXPECT_EQ(status("void").void_snapshots, 1u);
}

// The rack joins without: it tells the root before it admits the rank.
TEST_F(SaverRacksSteps, ARankThatComesLaterMayBeTheFirstThatSaves) {
  serve_racks(3, "2", 2);
  JobSpec spec = grouped("later", 1, "2");
  spec.max_ranks = 2;
  join(spec, 0, false);
  step();
  EXPECT_TRUE(saves_after("later", 0)) << "what the box has, at any round";
  server_->stop();
  auto joined = std::async(std::launch::async, [&] { join(spec, 1); });
  EXPECT_EQ(joined.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout)
      << "the root does not know yet that a rank saves";
  server_->go_on();
  joined.get();
  const uint64_t first = workers_[1]->first_round();
  EXPECT_TRUE(saves_after("later", first));
  EXPECT_EQ(status("later").durable_round % 3, 0u);
  const uint64_t saved = status("later").durable_round;
  die_and_come_back(3);
  for (const auto& worker : {workers_[0].get(), workers_[1].get()}) {
    const auto train = [worker] {
      for (;;) {
        for (size_t key = 0; key < worker->keys(); ++key) worker->push_null(key);
        worker->wait_all();
      }
    };
    EXPECT_THROW(train(), Error);
  }
  const auto again = [&](uint32_t rank) {
    workers_[rank] = workers_[rank]->rejoin();
    workers_[rank]->wait_all();
  };
  {
    const std::jthread first_rank([&] { again(0); }), second([&] { again(1); });
  }
  const uint64_t round = workers_[1]->first_round() - 1;
  EXPECT_GE(round, saved);
  EXPECT_EQ(text_of(workers_[1]->restored("round").value()), fmt::format("{} of 1", round));
  EXPECT_FALSE(workers_[0]->restored("round"));
}

// By calls of the control port: a rack of the ranks 0 and 1, and one of rank 2.
TEST_F(SaverRacks, ARackSpeaksForItsOwnRanksOnly) {
  serve(10);
  ControlClient root(server_->address());
  JobSpec spec = saving_spec("racks", 2);
  spec.rack_ranks = {2, 1};
  spec.lease_ms = 60'000;
  const JoinReply reply = root.join({.spec = spec, .transport = "tcp", .saves = true}, 60'000);
  EXPECT_EQ(reply.save_every, 10u);
  const JoinReply other = root.join({.spec = spec, .transport = "tcp"}, 60'000);
  EXPECT_EQ(other.save_every, 10u) << "one of its ranks may save later";
  const Credential who{spec.name, reply.rank, reply.incarnation, reply.offer.ticket, reply.epoch};
  const Credential third{spec.name, other.rank, other.incarnation, other.offer.ticket, other.epoch};
  ASSERT_EQ(who.rank, 0u);
  ASSERT_TRUE(
      becomes_status("racks", [](const JobStatus& job) { return job.next_saved_round == 10; }));
  expect_error(ErrorCode::kInvalid, "rank 0 may not upload the saved state of rank 2",
               [&] { root.send_part(who, {.whose = 2, .round = 10, .all = 1}, "x"); });
  expect_error(ErrorCode::kInvalid, "did not say at its join",
               [&] { root.send_part(third, {.whose = 2, .round = 10, .all = 1}, "x"); });
  expect_error(ErrorCode::kInvalid, "rack 0 of job 'racks' has the ranks 0 to 1, and rank 2",
               [&] { root.tell(who, {.saves = true, .savers = {{.rank = 2}}}); });
  expect_error(ErrorCode::kNotFound, "goes on from no part of rank 1",
               [&] { root.restored_part(who, 1, 0); });
  // Any of its keys may be coded where its ranks are.
  const uint64_t most = kMaxStateBytes + kKeys * kElements * sizeof(float);
  expect_error(ErrorCode::kInvalid, fmt::format("1 to {} bytes", most),
               [&] { root.send_part(who, {.whose = 1, .round = 10, .all = most + 1}, "x"); });
  root.send_part(who, {.whose = 1, .round = 10, .all = most}, "x");
  root.send_part(who, {.whose = 0, .round = 10, .all = 1}, "x");
  root.tell(third, {.saves = true});
  root.send_part(third, {.whose = 2, .round = 10, .all = 1}, "x");
  // One of whose ranks it is not known who took part: that is void now, and never was anything.
  root.tell(third, {.saves = true, .known_round = 10, .savers = {{.rank = 2, .last = 9}}});
  root.tell(who, {.saves = true, .savers = {{.rank = 1, .last = 12}}});
  expect_error(ErrorCode::kNotFound, "rank 1 was lost before it had sent its part", [&] {
    root.send_part(who, {.whose = 1, .round = 10, .offset = 1, .all = most}, "x");
  });
  root.leave(who);
  root.leave(third);
}

}  // namespace saver_racks_test
}  // namespace phub::testing
