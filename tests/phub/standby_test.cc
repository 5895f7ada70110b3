// Who may go on of a source and its standby, and the source's job there.
#include "phub/job/standby.h"

#include <gtest/gtest.h>

#include <string>

#include "phub/job/job_part.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"

namespace phub::testing {
namespace standby_test {

JobSpec job() {
  JobSpec spec{.name = "job", .keys = {{.name = "key", .elements = 100}}, .world_size = 3};
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.1}, {"grad_scale", 128}};
  spec.schedule = {{.round = 5, .values = {{"lr", 0.05}}},
                   {.round = 9, .values = {{"grad_scale@2", 64}}}};
  spec.gradient_dtype = "int8";
  spec.reduction = "mean";
  spec.groups = "1,2";
  spec.on_nonfinite = "exclude";
  spec.weights = "yes";
  spec.quorum = 2;
  spec.grace_ms = 5;
  spec.late_decay = 0.5;
  return spec;
}

RackNews members_of(std::vector<uint32_t> ranks, std::vector<uint32_t> incarnations) {
  RackNews news;
  news.live = std::move(ranks);
  news.incarnations = std::move(incarnations);
  return news;
}

TEST(Standby, MoreThanHalfOfTheMembersDecide) {
  const RackNews members = members_of({0, 2, 3, 7}, {1, 1, 4, 1});
  const auto first = [](uint32_t ranks) {
    return [ranks](uint32_t rank, uint32_t) { return rank < ranks; };
  };
  EXPECT_FALSE(is_majority(members, first(0)));
  EXPECT_FALSE(is_majority(members, first(3)));  // two of four
  EXPECT_TRUE(is_majority(members, first(4)));
  const auto of_first_life = [](uint32_t, uint32_t incarnation) { return incarnation == 1; };
  EXPECT_TRUE(is_majority(members, of_first_life));
  EXPECT_FALSE(is_majority(members_of({0, 1}, {1, 2}), of_first_life));
  EXPECT_FALSE(is_majority({}, first(9)));
}

TEST(Standby, HasTheSameStepsOfOneRack) {
  const JobSpec there = spec_at_standby(job());
  EXPECT_TRUE(there.mirrors);
  EXPECT_EQ(there.rack_ranks, std::vector<uint32_t>{3});
  EXPECT_EQ(there.gradient_dtype, "f32");
  EXPECT_EQ(there.reduction, Reduction::kSum);
  EXPECT_EQ(there.weights, Weights::kNo);
  EXPECT_EQ(there.quorum + there.grace_ms, 0u);
  EXPECT_EQ(there.late_decay, 1);
  EXPECT_EQ(there.unused, Unused::kSkip);
  EXPECT_EQ(there.hyper, (std::map<std::string, double>{{"lr", 0.1}}));
  ASSERT_EQ(there.schedule.size(), 1u);
  EXPECT_EQ(there.schedule[0].round, 5u);
  EXPECT_TRUE(is_gated(there));
  JobSpec complete = there;
  complete_spec(complete);
  EXPECT_EQ(difference(complete, there), "");
}

TEST(Standby, IsOfJobsThatABoxWouldSave) {
  EXPECT_TRUE(wants_standby(job()));
  JobSpec spec = job();
  spec.saved = Saved::kNo;
  EXPECT_FALSE(wants_standby(spec));
  spec = job();
  spec.optimizer = "none";
  EXPECT_FALSE(wants_standby(spec));
}

TEST(Standby, RefusesWhatIsNoSourcesJob) {
  const auto refuses = [](const std::string& why, const std::function<void(JobSpec&)>& change) {
    JobSpec spec = spec_at_standby(job());
    change(spec);
    expect_error(ErrorCode::kInvalid, why, [&] { validate(spec); });
  };
  refuses("one rack", [](JobSpec& spec) { spec.rack_ranks.clear(); });
  refuses("one rack", [](JobSpec& spec) {
    spec.rack_ranks = {1, 1};
    spec.world_size = spec.max_ranks = 2;
  });
  refuses("an optimizer", [](JobSpec& spec) { spec.optimizer = "none"; });
  refuses("standby", [](JobSpec& spec) { spec.hyper["max_norm"] = 1; });
}

TEST(Standby, SavesTheMembersOfItsSource) {
  Manifest saved;
  saved.spec = spec_at_standby(job());
  saved.log.resize(2);
  save_members(members_of({0, 2}, {1, 5}), saved);
  ASSERT_EQ(saved.ranks.size(), 3u);
  EXPECT_EQ(saved.live_ranks, (std::vector<uint32_t>{0, 2}));
  EXPECT_TRUE(saved.ranks[0].expected && !saved.ranks[1].expected && saved.ranks[2].expected);
  EXPECT_EQ(saved.ranks[2].incarnation, 5u);
  EXPECT_TRUE(saved.log.empty());
}

}  // namespace standby_test
}  // namespace phub::testing
