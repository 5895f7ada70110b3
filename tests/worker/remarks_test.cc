// What was decided for a job is in its status, and in the messages of its box.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "worker/worker.h"

namespace phub::testing {
namespace remarks_test {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.keys = {{.name = "a", .elements = 1000}};
  return spec;
}

// By subject: "subject: text". Where there are several boxes, the server says where chunks lie.
std::vector<std::string> remarks_of(Box& box, const std::string& job) {
  std::vector<std::string> remarks;
  for (const JobStatus& status : box.status().jobs) {
    if (status.name != job) continue;
    for (const Remark& remark : status.remarks) {
      if (remark.subject == "placement") continue;
      remarks.push_back(remark.subject + ": " + remark.text);
    }
  }
  return remarks;
}

TEST(Remarks, TheLatestOfEachSubjectIsSeen) {
  Box box;
  const JobSpec spec = spec_of("told", 2);
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    const auto in_turn = [&](uint32_t whose, const std::string& subject, const std::string& text) {
      if (rank == whose) worker.remark(subject, text);
      worker.barrier();
    };
    in_turn(0, "factors", "none");
    in_turn(1, "rate", "0.1");
    in_turn(1, "factors", "fc6");
    in_turn(0, "factors", "fc6");  // the same again is no news
    if (rank == 0) {
      EXPECT_EQ(remarks_of(box, spec.name),
                (std::vector<std::string>{"factors: fc6", "rate: 0.1"}));
    }
    worker.barrier();
    in_turn(0, "factors", "");
    in_turn(0, "never", "");
    if (rank == 0) {
      EXPECT_EQ(remarks_of(box, spec.name), std::vector<std::string>{"rate: 0.1"});
    }
    worker.barrier();
    worker.leave();
  });
  const std::vector<std::string> notes = box.notes();
  const auto lines = [&notes](const std::string& line) {
    return std::ranges::count_if(notes,
                                 [&](const std::string& note) { return note.ends_with(line); });
  };
  EXPECT_EQ(lines("job 'told': factors: none"), 1);
  EXPECT_EQ(lines("job 'told': rate: 0.1"), 1);
  EXPECT_EQ(lines("job 'told': factors: fc6"), 0) << "in less than a minute";
}

TEST(Remarks, TheirNumberAndSizeHaveLimits) {
  Box box;
  const JobSpec spec = spec_of("full", 1);
  each_worker(box, spec, [&](Worker& worker, uint32_t) {
    expect_error(ErrorCode::kInvalid, "subject", [&] { worker.remark("", "x"); });
    expect_error(ErrorCode::kInvalid, "subject", [&] { worker.remark(std::string(65, 's'), "x"); });
    expect_error(ErrorCode::kInvalid, "text", [&] { worker.remark("s", std::string(4097, 'x')); });
    worker.remark("0", std::string(4096, 'x'));
    const bool has_placement = !box.status().jobs[0].remarks.empty() &&
                               box.status().jobs[0].remarks[0].subject == "placement";
    const uint64_t most = kMostRemarks - (has_placement ? 1 : 0);
    for (uint64_t i = 1; i < most; ++i) worker.remark(fmt::format("{}", i), "x");
    expect_error(ErrorCode::kFull, "remarks on 32 subjects", [&] { worker.remark("more", "x"); });
    worker.remark("1", "y");  // of a subject that is there
    worker.remark("2", "");
    worker.remark("more", "\x1b[31m");
    EXPECT_THAT(remarks_of(box, spec.name), Contains("more: \x1b[31m"));
    worker.leave();
  });
  EXPECT_THAT(box.notes(), Not(Contains(HasSubstr("\x1b"))));
}

// Their machines are 1 and 2.
std::unique_ptr<Box> box_over_another() {
  const char* shards = std::getenv("PHUB_TEST_SHARDS");
  const std::string before = shards ? shards : "0";
  setenv("PHUB_TEST_SHARDS", "1", 1);
  auto box = std::make_unique<Box>("pack:1 core:1 pu:1");
  setenv("PHUB_TEST_SHARDS", before.c_str(), 1);
  return box;
}

// The ranks' machines are those of the boxes, 1 and 2. The second rank dies, and comes back.
TEST(Remarks, ARankAtAnotherMachineIsNamed) {
  const std::unique_ptr<Box> both = box_over_another();
  Box& box = *both;
  JobSpec spec = spec_of("moved", 2);
  spec.keys = {{.name = "a", .elements = 1 << 16}};
  spec.on_loss = "wait";
  spec.rank_hosts = {1, 2};
  const auto join_at = [&](std::vector<uint64_t> hosts, uint32_t rank) {
    JobSpec mine = spec;
    mine.rank_hosts = std::move(hosts);
    WorkerOptions options = box.options(mine, rank);
    options.transport = "tcp";
    options.replace = true;
    return std::make_unique<Worker>(options);
  };
  std::unique_ptr<Worker> first;
  std::thread other([&] { first = join_at({1, 2}, 0); });
  std::unique_ptr<Worker> second = join_at({1, 2}, 1);
  other.join();
  EXPECT_EQ(remarks_of(box, spec.name), std::vector<std::string>{});
  const auto again_at = [&](std::vector<uint64_t> hosts) {
    second->abandon();
    second = join_at(std::move(hosts), 1);
    return remarks_of(box, spec.name);
  };
  const std::string moved =
      "moved ranks: rank 1 was last seen at another machine than when chunks were placed: what it "
      "exchanges stays at the boxes where it lies until the job goes on from a checkpoint";
  EXPECT_EQ(again_at({1, 1}), std::vector<std::string>{moved});
  EXPECT_EQ(again_at({}), std::vector<std::string>{moved}) << "it does not say where it is";
  EXPECT_EQ(again_at({7, 2}), std::vector<std::string>{}) << "each rank speaks for itself";
  EXPECT_EQ(again_at({0, 9}), std::vector<std::string>{moved});
  EXPECT_THAT(box.notes(),
              Contains(HasSubstr("job 'moved': moved ranks: rank 1 was last seen at")));
  second->abandon();
  first->abandon();
}

// Of 18 ranks it is known where they are, of the last one it is not: it has not moved.
TEST(Remarks, ManyRanksAtOtherMachinesAreCounted) {
  const std::unique_ptr<Box> both = box_over_another();
  Box& box = *both;
  constexpr uint32_t kRanks = 19;
  JobSpec spec = spec_of("many", kRanks);
  spec.keys = {{.name = "a", .elements = 1 << 16}};
  spec.on_loss = "wait";
  const auto join_at = [&](uint64_t host, size_t known, uint32_t rank) {
    JobSpec mine = spec;
    mine.rank_hosts.assign(known, host);
    WorkerOptions options = box.options(mine, rank);
    options.transport = "tcp";
    options.replace = true;
    return std::make_unique<Worker>(options);
  };
  std::vector<std::unique_ptr<Worker>> workers(kRanks);
  std::vector<std::thread> joins;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    joins.emplace_back([&, rank] { workers[rank] = join_at(1, kRanks - 1, rank); });
  }
  for (std::thread& each : joins) each.join();
  for (uint32_t rank = kRanks; rank-- > 0;) {
    workers[rank]->abandon();
    workers[rank] = join_at(7, kRanks, rank);
    if (rank == kRanks - 1) {
      EXPECT_EQ(remarks_of(box, spec.name), std::vector<std::string>{});
    }
  }
  EXPECT_THAT(remarks_of(box, spec.name),
              ElementsAre(HasSubstr("moved ranks: ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, "
                                    "13, 14, 15 and 2 more were last seen at another machine")));
  for (const std::unique_ptr<Worker>& each : workers) each->abandon();
}

}  // namespace remarks_test
}  // namespace phub::testing
