// Jobs whose gradients are added in groups of ranks.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/grouped_training.h"

namespace phub {
namespace groups_test {

using testing::alone;
using testing::Box;
using testing::expect_as_alone;
using testing::expect_error;
using testing::grouped_spec;
using testing::GroupedTraining;
using testing::Results;

// That every rank sees the first of these, whatever the tree, is shown by any_job_test.
TEST(Groups, ThreeLevelsGiveOtherBitsThanTwoAndOne) {
  Box box(2);
  const GroupedTraining run{.spec = grouped_spec("three", 8, "(2,2),(2,2)"), .seed = 5};
  expect_as_alone(box, run);
  const std::vector<LogRecord> log = box.log("three");
  const auto in_groups = [&](const char* groups) {
    JobSpec spec = run.spec;
    spec.groups = groups;
    return alone(run, spec, log);
  };
  const std::vector<Results> three = in_groups("(2,2),(2,2)"), two = in_groups("4,4");
  EXPECT_FALSE(three == two);
  EXPECT_FALSE(three == in_groups(""));
  EXPECT_FALSE(two == in_groups(""));
}

TEST(Groups, WhatCannotBeIsRefused) {
  Box box;
  const auto refused = [&](ErrorCode code, const char* what,
                           const std::function<void(JobSpec&)>& change) {
    JobSpec spec = grouped_spec("refused", 1, "1");
    change(spec);
    expect_error(code, what, [&] { Worker worker(box.options(spec)); });
  };
  refused(ErrorCode::kInvalid, "groups: '1' has 1 ranks, and max_ranks is 2",
          [](JobSpec& spec) { spec.max_ranks = 2; });
  refused(ErrorCode::kInvalid, "groups: expected", [](JobSpec& spec) { spec.groups = "one"; });

  JobSpec spec = grouped_spec("agreed", 1, "1,2");
  spec.max_ranks = 3;
  const Worker worker(box.options(spec));
  spec.groups = "2,1";
  expect_error(ErrorCode::kMismatch, "groups is '2,1' here and '1,2' in the job",
               [&] { Worker other(box.options(spec)); });
}

}  // namespace groups_test
}  // namespace phub
