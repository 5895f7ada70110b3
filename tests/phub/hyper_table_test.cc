#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "phub/core/hyper.h"
#include "tests/oracle/reference.h"
#include "transport/error.h"

namespace phub {
namespace hyper_table_test {

using Values = std::map<std::string, double>;

JobSpec spec_of(std::vector<HyperChange> schedule, uint32_t classes = 1) {
  JobSpec spec;
  spec.name = "job";
  for (uint32_t k = 0; k < classes; ++k) {
    spec.keys.push_back({.name = fmt::format("k{}", k), .elements = 1, .lr_scale = 1.0 + k});
  }
  spec.optimizer = "momentum";
  spec.schedule = std::move(schedule);
  return spec;
}

// What is said for all groups, then what is said for this one.
void apply(const Values& values, uint32_t group, kernels::Hyper& hyper) {
  for (const auto& [name, value] : values) {
    if (name.find('@') == name.npos) kernels::set(hyper, name, value);
  }
  const std::string own = fmt::format("@{}", group);
  for (const auto& [name, value] : values) {
    if (name.ends_with(own)) kernels::set(hyper, name.substr(0, name.size() - own.size()), value);
  }
}

// What the changes say when they are carried out one after the other: by round; of one round, the
// schedule's first, then the others as they were made.
kernels::Hyper replayed(const JobSpec& spec, const std::vector<HyperChange>& made, uint64_t round,
                        const KeySpec& key) {
  std::vector<HyperChange> all = spec.schedule;
  all.insert(all.end(), made.begin(), made.end());
  std::stable_sort(all.begin(), all.end(),
                   [](const HyperChange& a, const HyperChange& b) { return a.round < b.round; });
  kernels::Hyper hyper = kernels::default_hyper(kernels::Optimizer::kMomentum);
  apply(spec.hyper, key.group, hyper);
  for (const HyperChange& change : all) {
    if (change.round > round) break;
    apply(change.values, key.group, hyper);
  }
  hyper.lr = reference::learning_rate(hyper, round) * key.lr_scale;
  hyper.weight_decay *= key.decay_scale;
  return hyper;
}

bool same(const kernels::Hyper& a, const kernels::Hyper& b) {
  return std::all_of(kernels::kHyperFields.begin(), kernels::kHyperFields.end(),
                     [&](const auto& field) { return a.*field.member == b.*field.member; });
}

TEST(HyperTable, EveryRoundHasWhatTheChangesUpToItSay) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const auto below = [&](uint32_t n) {
    return std::uniform_int_distribution<uint32_t>(0, n - 1)(random);
  };
  const char* const names[] = {"lr", "momentum", "weight_decay", "grad_scale", "lr_cosine"};
  uint32_t groups = 1;
  const auto values = [&] {
    Values v;
    for (uint32_t i = 0; i <= below(2); ++i) {
      const char* const name = names[below(5)];
      v[below(2) == 0 ? name : fmt::format("{}@{}", name, below(groups))] = 1 + below(1000);
    }
    return v;
  };
  for (int run = 0; run < 60; ++run) {
    groups = run % 2 == 0 ? 1 : 3;
    std::vector<HyperChange> schedule;
    uint64_t at = 0;
    for (uint32_t i = 0; i < below(20); ++i) schedule.push_back({at += 1 + below(20), values()});
    JobSpec spec = spec_of(std::move(schedule), 3);
    spec.keys[2].decay_scale = 0.5;
    spec.keys[0].group = groups - 1, spec.keys[1].group = groups / 2;
    spec.hyper = values();
    const KeyClasses classes = key_classes(spec);
    HyperTable table(spec, kernels::Optimizer::kMomentum, classes);
    HyperView view = table.view();
    std::vector<HyperChange> made;
    uint64_t lowest = 1, last = 1;
    for (int step = 0; step < 120; ++step) {
      lowest += below(3);
      last = std::max(last, lowest) + below(3);
      made.push_back({last, values()});
      view = table.change({&made.back(), 1}, lowest);
      const uint64_t round = lowest + below(400);
      const uint32_t key = below(3);
      ASSERT_TRUE(
          same(view.of(round, classes.of_key[key]), replayed(spec, made, round, spec.keys[key])))
          << "run " << run << " step " << step << " round " << round << " key " << key;
      // Another table that goes on from here, as that of a job from its checkpoint.
      HyperTable other(spec, kernels::Optimizer::kMomentum, classes);
      const HyperView restored = other.change(table.needed_from(lowest), lowest);
      ASSERT_TRUE(
          same(restored.of(round, classes.of_key[key]), view.of(round, classes.of_key[key])))
          << "run " << run << " step " << step << " round " << round << " from " << lowest;
    }
  }
}

TEST(HyperTable, GroupsShareNoValueThatWasSetForOne) {
  JobSpec spec = spec_of({}, 1);
  spec.keys.push_back({.name = "other", .elements = 1, .group = 255});
  spec.hyper = {{"lr@255", 0.5}};
  EXPECT_NO_THROW(check_hyper(spec.hyper, hyper_groups(spec)));
  const KeyClasses classes = key_classes(spec);
  ASSERT_EQ(classes.classes.size(), 2u);
  HyperTable table(spec, kernels::Optimizer::kMomentum, classes);
  EXPECT_EQ(table.view().of(1, classes.of_key[0]).lr, 0.01);
  EXPECT_EQ(table.view().of(1, classes.of_key[1]).lr, 0.5);
  EXPECT_THROW(check_hyper({{"lr@255", 1}}, 255), Error);
  EXPECT_THROW(check_hyper({{"lrr@1", 1}}, 2), Error);
  EXPECT_THROW(check_hyper({{"lr@1", -1}}, 2), Error);
  EXPECT_THROW(check_hyper({{"rmsprop_momentum@1", 0.5}}, 2), Error);
  // As many groups, as many fewer changes that are still needed.
  uint64_t round = 1;
  for (; !table.full(1); ++round) {
    const HyperChange change{round, {{"lr", static_cast<double>(round)}}};
    table.change({&change, 1}, 1);
  }
  EXPECT_EQ(round, HyperTable::kMostChanges / 256 + 1);
  EXPECT_LE(table.bytes(), 4 * HyperTable::kMostChanges * sizeof(HyperVersion));
}

// A rate for every step: what is held stays what two rounds need.
TEST(HyperTable, AMillionChangesHoldNoMoreThanAFew) {
  const JobSpec spec = spec_of({{.round = 500000, .values = {{"momentum", 0.25}}}});
  const KeyClasses classes = key_classes(spec);
  HyperTable table(spec, kernels::Optimizer::kMomentum, classes);
  uint64_t most = 0;
  for (uint64_t round = 1; round <= 1000000; ++round) {
    const HyperChange change{round, {{"lr", static_cast<double>(round)}}};
    const HyperView view = table.change({&change, 1}, round - 1);
    most = std::max(most, table.bytes());
    ASSERT_EQ(view.of(round, 0).lr, static_cast<double>(round));
    if (round > 1) {
      ASSERT_EQ(view.of(round - 1, 0).lr, static_cast<double>(round - 1));
    }
    ASSERT_EQ(view.of(round, 0).momentum, round < 500000 ? 0.9 : 0.25);
  }
  EXPECT_LE(most, 64 * sizeof(HyperVersion));
}

TEST(HyperTable, ChangesThatAreStillNeededAreBounded) {
  const JobSpec spec = spec_of({});
  const KeyClasses classes = key_classes(spec);
  HyperTable table(spec, kernels::Optimizer::kMomentum, classes);
  uint64_t round = 1;
  for (; !table.full(1); ++round) {
    ASSERT_LE(round, HyperTable::kMostChanges);
    const HyperChange change{round, {{"lr", static_cast<double>(round)}}};
    table.change({&change, 1}, 1);  // a key that is never pushed
  }
  EXPECT_FALSE(table.full(round)) << "it has been pushed";
  EXPECT_EQ(table.view().of(round, 0).lr, static_cast<double>(round - 1));
  const HyperChange last{round, {{"lr", 0}}};
  EXPECT_LE(table.change({&last, 1}, round).changes.size(), 2u);
}

// The cores read what they have until the whole boundary is there.
TEST(HyperTable, AViewOutlivesTheNextBoundaryHoweverManyChangesItBrings) {
  const JobSpec spec = spec_of({});
  const KeyClasses classes = key_classes(spec);
  HyperTable table(spec, kernels::Optimizer::kMomentum, classes);
  const HyperChange first{1, {{"lr", 0.25}}};
  const HyperView view = table.change({&first, 1}, 1);
  std::vector<HyperChange> many;
  for (uint64_t round = 2; round < 42; ++round) many.push_back({round, {{"lr", 1}}});
  const HyperView next = table.change(many, 1);
  EXPECT_EQ(view.of(1, 0).lr, 0.25);
  EXPECT_EQ(view.of(41, 0).lr, 0.25);
  EXPECT_EQ(next.of(1, 0).lr, 0.25);
  EXPECT_EQ(next.of(41, 0).lr, 1);
  EXPECT_EQ(next.changes.size(), 41u);
}

// The schedule is kept once, whatever the number of key classes.
TEST(HyperTable, TheMemoryOfASpecIsKnownBeforehand) {
  std::vector<HyperChange> schedule;
  for (uint64_t round = 1; round <= 1000; ++round) schedule.push_back({round, {{"lr", 1}}});
  const uint64_t one = spec_memory(spec_of(schedule, 1), 1);
  const uint64_t many = spec_memory(spec_of(schedule, 1000), 1000);
  EXPECT_GE(one, 1000 * sizeof(HyperVersion));
  EXPECT_LE(many, one + 1000 * 1000);
}

}  // namespace hyper_table_test
}  // namespace phub
