// What the jobs of one creator have together, and what is refused; over checkpoints on a real disk,
// too. That the server asks: access_test.cc.
#include "phub/quotas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "phub/job/saved_jobs.h"
#include "tests/phub/checkpoint_rig.h"
#include "tests/temporary_directory.h"
#include "transport/error.h"

namespace phub {
namespace quotas_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const Caller kAlice{.name = "alice", .id = "aa"};
constexpr const char* kBob = "bb";

class QuotasTest : public ::testing::Test {
 protected:
  // "": the job may be created.
  std::string check(const Quota& quota, const Quota& needed, const Quotas::BytesOfJobs& kept = {}) {
    try {
      quotas.check(kAlice, quota, "new", {needed, cpus}, [&] { return kept; });
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFull);
      return error.what();
    }
    return "";
  }
  // Never looked into.
  static const Job* job(uintptr_t number) { return reinterpret_cast<const Job*>(number * 8); }

  Quotas quotas;
  std::set<uint32_t> cpus;  // of the new job
};

TEST_F(QuotasTest, EveryAmountIsAddedUpAndTheLastUnitFits) {
  quotas.add(job(1), kAlice.id, "a", {{1, 10, 40, 100, 1000, 10'000, 1}, {4}});
  quotas.add(job(2), kAlice.id, "b", {{1, 20, 80, 200, 2000, 20'000, 2}, {5, 6}});
  quotas.add(job(3), kBob, "c", {{1, 99, 99, 999, 9999, 99'999, 9}, {4, 5, 6, 7, 8, 9}});
  const Quota needed{1, 5, 20, 50, 500, 5000, 1};
  cpus = {7};
  const Quota all{3, 35, 140, 350, 3500, 35'000, 4};
  EXPECT_EQ(check(all, needed), "");
  for (const QuotaField& field : kQuotaFields) {
    Quota less = all;
    --(less.*field.amount);
    EXPECT_THAT(check(less, needed),
                AllOf(HasSubstr("token 'alice'"), HasSubstr(std::string(field.word)),
                      HasSubstr("b "), HasSubstr("job 'new' needs"), Not(HasSubstr("c 9"))));
    Quota none;
    none.*field.amount = 0;
    EXPECT_NE(check(none, needed), "") << "0 is a limit";
  }
  EXPECT_EQ(check({}, {9, 999'999, 999'999, 999'999, ~uint64_t{0}, ~uint64_t{0}, 999}), "")
      << "no limits";
  quotas.remove(job(2));
  Quota without = all;
  for (const QuotaField& field : kQuotaFields) without.*field.amount -= field.is_bytes ? 2000 : 1;
  EXPECT_EQ(check(without, needed), "");
}

TEST_F(QuotasTest, JobsShareTheirCores) {
  quotas.add(job(1), kAlice.id, "a", {{.cores = 2}, {0, 1}});
  quotas.add(job(2), kAlice.id, "b", {{.cores = 1}, {1}});
  quotas.add(job(3), kBob, "c", {{.cores = 2}, {2, 3}});
  EXPECT_EQ(quotas.cpus_of(kAlice.id), (std::set<uint32_t>{0, 1}));
  cpus = {0, 1};
  EXPECT_EQ(check({.cores = 2}, {.cores = 2}), "");
  EXPECT_EQ(check({.cores = 1}, {.cores = 2}), "") << "lowered since: no more than there are";
  cpus = {1, 2};
  EXPECT_THAT(check({.cores = 2}, {.cores = 2}),
              HasSubstr("2 cores, and 0 cores are free (a 2 cores, b 1 cores); job 'new' needs 1"));
  quotas.remove(job(1));
  EXPECT_EQ(check({.cores = 2}, {.cores = 2}), "");
}

TEST_F(QuotasTest, AJobThatDoesNotFitAtAllIsRefusedWithoutOverflow) {
  quotas.add(job(1), kAlice.id, "a", {{.memory = 100}});
  EXPECT_NE(check({.memory = 1000}, {.memory = ~uint64_t{0} - 50}), "");
  EXPECT_THAT(check({.memory = 50}, {.memory = 1}), HasSubstr("0 B of memory are free"));
}

TEST_F(QuotasTest, CheckpointsCountAsTheyAreOnTheDiskIfThatIsMore) {
  quotas.add(job(1), kAlice.id, "a", {{.checkpoints = 100}});
  quotas.add(job(2), kBob, "b", {{.checkpoints = 1000}});
  const Quota quota{.checkpoints = 1000}, needed{.checkpoints = 600};
  EXPECT_EQ(check(quota, needed, {{"ended", 300}}), "");
  EXPECT_THAT(check(quota, needed, {{"ended", 301}}),
              AllOf(HasSubstr("599 B of checkpoints are free (ended 301 B of checkpoints, a 100 B"),
                    HasSubstr("checkpoints of ended jobs removed")));
  EXPECT_EQ(check(quota, needed, {{"a", 400}}), "") << "it needs 100, and has 400";
  EXPECT_NE(check(quota, needed, {{"a", 401}}), "");
  // Those of an earlier job of the same name.
  EXPECT_EQ(check(quota, needed, {{"new", 900}}), "");
  EXPECT_THAT(check(quota, needed, {{"new", 901}}), HasSubstr("job 'new' needs 901 B"));
}

TEST_F(QuotasTest, OnlyTheLargestAreNamed) {
  for (uint64_t i = 1; i <= 50; ++i) {
    quotas.add(job(i), kAlice.id, "job-" + std::to_string(i), {{.ranks = i}});
  }
  EXPECT_THAT(check({.ranks = 1}, {.ranks = 1}),
              AllOf(HasSubstr("(job-50 50 ranks, job-49 49 ranks"), HasSubstr("40 more"),
                    Not(HasSubstr("job-40 "))));
}

TEST(KeptBytes, AreThoseOfOneOwnersJobs) {
  const TemporaryDirectory directory;
  const std::string& folder = directory.path();
  uint64_t expected = 0;
  {
    CheckpointStore store(folder, 3);
    for (const uint64_t round : {7, 9}) write_checkpoint(store, testing::Content{.round = round});
    for (const CheckpointId id : store.list(testing::kJob)) {
      const auto reader = store.open(testing::kJob, id);
      for (const CheckpointFile& file : reader->manifest().files) expected += file.bytes;
    }
  }
  SavedJobs saved({.folder = folder});
  const std::string owner = testing::Content{}.manifest().owner;
  EXPECT_GT(expected, 2 * 300u);
  EXPECT_EQ(saved.kept_bytes(owner), (Quotas::BytesOfJobs{{testing::kJob, expected}}));
  EXPECT_TRUE(saved.kept_bytes("another").empty());
  std::filesystem::create_directory(folder + "/damaged");
  EXPECT_EQ(saved.kept_bytes(owner).size(), 1u);
}

}  // namespace quotas_test
}  // namespace phub
