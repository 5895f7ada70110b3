// The job of a rack's parent, as it follows from that of the rack's workers.
#include "phub/job/rack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "kernels/trust.h"
#include "kernels/whole_key.h"
#include "phub/job/job_part.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace rack_test {

using ::testing::ElementsAre;
using testing::expect_error;

JobSpec spec_of(const std::string& groups, uint32_t world_size, uint32_t max_ranks) {
  JobSpec spec;
  spec.name = "job";
  spec.keys = {{.name = "key", .elements = 100}};
  spec.groups = groups;
  spec.world_size = world_size;
  spec.max_ranks = max_ranks;
  complete_spec(spec);
  return spec;
}

TEST(RackSpec, EveryGroupIsARank) {
  JobSpec spec = spec_of("(3,2),(1,4)", 6, 10);
  spec.gradient_dtype = "bf16";
  spec.keys[0].format = "f16";
  spec.on_nonfinite = "exclude";
  spec.reduction = "mean";
  JobSpec above = spec_above(spec);
  EXPECT_EQ(above.groups, "2,2");
  EXPECT_THAT(above.rack_ranks, ElementsAre(3, 2, 1, 4));
  EXPECT_EQ(above.max_ranks, 4u);
  EXPECT_EQ(above.world_size, 3u) << "nobody of the last group is there at first";
  EXPECT_EQ(above.gradient_dtype, "f32");
  for (const KeySpec& key : above.keys) EXPECT_EQ(key.format, "");
  EXPECT_EQ(above.on_nonfinite, "exclude") << "the racks of a job agree on it";
  EXPECT_EQ(above.reduction, "mean");
  EXPECT_EQ(above.progress_limit_ms, 2 * spec.progress_limit_ms);
  complete_spec(above);

  JobSpec top = spec_above(above);
  EXPECT_EQ(top.groups, "");
  EXPECT_THAT(top.rack_ranks, ElementsAre(5, 5)) << "ranks of the training, not racks";
  EXPECT_EQ(top.world_size, 2u);
  complete_spec(top);
}

TEST(RackSpec, RoundsAreGatedAtARackWhereTheyAreAtItsParent) {
  JobSpec spec = spec_of("2,2", 4, 4);
  for (const std::string_view optimizer : kernels::optimizer_names()) {
    spec.optimizer = optimizer;
    const auto which = *kernels::parse_optimizer(optimizer);
    const bool by_key = kernels::adapts(which) || kernels::takes_whole_keys(which);
    EXPECT_EQ(rules_of(spec).gated, by_key) << optimizer;
    EXPECT_EQ(rules_of_sums(spec).gated, by_key) << optimizer;
    EXPECT_EQ(rules_of_sums(spec).optimizer, kernels::Optimizer::kNone);
    EXPECT_FALSE(clips(spec_of_sums(spec)));
  }
  spec.hyper["max_norm"] = 1;
  EXPECT_TRUE(rules_of_sums(spec).gated);
}

TEST(RackSpec, ARackHasTheRanksOfItsGroup) {
  const JobSpec spec = spec_of("(3,2),(1,4)", 10, 10);
  EXPECT_EQ(rank_above(spec, -1), -1);
  EXPECT_EQ(rank_above(spec, 0), 0);
  EXPECT_EQ(rank_above(spec, 4), 1);
  EXPECT_EQ(rank_above(spec, 6), 3);
  EXPECT_EQ(ranks_below(spec, 3), (RankRange{6, 10}));
  expect_error(ErrorCode::kFull, "rank 10 is out of range", [&] { rank_above(spec, 10); });
  expect_error(ErrorCode::kInternal, "about rank 4 of 4", [&] { ranks_below(spec, 4); });
}

TEST(RackSpec, ARankStandsForThoseOfItsRack) {
  const JobSpec spec = spec_of("(3,2),(1,4)", 6, 10);
  EXPECT_EQ(ranks_of_training(spec, 7), (RankRange{7, 8})) << "it is none";
  const JobSpec above = spec_above(spec);
  EXPECT_EQ(ranks_of_training(above, 0), (RankRange{0, 3}));
  EXPECT_EQ(ranks_of_training(above, 2), (RankRange{5, 6}));
  EXPECT_EQ(ranks_of_training(above, 3), (RankRange{6, 10}));
  EXPECT_EQ(ranks_of_training(spec_above(above), 1), (RankRange{5, 10}));
}

TEST(RackSpec, APausedRackIsNotOneThatHangs) {
  JobSpec spec = spec_of("1,1", 2, 2);
  spec.on_loss = "wait";
  EXPECT_EQ(spec_above(spec).progress_limit_ms, 2 * spec.progress_limit_ms + spec.wait_limit_ms);
  spec.progress_limit_ms = spec.wait_limit_ms = 7u * 24 * 3600 * 1000;
  validate(spec_above(spec));
}

// What says that it is a job of racks is checked as everything else.
TEST(RackSpec, NonsenseIsRefused) {
  const auto refused = [](const char* what, void (*change)(JobSpec&)) {
    JobSpec spec = spec_of("", 2, 2);
    spec.rack_ranks = {2, 3};
    change(spec);
    expect_error(ErrorCode::kInvalid, what, [&] { complete_spec(spec); });
  };
  refused("rack_ranks: 3 racks, and max_ranks is 2",
          [](JobSpec& spec) { spec.rack_ranks.push_back(1); });
  refused("rack_ranks: ranks of a rack: must be from 1 to 1024, got 0",
          [](JobSpec& spec) { spec.rack_ranks[1] = 0; });
  refused("rack_ranks: ranks of all racks: must be from 1 to 1024", [](JobSpec& spec) {
    spec.rack_ranks = {1000, 25};
  });
}

}  // namespace rack_test
}  // namespace phub
