#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "phub/commands/commands.h"

namespace phub {
namespace status_command_test {

using ::testing::HasSubstr;
using ::testing::Not;

ServerStatus sample() {
  ServerStatus status;
  status.topology = "this machine";
  status.transports = {"shm", "tcp"};
  status.cores = 4;
  status.memory_bytes = 3u << 20;
  status.memory_limit_bytes = uint64_t{5} << 30;
  status.uptime_s = 3725;
  JobStatus job;
  job.name = "digits";
  job.state = "running";
  job.optimizer = "nesterov";
  job.keys = 6;
  job.chunks = 31;
  job.memory_bytes = 2048;
  job.completed_round = 417;
  job.durable_round = 400;
  job.rounds_per_s = 250.25;
  job.ranks = {{0, 1, "live", 1, ""}, {1, 2, "lost", 5, "lease expired"}, {2, 1, "live", 1, ""}};
  job.transport = "shm";
  job.flow.chunks_per_s = 7758;
  job.flow.bytes_in_per_s = 1.5e9;
  job.flow.bytes_out_per_s = 0.75e9;
  job.missing = {1};
  job.waiting_for = {1, 2};
  job.ranks[1].waited_chunks = 1;
  job.ranks[1].waited_round = 418;
  job.ranks[1].waited_key = "conv1.weight";
  job.ranks[2].late = 12;
  job.ranks[2].waited_chunks = 12;
  job.ranks[2].waited_round = 419;
  job.ranks[2].waited_s = 3.21;
  job.ranks[2].waited_key = "fc\x1b[31m";  // must not reach a terminal as it is
  status.nodes = {{.node = 1,
                   .cores = {{.core = 0, .cpu = 8, .awake = 0.25, .flow = job.flow}},
                   .nics = {{.name = "mlx5_0",
                             .transport = "verbs",
                             .budget_bytes_per_s = 2'000'000'000,
                             .flow = job.flow}}}};
  status.jobs = {job};
  return status;
}

TEST(Status, ShowsJobsRanksRoundsRatesAndWhoIsMissing) {
  const std::string text = describe(sample());
  EXPECT_THAT(
      text, HasSubstr("4 cores, 3.00 MiB of 5.00 GiB in use, transports: shm, tcp, up 1 h 2 min"));
  EXPECT_THAT(
      text, ::testing::ContainsRegex(
                "JOB +STATE +OVER +RANKS +ROUND +SAVED +ROUNDS/S +CHUNKS/S +IN +OUT +KEYS +CHUNKS "
                "+MEMORY +OPTIMIZER"));
  EXPECT_THAT(text,
              ::testing::ContainsRegex("digits +running +shm +2 of 3 +417 +400 +250.2 +7758 +1.50 "
                                       "GB/s +0.75 GB/s +6 +31 +2.00 KiB +nesterov"));
  EXPECT_THAT(text, HasSubstr("digits: missing: rank 1\n"));
  EXPECT_THAT(text, HasSubstr("digits: rank 1 is lost (incarnation 2): lease expired\n"));
  EXPECT_THAT(text, HasSubstr("digits: rank 2 is late: 12 rounds went on without it\n"));
  EXPECT_THAT(text, HasSubstr("digits: round 418 waits for rank 1: key 'conv1.weight'\n"));
  EXPECT_THAT(text,
              HasSubstr("digits: round 419 waits for rank 2: key 'fc\\u001b[31m' and others, 12 "
                        "chunks; nothing from it for 3.2 s\n"));
  EXPECT_THAT(text, Not(HasSubstr("rank 0 is")));
}

TEST(Status, ShowsCoresAndNicsOfTheBox) {
  const std::string text = describe(sample());
  EXPECT_THAT(text, ::testing::ContainsRegex("NIC +TRANSPORT +NODE +IN +OUT +AT MOST"));
  EXPECT_THAT(text, ::testing::ContainsRegex("mlx5_0 +verbs +1 +1.50 GB/s +0.75 GB/s +2.00 GB/s"));
  EXPECT_THAT(text, ::testing::ContainsRegex("CORE +NODE +CPU +AWAKE +CHUNKS/S +IN +OUT"));
  EXPECT_THAT(text, ::testing::ContainsRegex(" 0 +1 +8 +25% +7758 +1.50 GB/s +0.75 GB/s"));
}

TEST(Status, ShowsTheParentOfARackAndItsBudget) {
  ServerStatus status = sample();
  EXPECT_THAT(describe(status), Not(HasSubstr("a rack of")));
  status.parent = "10.0.0.1:7717";
  EXPECT_THAT(describe(status), HasSubstr("\na rack of 10.0.0.1:7717\n"));
  status.parent_budget_bytes_per_s = 31'250'000;
  EXPECT_THAT(describe(status), HasSubstr("\na rack of 10.0.0.1:7717, to which each NIC sends at "
                                          "most 250 Mbit/s\n"));
}

TEST(Status, BeforeTheInitialParametersItSaysWhoseTheyAre) {
  ServerStatus status = sample();
  status.jobs[0].waiting_for = {0};
  EXPECT_THAT(describe(status),
              HasSubstr("digits: waits for the initial parameters from rank 0\n"));
}

TEST(Status, ManyRanksAreCutShort) {
  ServerStatus status = sample();
  JobStatus& job = status.jobs[0];
  job.ranks.clear();
  for (uint32_t r = 0; r < 100; ++r) job.ranks.push_back({r, 0, "absent", 1, ""});
  const std::string text = describe(status);
  EXPECT_THAT(text, HasSubstr("digits: rank 19 is absent\n"));
  EXPECT_THAT(text, Not(HasSubstr("rank 20 is absent")));
  EXPECT_THAT(text, HasSubstr("digits: … and 80 more\n"));
}

TEST(Status, ShowsWindowsWhileTheyAreLarger) {
  ServerStatus status = sample();
  status.jobs[0].window_bytes = 80u << 20;
  status.jobs[0].window_growths = 3;
  EXPECT_THAT(describe(status), Not(HasSubstr("windows")));
  status.jobs[0].window_grown_bytes = 16u << 20;
  EXPECT_THAT(describe(status), HasSubstr("digits: windows of gradients have 80.00 MiB, 16.00 "
                                          "MiB more than at first\n"));
}

TEST(Status, ShowsWhatWasDecided) {
  ServerStatus status = sample();
  status.jobs[0].remarks = {{"placement", "3 MiB stay"}, {"factors", "a\nb"}};
  EXPECT_THAT(describe(status), HasSubstr("digits: placement: 3 MiB stay\ndigits: factors: a"));
  EXPECT_THAT(describe(status), Not(HasSubstr("a\nb")));
}

TEST(Status, ShowsTheLatestLossOfEachName) {
  ServerStatus status = sample();
  EXPECT_THAT(describe(status), Not(HasSubstr("losses")));
  status.jobs[0].losses = {{.round = 416, .ranks = 2, .loss = 0.25, .name = "train"},
                           {.round = 400, .ranks = 1, .nonfinite = true, .name = "validation"}};
  EXPECT_THAT(describe(status), HasSubstr("digits: losses: train 0.25 in round 416, validation not "
                                          "finite in round 400\n"));
}

TEST(Status, ShowsBranches) {
  ServerStatus status = sample();
  status.jobs[0].branches = {{.branch = 0, .rounds = 30},
                             {.branch = 2, .parent = 0, .round = 21, .rounds = 25, .runs = true},
                             {.branch = 3, .rounds = 4, .killed = 28, .on_disk = true},
                             {.branch = 4, .rounds = 5, .killed = 31}};
  const std::string text = describe(status);
  EXPECT_THAT(text, HasSubstr("digits: branch 0: 30 rounds\n"));
  EXPECT_THAT(text, HasSubstr("digits: branch 2 runs: forked from 0 before round 21, 25 rounds\n"));
  EXPECT_THAT(text, HasSubstr("digits: branch 3 killed: 4 rounds\n"));
  EXPECT_THAT(text, HasSubstr("digits: branch 4 killed, and not on disk yet: 5 rounds\n"));
}

TEST(Status, NoJobsAndFailedOnes) {
  ServerStatus status = sample();
  status.jobs[0].error = "rank 1 lost";
  EXPECT_THAT(describe(status), HasSubstr("digits: failed: rank 1 lost\n"));
  status.jobs.clear();
  EXPECT_THAT(describe(status), HasSubstr("no jobs\n"));
}

}  // namespace status_command_test
}  // namespace phub
