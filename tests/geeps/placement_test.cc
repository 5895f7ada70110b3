#include "worker/geeps/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/geeps/demands.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/geeps/moves.h"

namespace phub::geeps {
namespace placement_test {

using ::testing::HasSubstr;

struct Region {
  uint64_t begin, bytes;
};

bool overlap(const Region& a, const Region& b) {
  return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

std::vector<bool> pinned_of(const Placement& placement) {
  std::vector<bool> pinned;
  for (const EntryPlace& entry : placement.entries) pinned.push_back(entry.pinned);
  return pinned;
}

uint64_t bytes_of_buffer(const Demand& demand, const Access& access) {
  uint64_t bytes = 0;
  for (const BatchPart& part : demand.batches[access.batch].parts) bytes += part.bytes;
  return bytes;
}

bool fetches(const Access& a) {
  return a.kind == AccessKind::kRead || (a.kind == AccessKind::kLocal && a.fetch);
}
bool saves(const Access& a) {
  return a.kind == AccessKind::kUpdate || (a.kind == AccessKind::kLocal && a.save);
}

std::vector<bool> kept_of(const Placement& placement) {
  std::vector<bool> kept;
  for (const AccessPlace& access : placement.accesses) kept.push_back(access.kept);
  return kept;
}

// Double-buffered, what is saved has a phase more where there is room for it.
bool is_live(const Demand& demand, const Access& a, uint32_t lead, bool twice, uint32_t phase) {
  const uint32_t phases = demand.phases;
  uint32_t length = (a.last_phase + phases - a.first_phase) % phases + 1 + lead;
  if (twice && saves(a) && length < phases) ++length;
  EXPECT_LE(length, phases) << "it would be live twice";
  return (phase + phases + lead - a.first_phase) % phases < length;
}

// Everything that must hold of any placement.
void expect_sound(const Demand& demand, const PlacementOptions& options, const Placement& p) {
  ASSERT_EQ(p.entries.size(), demand.entries.size());
  ASSERT_EQ(p.accesses.size(), demand.accesses.size());
  ASSERT_LE(p.total_bytes(), options.budget_bytes);
  const auto pinned = pinned_of(p);
  ASSERT_EQ(p.pinned_bytes + p.index_bytes, pinned_bytes(demand, pinned));
  ASSERT_EQ(p.moved_bytes, moved_bytes(demand, pinned, kept_of(p)));
  if (p.buffering == Buffering::kDouble) {
    const std::vector<bool> least = kept_with(demand, p.lead);
    for (size_t i = 0; i < least.size(); ++i) ASSERT_TRUE(p.accesses[i].kept || !least[i]);
  }
  std::vector<Access> lives = demand.accesses;  // of those that keep a buffer, with its first's
  for (size_t i = lives.size(); i-- > 0;) {
    if (!p.accesses[i].kept) continue;
    ASSERT_EQ(p.accesses[i].offset, p.accesses[*lives[i].again].offset);
    lives[*lives[i].again].last_phase = lives[i].last_phase;
  }

  // What is there all the time.
  std::vector<Region> fixed = {{p.reserved_offset, p.reserved_bytes}};
  for (size_t i = 0; i < p.entries.size(); ++i) {
    if (!p.entries[i].pinned) continue;
    fixed.push_back({p.entries[i].offset, demand.entries[i].bytes});
    fixed.push_back({p.entries[i].log_offset, demand.entries[i].log_bytes});
  }
  for (const IndexPlace& index : p.indexes) fixed.push_back({index.offset, index.bytes});
  for (size_t a = 0; a < fixed.size(); ++a) {
    ASSERT_LE(fixed[a].begin + fixed[a].bytes, p.total_bytes());
    for (size_t b = 0; b < a; ++b) {
      ASSERT_FALSE(fixed[a].bytes > 0 && fixed[b].bytes > 0 && overlap(fixed[a], fixed[b]));
    }
  }

  for (size_t i = 0; i < p.accesses.size(); ++i) {
    const AccessPlace& place = p.accesses[i];
    const Batch& batch = demand.batches[demand.accesses[i].batch];
    ASSERT_EQ(place.in_place, batch.in_place && pinned[batch.parts[0].entry]);
    if (place.in_place) {
      ASSERT_EQ(place.offset, p.entries[batch.parts[0].entry].offset);
      continue;
    }
    const Region mine{place.offset, bytes_of_buffer(demand, demand.accesses[i])};
    ASSERT_EQ(place.offset % 256, 0u);
    ASSERT_GE(place.offset, p.pool_offset);
    ASSERT_LE(place.offset + mine.bytes, p.pool_offset + p.pool_bytes);
    for (const Region& region : fixed) ASSERT_FALSE(region.bytes > 0 && overlap(mine, region));
    if (place.kept) {
      ASSERT_EQ(place.lead, 0u);
      continue;
    }
    const Access& access = lives[i];
    const bool alone = (access.last_phase + 1) % demand.phases == access.first_phase;
    const bool ahead = p.buffering == Buffering::kDouble && !alone && fetches(access);
    ASSERT_GE(place.lead, ahead ? 1u : 0u);
    if (!fetches(access)) {
      ASSERT_EQ(place.lead, 0u);
    }
    ASSERT_LE(place.lead, options.max_lead);
  }
  for (uint32_t phase = 0; phase < demand.phases; ++phase) {
    std::vector<Region> live;
    for (size_t i = 0; i < p.accesses.size(); ++i) {
      const bool twice = p.buffering == Buffering::kDouble;
      if (p.accesses[i].in_place || p.accesses[i].kept) continue;
      if (!is_live(demand, lives[i], p.accesses[i].lead, twice, phase)) continue;
      live.push_back({p.accesses[i].offset, bytes_of_buffer(demand, demand.accesses[i])});
    }
    for (size_t a = 0; a < live.size(); ++a) {
      for (size_t b = 0; b < a; ++b) ASSERT_FALSE(overlap(live[a], live[b])) << "phase " << phase;
    }
  }
}

// Enough for everything, with room.
uint64_t all_bytes(const Demand& demand) {
  const std::vector<bool> all(demand.entries.size(), true);
  const std::vector<bool> none(demand.entries.size(), false);
  return pinned_bytes(demand, all) + 2 * pool_bytes(demand, none, 1) + 256;
}

class AnyOrder : public ::testing::TestWithParam<bool> {};  // peak_first

TEST_P(AnyOrder, IsSoundAtAnyBudgetOrRefuses) {
  const bool peak_first = GetParam();
  std::mt19937 engine(peak_first ? 17 : 11);
  int placed = 0, refused = 0, single = 0;
  for (int round = 0; round < 1500; ++round) {
    const Demand demand = random_demand(engine, 12, 25);
    const PlacementOptions options{.budget_bytes = engine() % (all_bytes(demand) * 11 / 10),
                                   .reserved_bytes = engine() % 3 * 1000,
                                   .peak_first = peak_first};
    SCOPED_TRACE(::testing::Message() << "round " << round);
    const uint64_t least = least_budget(demand) + (options.reserved_bytes + 255) / 256 * 256;
    try {
      const Placement placement = place(demand, options);
      ASSERT_NO_FATAL_FAILURE(expect_sound(demand, options, placement));
      ASSERT_GE(options.budget_bytes, least);
      single += placement.buffering == Buffering::kSingle ? 1 : 0;
      ++placed;
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), ErrorCode::kFull);
      if (!peak_first) {
        ASSERT_LT(options.budget_bytes, least);
      }
      ++refused;
    }
  }
  EXPECT_GT(placed, 750);
  EXPECT_GT(refused, 50);
  if (!peak_first) {
    EXPECT_GT(single, 50);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, AnyOrder, ::testing::Bool(),
                         [](const auto& i) { return i.param ? "PeakFirst" : "BytesFirst"; });

TEST(Placement, TheLeastBudgetIsJustEnough) {
  std::mt19937 engine(12);
  for (int round = 0; round < 300; ++round) {
    const Demand demand = random_demand(engine, 8, 20);
    const uint64_t least = least_budget(demand);
    const PlacementOptions options{.budget_bytes = least};
    ASSERT_NO_FATAL_FAILURE(expect_sound(demand, options, place(demand, options)));
    if (least == 0) continue;
    EXPECT_THROW(place(demand, {.budget_bytes = least - 1}), Error);
  }
}

// The least that the accesses can move, over all sets of pinned entries that fit double-buffered.
uint64_t least_moved(const Demand& demand, uint64_t budget) {
  uint64_t least = UINT64_MAX;
  for (uint32_t set = 0; set < 1u << demand.entries.size(); ++set) {
    std::vector<bool> pinned;
    for (size_t i = 0; i < demand.entries.size(); ++i) pinned.push_back((set >> i & 1) == 1);
    if (pinned_bytes(demand, pinned) + pool_bytes(demand, pinned, 1) > budget) continue;
    least = std::min(least, moved_bytes(demand, pinned, kept_with(demand, 1)));
  }
  return least;
}

TEST(Placement, IsCloseToTheBestOfAllSets) {
  std::mt19937 engine(13);
  uint64_t sum = 0;
  uint64_t best_sum = 0;
  int compared = 0;
  int best_found = 0;
  for (int round = 0; round < 500; ++round) {
    const Demand demand = random_demand(engine, 7, 12);
    const uint64_t budget = engine() % all_bytes(demand);
    const uint64_t best = least_moved(demand, budget / 256 * 256);
    if (best == UINT64_MAX || budget < least_budget(demand)) continue;
    const Placement placement = place(demand, {.budget_bytes = budget, .max_lead = 1});
    if (placement.buffering == Buffering::kSingle) continue;
    ASSERT_GE(placement.moved_bytes, best) << "round " << round;
    sum += placement.moved_bytes;
    best_sum += best;
    best_found += placement.moved_bytes == best ? 1 : 0;
    ++compared;
  }
  RecordProperty("compared", compared);
  RecordProperty("best_found", best_found);
  EXPECT_GT(compared, 250);
  EXPECT_GT(best_found, compared * 8 / 10);
  EXPECT_LE(static_cast<double>(sum), 1.05 * static_cast<double>(best_sum));
}

TEST(Placement, MoreMemoryIsNeverWorse) {
  std::mt19937 engine(14);
  for (int round = 0; round < 60; ++round) {
    const Demand demand = random_demand(engine, 10, 20);
    bool placed = false;
    Buffering buffering = Buffering::kSingle;
    uint64_t moved = UINT64_MAX;
    for (uint64_t budget = 0; budget < all_bytes(demand); budget += 256) {
      try {
        const Placement placement = place(demand, {.budget_bytes = budget, .max_lead = 1});
        ASSERT_TRUE(buffering == Buffering::kSingle || placement.buffering == buffering);
        if (placement.buffering == Buffering::kDouble) {
          ASSERT_LE(placement.moved_bytes, moved) << "round " << round << ", budget " << budget;
          moved = placement.moved_bytes;
        }
        buffering = placement.buffering;
        placed = true;
      } catch (const Error&) {
        ASSERT_FALSE(placed) << "round " << round << ", budget " << budget;
      }
    }
    EXPECT_EQ(moved, 0u) << "all of it fits in the end";
  }
}

constexpr uint64_t kMiB = 1 << 20;

TEST(Placement, ANetworkThatFitsMovesNothing) {
  const Demand demand = network({{4 * kMiB, kMiB}, {2 * kMiB, 2 * kMiB}, {kMiB, 3 * kMiB}});
  const Placement placement = place(demand, {.budget_bytes = 100 * kMiB});
  EXPECT_EQ(placement.moved_bytes, 0u);
  EXPECT_EQ(placement.buffering, Buffering::kDouble);
  for (size_t i = 0; i < demand.accesses.size(); ++i) {
    EXPECT_EQ(placement.accesses[i].in_place, demand.accesses[i].kind == AccessKind::kLocal);
  }
}

// The pool is about twice the peak at most, and single buffers take the peak.
TEST(Placement, BuffersOfANetworkTakeThePeakOrTwiceIt) {
  const Demand demand = network(std::vector<LayerBytes>(10, {kMiB, 2 * kMiB}));
  const uint64_t peak = 4 * kMiB;  // Read, PreUpdate and LocalAccess of one layer
  EXPECT_EQ(least_budget(demand), peak);
  const Placement single = place(demand, {.budget_bytes = 2 * peak - 256});
  EXPECT_EQ(single.buffering, Buffering::kSingle);
  const Placement twice = place(demand, {.budget_bytes = 2 * peak + kMiB, .max_lead = 1});
  EXPECT_EQ(twice.buffering, Buffering::kDouble);
  EXPECT_GE(twice.pool_bytes, 2 * peak);
}

// Where not all phases can have double buffers, those that can do.
TEST(Placement, PrefetchIsShortenedWhereItDoesNotFitOnly) {
  auto layers = std::vector<LayerBytes>(10, {kMiB, kMiB});
  layers[5] = {30 * kMiB, 10 * kMiB};
  const Demand demand = network(layers);
  const Placement placement = place(demand, {.budget_bytes = least_budget(demand) + kMiB});
  EXPECT_EQ(placement.buffering, Buffering::kSingle);
  size_t ahead = 0, all = 0;
  for (size_t i = 0; i < demand.accesses.size(); ++i) {
    if (!fetches(demand.accesses[i])) continue;
    ++all;
    if (placement.accesses[i].lead > 0) ++ahead;
  }
  EXPECT_GT(ahead, all * 7 / 10);
  EXPECT_LT(ahead, all);
}

// Algorithm 2 pins local data of the fullest phase first, since the pool shrinks with it: here
// although it saves less per byte than that of other phases.
TEST(Placement, LocalDataOfThePeakIsPinnedFirst) {
  auto layers = std::vector<LayerBytes>(6, {kMiB, 2 * kMiB});
  layers[3].local = 10 * kMiB;
  Demand demand = network(layers);
  const uint32_t large = 2 * 3 + 1;
  for (Access& access : demand.accesses) {
    if (access.batch == large) access.save = false;
  }
  const std::vector<bool> none(demand.entries.size(), false);
  const uint64_t pool = pool_bytes(demand, none, 1);
  const Placement placement = place(demand, {.budget_bytes = pool + 4 * kMiB});
  EXPECT_EQ(placement.buffering, Buffering::kDouble);
  EXPECT_TRUE(placement.entries[large].pinned) << "10 MiB, for 4 MiB more";
  EXPECT_LE(placement.pool_bytes, pool - 6 * kMiB);
}

// As the listing says: local data of the fullest phase, other local data, parameters.
TEST(PeakFirst, PinsInTheOrderOfTheListing) {
  auto layers = std::vector<LayerBytes>(6, {kMiB, 2 * kMiB});
  layers[4].local = 5 * kMiB;
  const Demand demand = network(layers);
  const std::vector<bool> none(demand.entries.size(), false);
  const uint64_t least = pool_bytes(demand, none, 1);
  const uint64_t most = all_bytes(demand);
  std::vector<bool> seen(demand.entries.size(), false);
  std::vector<uint32_t> order;
  for (uint64_t budget = least; budget < most; budget += kMiB / 4) {
    const Placement placement =
        place(demand, {.budget_bytes = budget, .max_lead = 1, .peak_first = true});
    bool all_local = true;
    for (uint32_t i = 0; i < demand.entries.size(); ++i) {
      const bool pinned = placement.entries[i].pinned;
      if (demand.entries[i].local) all_local = all_local && pinned;
      if (pinned && !seen[i]) order.push_back(i), seen[i] = true;
    }
    for (uint32_t i = 0; i < demand.entries.size(); ++i) {
      EXPECT_TRUE(all_local || demand.entries[i].local || !placement.entries[i].pinned)
          << "parameters before local data, with " << budget;
    }
  }
  ASSERT_EQ(order.size(), demand.entries.size());
  EXPECT_EQ(order.front(), 2u * 4 + 1) << "the fullest layer's";
}

TEST(PeakFirst, TheFullestPhaseIsThatOfWhatIsLeft) {
  auto layers = std::vector<LayerBytes>(6, {kMiB, 2 * kMiB});
  layers[4].local = 5 * kMiB;
  layers[2].local = 4 * kMiB;
  const Demand demand = network(layers);
  const Lifetimes lives = lifetimes(demand, Leads(demand.accesses.size()));
  // Of equal ones that which comes first: backward, layer 5 does.
  EXPECT_THAT(peak_first_order(demand, Costs(demand, lives), lives),
              ::testing::ElementsAre(9, 5, 11, 7, 3, 1, 0, 2, 4, 6, 8, 10));
}

// What the order by bytes saved is for: of the networks that the paper means, it moves no more.
TEST(PeakFirst, MovesNoFewerBytesInAll) {
  std::mt19937 engine(18);
  uint64_t ours = 0, papers = 0;
  int fewer = 0, more = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<LayerBytes> layers(2 + engine() % 8);
    for (LayerBytes& layer : layers) layer = {1 + engine() % 4000, 1 + engine() % 4000};
    const Demand demand = network(layers);
    const uint64_t budget = engine() % all_bytes(demand);
    if (budget < 2 * pool_bytes(demand, std::vector<bool>(demand.entries.size()), 1)) continue;
    const uint64_t here = place(demand, {.budget_bytes = budget, .max_lead = 1}).moved_bytes;
    const uint64_t there =
        place(demand, {.budget_bytes = budget, .max_lead = 1, .peak_first = true}).moved_bytes;
    ours += here, papers += there;
    fewer += here < there ? 1 : 0, more += here > there ? 1 : 0;
  }
  RecordProperty("fewer", fewer);
  RecordProperty("more", more);
  EXPECT_LT(ours, papers);
  EXPECT_GT(fewer, more);
}

TEST(Placement, WhatIsLeftOverServesLongerLeads) {
  const Demand demand = network(std::vector<LayerBytes>(10, {kMiB, kMiB}));
  const Placement placement = place(demand, {.budget_bytes = 200 * kMiB, .max_lead = 3});
  for (size_t i = 0; i < demand.accesses.size(); ++i) {
    const bool waits = !placement.accesses[i].in_place && fetches(demand.accesses[i]);
    EXPECT_EQ(placement.accesses[i].lead, waits ? 3u : 0u);
  }
}

// Of six layers that are used once forward and once backward, those whose two reads are so near
// that the lead of the second begins when the first ends.
TEST(Placement, WhatIsReadAgainSoonIsNotFetchedAgain) {
  Demand demand = network(std::vector<LayerBytes>(6, {4 * kMiB, kMiB}));
  for (uint32_t i = 0; i < demand.accesses.size(); ++i) {
    Access& access = demand.accesses[i];
    for (uint32_t j = 0; j < i; ++j) {
      const Access& before = demand.accesses[j];
      if (before.batch != access.batch || access.kind != before.kind) continue;
      if (access.kind == AccessKind::kRead) access.again = j;
    }
  }
  const std::vector<bool> none(demand.entries.size(), false);
  const Placement placement = place(demand, {.budget_bytes = pool_bytes(demand, none, 2) + 256});
  ASSERT_EQ(placement.buffering, Buffering::kDouble);
  ASSERT_EQ(placement.pinned_bytes, 0u);
  for (size_t i = 0; i < demand.accesses.size(); ++i) {
    const Access& access = demand.accesses[i];
    if (!access.again) continue;
    const uint32_t between = access.first_phase - demand.accesses[*access.again].last_phase - 1;
    EXPECT_EQ(placement.accesses[i].kept, between <= placement.lead)
        << between << " phases, lead " << placement.lead;
  }
  Demand again = demand;
  for (Access& access : again.accesses) access.again.reset();
  const uint64_t all = moved_bytes(again, none, std::vector<bool>(again.accesses.size()));
  EXPECT_LE(placement.moved_bytes, all - 2 * 4 * kMiB);
}

// Where a longer lead for all does not fit.
TEST(Placement, WhatIsLeftOverServesLongerLeadsOfSome) {
  Demand demand{.phases = 8, .entries = {}, .batches = {}, .accesses = {}};
  const auto read = [&](uint64_t bytes, uint32_t phase) {
    const auto number = static_cast<uint32_t>(demand.entries.size());
    demand.entries.push_back({.name = "w", .bytes = bytes});
    demand.batches.push_back({.name = "w", .parts = {{number, 1, bytes}}});
    demand.accesses.push_back(
        {.batch = number, .step = number, .first_phase = phase, .last_phase = phase});
  };
  read(3 * kMiB, 1);
  read(3 * kMiB, 3);
  read(kMiB, 6);
  const Placement placement = place(demand, {.budget_bytes = 4 * kMiB, .max_lead = 4});
  ASSERT_NO_FATAL_FAILURE(expect_sound(demand, {.budget_bytes = 4 * kMiB}, placement));
  EXPECT_EQ(placement.lead, 1u);
  EXPECT_EQ(placement.accesses[0].lead, 4u);
  EXPECT_EQ(placement.accesses[1].lead, 1u) << "the first is in its way";
  EXPECT_EQ(placement.accesses[2].lead, 4u);
}

// A lead cannot be longer than the circle, whatever is allowed.
TEST(Placement, ALeadEndsWithTheCircle) {
  const Demand demand = network(std::vector<LayerBytes>(3, {kMiB, kMiB}));
  for (const uint64_t mib : {8, 12, 100}) {
    const auto with = [&](uint32_t max_lead) {
      return place(demand, {.budget_bytes = mib * kMiB, .max_lead = max_lead});
    };
    const Placement longest = with(demand.phases), any = with(UINT32_MAX);
    EXPECT_EQ(any.lead, longest.lead);
    for (size_t i = 0; i < demand.accesses.size(); ++i) {
      EXPECT_EQ(any.accesses[i].offset, longest.accesses[i].offset);
      EXPECT_EQ(any.accesses[i].lead, longest.accesses[i].lead);
    }
  }
}

// A buffer that is emptied after its use keeps its memory for longer where there is some.
TEST(Placement, WhatIsLeftOverServesCopiesToTheHost) {
  Demand demand{.phases = 8, .entries = {}, .batches = {}, .accesses = {}};
  for (uint32_t i = 0; i < 2; ++i) {
    demand.entries.push_back({.name = "w", .bytes = kMiB, .log_bytes = kMiB});
    demand.batches.push_back({.name = "w", .parts = {{i, 1, kMiB}}});
    demand.accesses.push_back({.kind = AccessKind::kUpdate,
                               .batch = i,
                               .step = i,
                               .first_phase = 3 * i,
                               .last_phase = 3 * i});
  }
  // The second comes three phases after the first.
  const Placement tight = place(demand, {.budget_bytes = kMiB + 256});
  EXPECT_EQ(tight.accesses[0].offset, tight.accesses[1].offset);
  const Placement roomy = place(demand, {.budget_bytes = 2 * kMiB + 256});
  EXPECT_NE(roomy.accesses[0].offset, roomy.accesses[1].offset);
}

TEST(Placement, ABudgetThatIsTooSmallNamesTheStep) {
  auto layers = std::vector<LayerBytes>(4, {1000, 1000});
  layers[2] = {5000, 7000};
  const Demand demand = network(layers);
  // Read and PreUpdate of 5120 each, and what is cheaper: the local data pinned or in a buffer.
  EXPECT_THAT(
      phub::testing::error_of(
          ErrorCode::kFull, [&] { place(demand, {.budget_bytes = 4096, .reserved_bytes = 512}); }),
      ::testing::AllOf(HasSubstr("budget of 4096 bytes is too small: at least 17920 are needed"),
                       HasSubstr("LocalAccess of 'local 2' (7168 bytes)")));
  EXPECT_THROW(place(demand, {.budget_bytes = 100, .reserved_bytes = 512}), Error);
}

TEST(Placement, ADemandThatContradictsItselfIsRefused) {
  const auto refused = [](const std::function<void(Demand&)>& spoil) {
    Demand demand = network({{1000, 1000}, {1000, 1000}});
    spoil(demand);
    try {
      place(demand, {.budget_bytes = 1 << 20});
    } catch (const Error& e) {
      return e.code() == ErrorCode::kInvalid;
    }
    return false;
  };
  EXPECT_TRUE(refused([](Demand& d) { d.phases = 0; }));
  EXPECT_TRUE(refused([](Demand& d) { d.accesses[0].first_phase = d.phases; }));
  EXPECT_TRUE(refused([](Demand& d) { d.accesses[0].batch = 100; }));
  EXPECT_TRUE(refused([](Demand& d) { d.accesses[0].kind = AccessKind::kLocal; }));
  EXPECT_TRUE(refused([](Demand& d) { d.batches[0].parts[0].entry = 100; }));
  EXPECT_TRUE(refused([](Demand& d) { d.batches[0].parts[0].bytes = 1; }));
  EXPECT_TRUE(refused([](Demand& d) { d.batches[0].in_place = true; }));
  // Forward reads of both layers are accesses 0 and 2, the backward ones 4 and 7.
  EXPECT_FALSE(refused([](Demand& d) { d.accesses[4].again = 2; }));
  EXPECT_TRUE(refused([](Demand& d) { d.accesses[4].again = 4; }));
  EXPECT_TRUE(refused([](Demand& d) { d.accesses[4].again = 0; }));
  EXPECT_TRUE(refused([](Demand& d) { d.accesses[5].again = 2; }));
  EXPECT_TRUE(refused([](Demand& d) {
    d.accesses[4].again = 2;
    d.accesses[2].last_phase = 2;
  }));
  EXPECT_TRUE(refused([](Demand& d) {
    d.accesses[4].again = 2;
    d.accesses[7].batch = d.accesses[2].batch;
    d.accesses[7].again = 2;
  }));
}

TEST(Placement, NothingNeedsNothing) {
  EXPECT_EQ(least_budget({}), 0u);
  EXPECT_EQ(place({}, {.budget_bytes = 0}).total_bytes(), 0u);
}

}  // namespace placement_test
}  // namespace phub::geeps
