#include "phub/status_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace phub {
namespace {

using testing::HasSubstr;
using testing::Not;

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
  job.rounds_per_s = 250.25;
  job.ranks = {{0, 1, "live", 1, ""}, {1, 2, "lost", 5, "lease expired"}, {2, 1, "live", 1, ""}};
  job.waiting_for = {1, 2};
  status.jobs = {job};
  return status;
}

TEST(Status, ShowsJobsRanksRoundsRatesAndWhoIsMissing) {
  const std::string text = describe(sample());
  EXPECT_THAT(text,
              HasSubstr("4 cores, 3.0 MiB of 5.0 GiB in use, transports: shm, tcp, up 1 h 2 min"));
  EXPECT_THAT(text, testing::ContainsRegex(
                        "JOB +STATE +RANKS +ROUND +ROUNDS/S +KEYS +CHUNKS +MEMORY +OPTIMIZER"));
  EXPECT_THAT(text, testing::ContainsRegex(
                        "digits +running +2 of 3 +417 +250.2 +6 +31 +2.0 KiB +nesterov"));
  EXPECT_THAT(text, HasSubstr("digits: rank 1 is lost (incarnation 2): lease expired\n"));
  EXPECT_THAT(text, HasSubstr("digits: round 418 waits for rank 1, 2\n"));
  EXPECT_THAT(text, Not(HasSubstr("rank 0 is")));
}

TEST(Status, NoJobsAndFailedOnes) {
  ServerStatus status = sample();
  status.jobs[0].error = "rank 1 lost";
  EXPECT_THAT(describe(status), HasSubstr("digits: failed: rank 1 lost\n"));
  status.jobs.clear();
  EXPECT_THAT(describe(status), HasSubstr("no jobs\n"));
}

}  // namespace
}  // namespace phub
