// Jobs of any kind: every rank sees what one process computes alone, to the bit.
#include "tests/worker/any_job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "phub/checkpoint/store.h"
#include "phub/job/standby.h"
#include "tests/seeds.h"
#include "tests/temporary_directory.h"
#include "tests/worker/box.h"
#include "tests/worker/racks.h"
#include "transport/control/rank_tree.h"
#include "transport/control/rules.h"
#include "transport/error.h"
#include "worker/memory/gradient_coder.h"

namespace phub::testing {
namespace any_job_test {

constexpr int kJobs = 60, kJobsInRacks = 20;

// Which features met in a job.
class Pairs {
 public:
  ~Pairs() {
    size_t pairs = 0;
    for (auto& [feature, others] : met_) {
      pairs += others.size();
      fmt::print("{} with {}\n", feature, fmt::join(others, " "));
    }
    fmt::print("{} pairs of {} features\n", pairs, met_.size());
  }
  void add(const std::set<std::string>& features) {
    for (auto of = features.begin(); of != features.end(); ++of) {
      met_[*of].insert(features.begin(), of);
    }
  }

 private:
  std::map<std::string, std::set<std::string>> met_;
};

TEST(AnyJob, RanksSeeWhatOneProcessComputes) {
  const uint64_t seed = fresh_seeds(1).first;
  Jobs jobs(seed);
  Box boxes[] = {Box(1), Box("pack:2 core:2 pu:1"), Box(5), Box("pack:4 core:1 pu:1")};
  Pairs pairs;
  for (int i = 0; i < kJobs && !::testing::Test::HasFailure(); ++i) {
    const GroupedTraining run = jobs.draw();
    const std::set<std::string> features = features_of(run);
    SCOPED_TRACE(fmt::format("PHUB_SEED={}: {}", seed, fmt::join(features, " ")));
    expect_as_alone(boxes[i % std::size(boxes)], run);
    pairs.add(features);
  }
}

TEST(AnyJob, SideBySideTheyDoNotMeet) {
  Jobs jobs(fresh_seeds(1).first);
  Box box(2);
  std::vector<std::jthread> at_once;
  for (int i = 0; i < 4; ++i) {
    at_once.emplace_back([&box, run = jobs.draw()] { expect_as_alone(box, run); });
  }
  at_once.clear();
  EXPECT_TRUE(box.becomes_empty());
}

// Boxes below a parent, of one level or of as many as the tree of the ranks has.
TEST(AnyJob, RanksInRacksDoToo) {
  const uint64_t seed = fresh_seeds(1).first;
  Jobs jobs(seed, true);
  Pairs pairs;
  for (int i = 0; i < kJobsInRacks && !::testing::Test::HasFailure(); ++i) {
    const GroupedTraining run = jobs.draw();
    const std::set<std::string> features = features_of(run);
    SCOPED_TRACE(fmt::format("PHUB_SEED={}: {}", seed, fmt::join(features, " ")));
    const JobSpec& spec = run.spec;
    Racks racks(spec.groups, spec.world_size, i % 3 == 0 ? 1 : RankTree::kMaxLevels);
    expect_as_alone(
        run, [&](uint32_t rank) { return racks.of(rank).options(spec); },
        [&] { return racks.log(spec.name); });
    pairs.add(features);
  }
}

std::vector<std::byte> saved_parameters(Checkpoints& checkpoints, const std::string& job,
                                        size_t key) {
  const auto reader = checkpoints.open(job, checkpoints.list(job).front());
  const TensorInfo& tensor = reader->tensors(kParametersFile).tensors[key];
  std::vector<std::byte> bytes(bytes_of(tensor));
  reader->read_tensor(kParametersFile, key, 0, bytes);
  return bytes;
}

bool may_have_standby(const JobSpec& spec) {
  if (spec.quorum > 0 && saves_residuals(spec)) return false;
  try {
    check_rules(spec, Feature::kHasStandby);
  } catch (const Error&) {
    return false;
  }
  return true;
}

// What the standby saves at the end of a job is what the ranks have.
TEST(AnyJob, TheStandbyHasTheSameBits) {
  const uint64_t seed = fresh_seeds(1).first;
  Jobs jobs(seed);
  const TemporaryDirectory directory;
  Box standby("pack:1 core:3 pu:1", uint64_t{1} << 33, {},
              {.folder = directory.path() + "/standby", .every = 3}, "", nullptr,
              {.transport = "", .standby_of = "the source"});
  Box source("pack:2 core:2 pu:1", uint64_t{1} << 33, {}, {}, standby.address(), nullptr,
             {.transport = "", .is_standby = true});
  Checkpoints checkpoints(directory.path() + "/standby");
  Pairs pairs;
  int with = 0;
  for (int i = 0; (i < kJobs || with == 0) && !::testing::Test::HasFailure(); ++i) {
    const GroupedTraining run = jobs.draw();
    const JobSpec& spec = run.spec;
    if (!wants_standby(spec) || !may_have_standby(spec)) {
      continue;
    }
    const std::set<std::string> features = features_of(run);
    SCOPED_TRACE(fmt::format("PHUB_SEED={}: {}", seed, fmt::join(features, " ")));
    expect_as_alone(source, run);
    pairs.add(features);
    ASSERT_TRUE(standby.becomes_empty());
    const std::vector<Results> all = alone(run, spec, source.log(spec.name));
    for (size_t key = 0; key < spec.keys.size() && spec.parameter_dtype == "f32"; ++key) {
      EXPECT_TRUE(saved_parameters(checkpoints, spec.name, key) == all.back().keys[key])
          << "key " << spec.keys[key].name;
      ++with;
    }
  }
  fmt::print("{} keys compared\n", with);
}

}  // namespace any_job_test
}  // namespace phub::testing
