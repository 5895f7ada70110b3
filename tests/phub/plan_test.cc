#include "phub/plan/plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "numa/topology.h"
#include "phub/job/memory.h"
#include "phub/plan/models.h"
#include "tests/worker/expect_error.h"
#include "transport/slot_window.h"
#include "transport/tcp/format.h"

namespace phub {
namespace plan_test {

using ::testing::HasSubstr;

struct Shape {
  uint32_t cores = 0, nics = 0;
};

// Nodes with cores and NICs as given; os numbers differ from indices on purpose.
numa::Topology make_topology(const std::vector<Shape>& shapes) {
  numa::Topology topology;
  topology.source = "test";
  for (uint32_t n = 0; n < shapes.size(); n++) {
    topology.nodes.push_back({.os_node = n + 2, .memory_bytes = 1ull << 30});
    for (uint32_t c = 0; c < shapes[n].cores; c++) {
      topology.cores.push_back({n, static_cast<uint32_t>(2 * topology.cores.size() + 1)});
    }
    for (uint32_t i = 0; i < shapes[n].nics; i++) {
      topology.nics.push_back({n, fmt::format("n{}", topology.nics.size())});
    }
  }
  return topology;
}

std::vector<KeySpec> make_keys(const std::vector<uint64_t>& elements) {
  std::vector<KeySpec> keys;
  for (uint64_t n : elements) {
    keys.push_back({.name = fmt::format("k{}", keys.size()), .elements = n});
  }
  return keys;
}

const std::vector<Shape> kPBox = {{14, 5}, {14, 5}};

uint64_t fingerprint(const Plan& plan) {
  uint64_t hash = 14695981039346656037ull;
  const auto mix = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  for (const ChunkLayout& c : plan.chunks) {
    for (uint64_t v : {uint64_t{c.key}, uint64_t{c.elements}, c.key_element, c.offset,
                       uint64_t{c.queue}, uint64_t{c.index}}) {
      mix(v);
    }
  }
  for (const QueuePlan& q : plan.queues) mix(q.core), mix(q.nic);
  for (const CorePlan& c : plan.cores) mix(c.os_cpu), mix(c.elements);
  for (uint64_t offset : plan.key_offset) mix(offset);
  return hash;
}

std::string message_of(const numa::Topology& topology, const std::vector<KeySpec>& keys,
                       const PlanOptions& options) {
  return testing::error_of(ErrorCode::kInvalid, [&] { make_plan(topology, keys, options); });
}

// Every element is in exactly one chunk, in place; chunks are as large as they can be.
void check_chunks(const Plan& plan, const std::vector<KeySpec>& keys, uint32_t chunk_elements) {
  size_t c = 0;
  uint64_t end = 0;
  ASSERT_EQ(plan.key_offset.size(), keys.size());
  for (uint32_t k = 0; k < keys.size(); k++) {
    ASSERT_EQ(plan.key_offset[k] % kChunkAlignment, 0u);
    ASSERT_GE(plan.key_offset[k], end);
    for (uint64_t at = 0; at < keys[k].elements; c++) {
      ASSERT_LT(c, plan.chunks.size());
      const ChunkLayout& chunk = plan.chunks[c];
      ASSERT_EQ(chunk.key, k);
      ASSERT_EQ(chunk.key_element, at);
      ASSERT_EQ(chunk.offset, plan.key_offset[k] + at);
      ASSERT_EQ(chunk.elements, std::min<uint64_t>(chunk_elements, keys[k].elements - at));
      at += chunk.elements;
    }
    end = plan.key_offset[k] + keys[k].elements;
  }
  ASSERT_EQ(c, plan.chunks.size());
  ASSERT_GE(plan.total_elements, end);
  ASSERT_LT(plan.total_elements, end + kChunkAlignment);
}

// Chunk, queue, core and NIC point at each other and lie on one node.
void check_places(const Plan& plan, const numa::Topology& topology) {
  std::set<std::pair<uint32_t, uint32_t>> cpus, pairs;
  std::set<std::string> names;
  for (const auto& core : topology.cores) cpus.insert({core.node, core.os_cpu});
  for (const CorePlan& core : plan.cores) {
    ASSERT_EQ(cpus.erase({core.node, core.os_cpu}), 1u) << "a core that is not there, or twice";
    ASSERT_EQ(core.os_node, topology.nodes[core.node].os_node);
    ASSERT_FALSE(core.queues.empty());
  }
  for (const NicPlan& nic : plan.nics) {
    ASSERT_TRUE(names.insert(nic.name).second);
    const auto same = [&](const numa::NicInfo& n) {
      return n.name == nic.name && n.node == nic.node;
    };
    ASSERT_TRUE(topology.nics.empty() ||
                std::any_of(topology.nics.begin(), topology.nics.end(), same));
  }
  std::vector<uint64_t> core_elements(plan.cores.size()), nic_elements(plan.nics.size());
  size_t chunks = 0;
  for (uint32_t q = 0; q < plan.queues.size(); q++) {
    const QueuePlan& queue = plan.queues[q];
    ASSERT_TRUE(pairs.insert({queue.core, queue.nic}).second);
    ASSERT_EQ(plan.cores.at(queue.core).node, plan.nics.at(queue.nic).node);
    const std::vector<uint32_t>& own = plan.cores[queue.core].queues;
    ASSERT_EQ(std::count(own.begin(), own.end(), q), 1);
    const std::vector<uint32_t>& of_queue = plan.queue_chunks.at(q);
    ASSERT_TRUE(std::is_sorted(of_queue.begin(), of_queue.end()));
    for (uint32_t i = 0; i < of_queue.size(); i++) {
      const ChunkLayout& chunk = plan.chunks.at(of_queue[i]);
      ASSERT_EQ(chunk.queue, q);
      ASSERT_EQ(chunk.index, i);
      core_elements[queue.core] += chunk.elements;
      nic_elements[queue.nic] += chunk.elements;
    }
    chunks += of_queue.size();
  }
  ASSERT_EQ(chunks, plan.chunks.size());
  for (size_t c = 0; c < plan.cores.size(); c++)
    ASSERT_EQ(plan.cores[c].elements, core_elements[c]);
  for (size_t n = 0; n < plan.nics.size(); n++) ASSERT_EQ(plan.nics[n].elements, nic_elements[n]);
}

// What the plan uses, node by node.
std::vector<Shape> used_shapes(const Plan& plan, size_t nodes) {
  std::vector<Shape> used(nodes);
  for (const CorePlan& core : plan.cores) used[core.node].cores++;
  for (const NicPlan& nic : plan.nics) used[nic.node].nics++;
  return used;
}

// No division of the bytes over nodes makes the worst part smaller than this: node n with the
// fraction t of the bytes has cores loaded t·C/C_n and NICs loaded t·N/N_n times their means.
double best_possible(const std::vector<Shape>& used, bool real_nics) {
  double cores = 0, nics = 0, sum = 0;
  for (const Shape& s : used) cores += s.cores, nics += s.nics;
  for (const Shape& s : used) {
    sum += real_nics ? std::min(s.cores / cores, s.nics / nics) : s.cores / cores;
  }
  return 1 / sum;
}

template <typename Part>
double mean_elements(const std::vector<Part>& parts) {
  double sum = 0;
  for (const Part& part : parts) sum += static_cast<double>(part.elements);
  return sum / static_cast<double>(parts.size());
}

void check_balance(const Plan& plan, const numa::Topology& topology, uint32_t chunk_elements) {
  const bool real_nics = !topology.nics.empty();
  const std::vector<Shape> used = used_shapes(plan, topology.nodes.size());
  const double best = best_possible(used, real_nics);
  // A part can be a chunk or two off; with 100 chunks each that is within 2%.
  const double core_chunks = mean_elements(plan.cores) / chunk_elements;
  const double nic_chunks = mean_elements(plan.nics) / chunk_elements;
  const double allowed = best * std::max(1.02, 1 + 2.1 / std::min(core_chunks, nic_chunks));
  EXPECT_LE(core_imbalance(plan), allowed) << core_chunks << " chunks per core";
  if (real_nics) {
    EXPECT_LE(nic_imbalance(plan), allowed) << nic_chunks << " chunks per NIC";
  }

  // Within a node, cores differ by at most one chunk; the queues are as few as balance needs.
  for (uint32_t n = 0; n < used.size(); n++) {
    uint64_t least = UINT64_MAX, most = 0;
    size_t queues = 0;
    for (const CorePlan& core : plan.cores) {
      if (core.node != n) continue;
      least = std::min(least, core.elements), most = std::max(most, core.elements);
      queues += core.queues.size();
    }
    if (used[n].cores == 0) continue;
    EXPECT_LE(most - least, chunk_elements);
    EXPECT_EQ(queues, used[n].cores + used[n].nics - std::gcd(used[n].cores, used[n].nics));
  }
}

void check_everything(const Plan& plan, const numa::Topology& topology,
                      const std::vector<KeySpec>& keys, uint32_t chunk_elements) {
  check_chunks(plan, keys, chunk_elements);
  if (::testing::Test::HasFatalFailure()) return;
  check_places(plan, topology);
  if (::testing::Test::HasFatalFailure()) return;
  check_balance(plan, topology, chunk_elements);
  const JobLayout layout = routes_of(plan);
  EXPECT_EQ(layout.key_offset, plan.key_offset);
  EXPECT_EQ(layout.total_elements, plan.total_elements);
  ASSERT_EQ(layout.queue_chunks.size(), plan.queues.size());
  for (size_t q = 0; q < plan.queues.size(); q++) {
    EXPECT_EQ(layout.queue_chunks[q], plan.queue_chunks[q]);
  }
}

// Cores that a plan may use: on nodes with a NIC if there is any.
uint32_t usable_cores(const std::vector<Shape>& shapes) {
  const bool any_nic =
      std::any_of(shapes.begin(), shapes.end(), [](Shape s) { return s.nics > 0; });
  uint32_t usable = 0;
  for (const Shape& s : shapes) usable += !any_nic || s.nics > 0 ? s.cores : 0;
  return usable;
}

TEST(Plan, HoldsOnRandomTopologiesAndKeyTables) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](uint64_t from, uint64_t to) {
    return std::uniform_int_distribution<uint64_t>(from, to)(random);
  };
  int planned = 0;
  for (int i = 0; i < 1500; i++) {
    std::vector<Shape> shapes(pick(1, 5));
    const bool nics = pick(0, 3) > 0, equal = pick(0, 1) == 0;
    for (Shape& s : shapes) {
      s = {static_cast<uint32_t>(pick(0, 16)), static_cast<uint32_t>(nics ? pick(0, 10) : 0)};
      if (equal) s = shapes.front();
    }
    std::vector<uint64_t> elements(pick(1, 60));
    const uint32_t chunk = 32u << pick(0, 6);
    for (uint64_t& n : elements) n = pick(1, uint64_t{chunk} << pick(0, 8));
    const numa::Topology topology = make_topology(shapes);
    const std::vector<KeySpec> keys = make_keys(elements);
    PlanOptions options{.ranks = static_cast<uint32_t>(pick(1, 64)), .chunk_elements = chunk};

    const uint32_t usable = usable_cores(shapes);
    if (usable == 0) {
      EXPECT_NE(message_of(topology, keys, options), "");
      continue;
    }
    options.cores = pick(0, 1) == 0 ? 0 : static_cast<uint32_t>(pick(1, usable));
    const Plan plan = make_plan(topology, keys, options);
    ASSERT_EQ(plan.cores.size(), options.cores == 0 ? usable : options.cores);
    check_everything(plan, topology, keys, chunk);
    ASSERT_FALSE(HasFailure()) << "topology " << i;
    ASSERT_EQ(fingerprint(plan), fingerprint(make_plan(topology, keys, options)));
    planned++;
  }
  EXPECT_GT(planned, 1100);
}

// The parts of all boxes are the plan, and the memory of each begins at 0 and is its own.
TEST(Plan, IsDividedIntoThePartsOfItsBoxes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](uint64_t from, uint64_t to) {
    return std::uniform_int_distribution<uint64_t>(from, to)(random);
  };
  for (int i = 0; i < 500; i++) {
    const bool nics = pick(0, 1) == 0;
    std::vector<Shape> shapes(pick(2, 6));
    for (Shape& s : shapes) {
      s = {static_cast<uint32_t>(pick(1, 6)), static_cast<uint32_t>(nics ? pick(1, 4) : 0)};
    }
    numa::Topology topology = make_topology(shapes);
    uint32_t boxes = 1;
    for (size_t n = 1; n < topology.nodes.size(); ++n) {
      if (pick(0, 1) == 0) ++boxes;
      topology.nodes[n].box = boxes - 1;
    }
    const Plan plan =
        make_plan(topology, make_keys({pick(1, 1u << 20), pick(1, 5000), pick(1, 99)}),
                  {.chunk_elements = 1024, .shared_memory = false});
    ASSERT_EQ(boxes_of(plan), boxes);
    std::vector<bool> seen(plan.chunks.size());
    size_t queues = 0, cores = 0, parts_nics = 0;
    for (uint32_t box = 0; box < boxes; ++box) {
      const Plan part = part_of(plan, box);
      ASSERT_EQ(queues, first_queue_of(plan, box));
      ASSERT_EQ(cores, first_core_of(plan, box));
      std::vector<std::pair<uint64_t, uint64_t>> used;
      for (uint32_t q = 0; q < part.queues.size(); ++q) {
        const QueuePlan& whole = plan.queues[queues + q];
        const CorePlan& core = part.cores[part.queues[q].core];
        ASSERT_EQ(core.box, box);
        ASSERT_EQ(core.os_cpu, plan.cores[whole.core].os_cpu);
        ASSERT_EQ(part.nics[part.queues[q].nic].name, plan.nics[whole.nic].name);
        ASSERT_EQ(part.queue_chunks[q], plan.queue_chunks[queues + q]);
        ASSERT_EQ(part.queue_offset[q], plan.queue_offset[queues + q]);
        for (uint32_t index = 0; index < part.queue_chunks[q].size(); ++index) {
          const uint32_t id = part.queue_chunks[q][index];
          const ChunkLayout& chunk = part.chunks[id];
          ASSERT_FALSE(seen[id]);
          seen[id] = true;
          ASSERT_EQ(chunk.queue, q);
          ASSERT_EQ(chunk.index, index);
          ASSERT_EQ(chunk.box_offset, plan.chunks[id].box_offset);
          ASSERT_LE(chunk.box_offset + chunk.elements, part.box_elements);
          used.emplace_back(chunk.box_offset, chunk.box_offset + chunk.elements);
        }
      }
      std::ranges::sort(used);
      for (size_t k = 1; k < used.size(); ++k) ASSERT_LE(used[k - 1].second, used[k].first);
      ASSERT_EQ(part.queue_offset.front(), 0u);
      queues += part.queues.size(), cores += part.cores.size(), parts_nics += part.nics.size();
    }
    ASSERT_EQ(queues, plan.queues.size());
    ASSERT_EQ(cores, plan.cores.size());
    ASSERT_EQ(parts_nics, plan.nics.size());
    ASSERT_TRUE(std::ranges::all_of(seen, std::identity()));
  }
}

TEST(Plan, PBoxIsBalanced) {
  const numa::Topology topology = make_topology(kPBox);
  for (std::string_view name : model_names()) {
    const KeyTable table = model(name);
    const Plan plan = make_plan(topology, table.keys, {.ranks = 8});
    check_everything(plan, topology, table.keys, 8192);
    EXPECT_EQ(plan.cores.size(), 28u);
    EXPECT_EQ(plan.nics.size(), 10u);
    EXPECT_EQ(plan.queues.size(), 36u) << "14 + 5 - 1 on each node";
    EXPECT_LE(core_imbalance(plan), 1.02) << name;
    EXPECT_LE(nic_imbalance(plan), 1.02) << name;
  }
}

// Guards against plans that depend on the compiler, the standard library or the order of a hash.
TEST(Plan, IsTheSameEverywhere) {
  KeyTable table = model("resnet50");
  const numa::Topology topology = make_topology(kPBox);
  const uint64_t expected = fingerprint(make_plan(topology, table.keys, {}));
  EXPECT_EQ(expected, 7069304045401997964ull);
  for (KeySpec& key : table.keys) key.name = "renamed " + key.name;
  EXPECT_EQ(fingerprint(make_plan(topology, table.keys, {.ranks = 64})), expected);
}

TEST(Plan, WithoutNicsThereIsOneQueuePerCore) {
  const std::vector<KeySpec> keys = make_keys({100000, 3, 70000});
  const Plan plan =
      make_plan(make_topology({{3, 0}, {0, 0}, {2, 0}}), keys, {.chunk_elements = 64});
  ASSERT_EQ(plan.queues.size(), 5u);
  for (uint32_t q = 0; q < 5; q++) EXPECT_EQ(plan.queues[q].core, q);
  ASSERT_EQ(plan.nics.size(), 2u);
  EXPECT_EQ(plan.nics[0].name, "mem2");
  EXPECT_EQ(plan.nics[1].name, "mem4");
  EXPECT_LE(core_imbalance(plan), 1.02) << "pseudo-NICs limit nothing";
}

TEST(Plan, NodesThatLackANicOrACoreAreLeftOut) {
  const std::vector<KeySpec> keys = make_keys({100000});
  const Plan plan = make_plan(make_topology({{4, 0}, {2, 2}, {0, 3}}), keys, {});
  EXPECT_EQ(plan.cores.size(), 2u);
  for (const CorePlan& core : plan.cores) EXPECT_EQ(core.node, 1u);
  EXPECT_EQ(plan.nics.size(), 2u);
}

TEST(Plan, CoresFollowTheNics) {
  const std::vector<KeySpec> keys = make_keys({100000});
  const auto cores_used = [&](const std::vector<Shape>& shapes, uint32_t cores) {
    std::vector<uint32_t> used;
    const Plan plan = make_plan(make_topology(shapes), keys, {.cores = cores});
    for (const Shape& s : used_shapes(plan, shapes.size())) used.push_back(s.cores);
    return used;
  };
  EXPECT_EQ(cores_used(kPBox, 10), (std::vector<uint32_t>{5, 5}));
  EXPECT_EQ(cores_used({{8, 3}, {8, 1}}, 8), (std::vector<uint32_t>{6, 2}));
  EXPECT_EQ(cores_used({{8, 3}, {8, 1}}, 2), (std::vector<uint32_t>{1, 1})) << "all NICs are used";
  EXPECT_EQ(cores_used({{8, 1}, {8, 3}}, 1), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(cores_used({{2, 3}, {8, 1}}, 8), (std::vector<uint32_t>{2, 6}))
      << "no more than there are";
}

// A job that may not have all cores: those that its owner has, else those with the least to do.
TEST(Plan, FewCoresAreThePreferredThenTheLeastLoaded) {
  const std::vector<KeySpec> keys = make_keys({100000});
  const numa::Topology topology = make_topology({{4, 1}, {4, 1}});  // CPUs 1, 3, 5, … 15
  const auto cpus = [&](PlanOptions options) {
    std::set<uint32_t> used;
    const Plan plan = make_plan(topology, keys, options);
    for (const CorePlan& core : plan.cores) used.insert(core.os_cpu);
    return used;
  };
  const std::vector<PlanLoad> load = {
      {0, 1, "n0", 10}, {0, 3, "n0", 20}, {0, 5, "n0", 5}, {0, 9, "n1", 1}, {1, 7, "n0", 99}};
  using Cpus = std::set<uint32_t>;
  EXPECT_EQ(cpus({.most_cores = 1}), (Cpus{1}));
  EXPECT_EQ(cpus({.most_cores = 1, .load = load}), (Cpus{7}));
  EXPECT_EQ(cpus({.most_cores = 2, .load = load}), (Cpus{7, 11})) << "one for each NIC";
  EXPECT_EQ(cpus({.most_cores = 6, .load = load}), (Cpus{1, 5, 7, 11, 13, 15}));
  EXPECT_EQ(cpus({.most_cores = 2, .preferred_cpus = {3, 9, 1}, .load = load}), (Cpus{1, 9}));
  EXPECT_EQ(cpus({.most_cores = 3, .preferred_cpus = {3, 1}, .load = load}), (Cpus{1, 3, 11}));
  EXPECT_EQ(cpus({.cores = 2, .most_cores = 5}).size(), 2u);
  EXPECT_EQ(cpus({.most_cores = 100}).size(), 8u);
  EXPECT_THAT(message_of(topology, keys, {.most_cores = 0}), ::testing::HasSubstr("needs a core"));
}

// A key is the unit of overlap: its chunks must be able to use the whole box at once.
TEST(Plan, EveryLargeKeyIsSpreadOverAllCores) {
  const std::vector<KeySpec> keys = make_keys(std::vector<uint64_t>(20, 28 * 64));
  const Plan plan = make_plan(make_topology(kPBox), keys, {.chunk_elements = 64});
  for (uint32_t k = 0; k < keys.size(); k++) {
    std::set<uint32_t> cores;
    for (const ChunkLayout& chunk : plan.chunks) {
      if (chunk.key == k) cores.insert(plan.queues[chunk.queue].core);
    }
    EXPECT_EQ(cores.size(), 28u) << "key " << k;
  }
}

// As the queues of a parent: each is of one core, and the cores have equal parts.
TEST(Plan, TheChunksOfAUnitGoToOneCore) {
  const numa::Topology topology = make_topology({{3, 2}, {2, 1}});
  const std::vector<KeySpec> keys = make_keys({500'000, 90'000, 7, 300'000, 1});
  const Plan alone = make_plan(topology, keys, {.shared_memory = false});
  PlanOptions options{.shared_memory = false};
  for (size_t chunk = 0; chunk < alone.chunks.size(); ++chunk) {
    options.units.push_back(static_cast<uint32_t>(chunk * 7919 % 20));
  }
  const Plan plan = make_plan(topology, keys, options);
  std::map<uint32_t, std::set<uint32_t>> cores_of_unit;
  for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    cores_of_unit[options.units[chunk]].insert(plan.queues[plan.chunks[chunk].queue].core);
  }
  ASSERT_EQ(cores_of_unit.size(), 20u);
  for (const auto& [unit, cores] : cores_of_unit) EXPECT_EQ(cores.size(), 1u) << unit;
  for (const CorePlan& core : plan.cores) EXPECT_GT(core.elements, 0u);
}

TEST(Plan, BadInputIsNamed) {
  const numa::Topology box = make_topology(kPBox);
  const std::vector<KeySpec> keys = make_keys({10, 20});
  EXPECT_THAT(message_of(box, {}, {}), HasSubstr("no keys"));
  EXPECT_THAT(message_of(box, make_keys({5, 0}), {}), HasSubstr("key 1 'k1' has no elements"));
  EXPECT_THAT(message_of(box, make_keys({5, kMaxElements}), {}), HasSubstr("'k1'"));
  EXPECT_THAT(message_of(box, make_keys({UINT64_MAX, UINT64_MAX}), {}), HasSubstr("'k0'"));
  EXPECT_THAT(message_of(box, keys, {.cores = 29}), HasSubstr("29 cores asked for"));
  EXPECT_THAT(message_of(make_topology({{4, 1}, {4, 0}}), keys, {.cores = 5}),
              HasSubstr("has 4 that can be used (the others are on NUMA nodes without a NIC)"));
  EXPECT_THAT(message_of(box, keys, {.ranks = 0}), HasSubstr("0 ranks"));
  EXPECT_THAT(message_of(box, keys, {.ranks = 1025}), HasSubstr("1025 ranks"));
  EXPECT_THAT(message_of(box, keys, {.chunk_elements = 0}), HasSubstr("chunk_elements is 0"));
  EXPECT_THAT(message_of(box, keys, {.chunk_elements = 48}), HasSubstr("multiple of 32"));
  EXPECT_THAT(message_of(make_topology({}), keys, {}), HasSubstr("no NUMA nodes"));
  EXPECT_THAT(message_of(make_topology({{0, 0}}), keys, {}), HasSubstr("no cores"));
  EXPECT_THAT(message_of(make_topology({{4, 0}, {0, 2}}), keys, {}),
              HasSubstr("no NUMA node of test has both"));
}

TEST(Plan, AQueueHoldsWhatTheImmediateCanName) {
  const numa::Topology topology = make_topology({{1, 1}});
  const uint64_t most = uint64_t{kMaxChunksPerQueue} * 32;
  const Plan plan = make_plan(topology, make_keys({most}), {.chunk_elements = 32});
  EXPECT_EQ(plan.chunks.back().index, kMaxChunksPerQueue - 1);
  EXPECT_THAT(message_of(topology, make_keys({most + 1}), {.chunk_elements = 32}),
              HasSubstr("use larger chunks or more cores"));
  // Refused before anything is allocated.
  EXPECT_THAT(message_of(make_topology(kPBox), make_keys({kMaxElements}), {.chunk_elements = 32}),
              HasSubstr("34359738368 chunks"));
}

// Many ranks of small keys: what waits to be sent is most of what such a job holds.
TEST(Plan, MemoryCountsTheRingsOfEveryRank) {
  JobSpec spec;
  spec.keys = make_keys({3000, 70});
  spec.max_ranks = 1000;
  spec.chunk_elements = 32;
  const Plan plan = make_plan(make_topology({{2, 1}, {2, 1}}), spec.keys,
                              {.ranks = 1000, .chunk_elements = 32, .shared_memory = false});
  uint64_t rings = 0, counted = 0;
  for (const auto& chunks : plan.queue_chunks) {
    rings += 1000 * tcp_ring_entries(static_cast<uint32_t>(chunks.size())) * sizeof(Write);
  }
  for (const NodeMemory& node : memory_needed(plan, spec)) counted += node.bookkeeping;
  EXPECT_GT(rings, 1'000'000u);
  EXPECT_GE(counted, rings);
  EXPECT_LT(counted, 2 * rings);
}

// The window is dealt out to the cores as the slots are.
TEST(Plan, WindowsTakeThePlaceOfSlots) {
  JobSpec spec;
  spec.keys = make_keys({100'000, 30'000, 7});
  spec.max_ranks = 5;
  const auto plan_with = [&](uint64_t window) {
    return make_plan(
        make_topology({{2, 1}, {2, 1}}), spec.keys,
        {.ranks = 5, .chunk_elements = 1024, .shared_memory = false, .slot_window = window});
  };
  const auto slots_of = [&](const Plan& plan) {
    uint64_t slots = 0;
    for (const NodeMemory& node : memory_needed(plan, spec)) slots += node.slots;
    return slots;
  };
  const Plan whole = plan_with(0);
  EXPECT_EQ(slots_of(plan_with(whole.slots_bytes)), slots_of(whole)) << "slots are no larger";
  const Plan windowed = plan_with(100'000);
  const uint64_t place = SlotWindow::place_bytes(4096);
  uint64_t places = 0;
  for (const CorePlan& core : windowed.cores) {
    const WindowPlaces of_core = window_places(windowed, core);
    EXPECT_EQ(of_core.place_bytes, place);
    EXPECT_GE(of_core.places, 1u);
    places += of_core.places;
  }
  EXPECT_EQ(slots_of(windowed), 5 * places * place);
  EXPECT_LE(places * place, 100'000u);
  EXPECT_GT(places * place, 100'000u - windowed.cores.size() * place);
  const Plan least = plan_with(1);  // there is always a place
  for (const CorePlan& core : least.cores) EXPECT_EQ(window_places(least, core).places, 1u);
}

// Where chunks share slots, a rank's take no more than the window; each queue has one at least, and
// a window in which all fit changes nothing.
TEST(Plan, SlotsAreSharedWhereTheyExceedTheWindow) {
  JobSpec spec;
  spec.keys = make_keys({100'000, 30'000, 7});
  spec.max_ranks = 5;
  const auto plan_with = [&](uint64_t window) {
    return make_plan(make_topology({{2, 1}, {2, 1}}), spec.keys,
                     {.ranks = 5,
                      .chunk_elements = 1024,
                      .shared_memory = false,
                      .slot_window = window,
                      .shares_slots = true});
  };
  const auto slots_of = [&](const Plan& plan) { return total_memory(plan, spec).slots; };
  const Plan whole = plan_with(0);
  EXPECT_FALSE(whole.shares_slots());
  EXPECT_FALSE(plan_with(whole.slots_bytes).shares_slots());
  const Plan shared = plan_with(100'000);
  ASSERT_EQ(shared.queue_shares.size(), shared.queues.size());
  EXPECT_EQ(shared.slot_window, 0u) << "the box chooses no places";
  uint64_t slots = 0;
  for (const uint32_t of_queue : shared.queue_shares) slots += of_queue;
  EXPECT_EQ(slots_of(shared), 5 * slots * 4096);
  EXPECT_LE(slots * 4096, 100'000u);
  EXPECT_GT(slots * 4096, 100'000u - shared.queues.size() * 4096);
  EXPECT_LT(shared.slots_bytes, 100'000u + 3 * 4096u) << "with what is between nodes";
  for (const uint32_t of_queue : plan_with(1).queue_shares) EXPECT_EQ(of_queue, 1u);
}

// bench/control_bench says how long that takes.
TEST(Plan, HoldsForAHundredThousandChunks) {
  constexpr uint32_t kChunk = 8192;
  std::vector<uint64_t> elements;
  for (uint64_t k = 0; k < 10'000; k++) elements.push_back(9 * kChunk + 1 + k * 37 % kChunk);
  const std::vector<KeySpec> keys = make_keys(elements);
  const std::vector<Shape> large(8, Shape{64, 2});
  for (const std::vector<Shape>& shapes : {kPBox, large}) {
    const numa::Topology topology = make_topology(shapes);
    const Plan plan = make_plan(topology, keys, {.ranks = 8, .chunk_elements = kChunk});
    EXPECT_EQ(plan.chunks.size(), 100'000u);
    check_everything(plan, topology, keys, kChunk);
  }
}

// Of random keys, with ranges that end anywhere: the ranks that exchange each element.
std::vector<std::vector<uint64_t>> exchange_some(std::vector<KeySpec>& keys, uint32_t ranks,
                                                 std::mt19937_64& random) {
  std::vector<std::vector<uint64_t>> by_element;
  for (KeySpec& key : keys) {
    auto& of_key = by_element.emplace_back();
    while (of_key.size() < key.elements) {
      const uint64_t length = std::min<uint64_t>(1 + random() % 2000, key.elements - of_key.size());
      const uint64_t all = (uint64_t{1} << ranks) - 1, by = std::max<uint64_t>(random() & all, 1);
      of_key.insert(of_key.end(), length, by);
      key.exchanged_by.push_back({.end = of_key.size(), .ranks = {by}});
    }
    if (random() % 4 > 0) continue;  // of this one nothing is known
    key.exchanged_by.clear();
    std::ranges::fill(of_key, (uint64_t{1} << ranks) - 1);
  }
  return by_element;
}

// Boxes, and their cores, have as much as travels, within the largest chunk. By bytes alone they
// have not.
TEST(Plan, BoxesShareWhatRanksExchange) {
  constexpr uint32_t kChunk = 256, kRanks = 10;
  std::mt19937_64 random(5);
  uint64_t by_exchange = 0, by_bytes = 0;  // how far apart boxes are, in all
  for (int turn = 0; turn < 100; ++turn) {
    numa::Topology topology = make_topology({{2, 1}, {2, 1}, {2, 1}});
    for (uint32_t n = 0; n < 3; ++n) topology.nodes[n].box = n;
    std::vector<KeySpec> keys = make_keys({1 + random() % 50'000, 1 + random() % 3000, 40'000});
    const auto by_element = exchange_some(keys, kRanks, random);
    const auto loads = [&](const Plan& plan) {
      std::pair<std::map<uint32_t, uint64_t>, std::map<uint32_t, uint64_t>> of;  // boxes, cores
      for (const ChunkLayout& chunk : plan.chunks) {
        const auto first =
            by_element[chunk.key].begin() + static_cast<ptrdiff_t>(chunk.key_element);
        const uint64_t ranks =
            std::reduce(first, first + chunk.elements, uint64_t{0}, std::bit_or<>());
        const uint64_t bytes =
            uint64_t{4} * chunk.elements * static_cast<uint64_t>(std::popcount(ranks));
        const uint32_t core = plan.queues[chunk.queue].core;
        of.first[plan.cores[core].box] += bytes;
        of.second[core] += bytes;
      }
      return of;
    };
    const auto spread = [](const std::map<uint32_t, uint64_t>& of) {
      uint64_t least = ~uint64_t{0}, most = 0;
      for (const auto& [which, bytes] : of)
        least = std::min(least, bytes), most = std::max(most, bytes);
      return most - least;
    };
    const PlanOptions options{.ranks = kRanks, .chunk_elements = kChunk, .shared_memory = false};
    const Plan plan = make_plan(topology, keys, options);
    constexpr uint64_t kLargest = uint64_t{4} * kChunk * kRanks;
    const auto [boxes, cores] = loads(plan);
    EXPECT_EQ(boxes.size(), 3u);
    EXPECT_LE(spread(boxes), kLargest + 3 * kRanks * plan.chunks.size());  // bytes are rounded
    EXPECT_LE(spread(cores), 2 * kLargest);
    uint64_t planned = 0;
    for (const CorePlan& core : plan.cores) planned += core.gradient_bytes;
    const uint64_t all = boxes.at(0) + boxes.at(1) + boxes.at(2);
    EXPECT_GE(planned * kRanks, all);
    EXPECT_LE(planned * kRanks, all + kRanks * plan.chunks.size());
    for (KeySpec& key : keys) key.exchanged_by.clear();
    by_exchange += spread(boxes);
    by_bytes += spread(loads(make_plan(topology, keys, options)).first);
  }
  EXPECT_GE(by_bytes, 2 * by_exchange);
}

// Many small jobs, one after the other, each planned with what the others bring: every core and NIC
// gets its part.
TEST(Plan, TakesIntoAccountWhatTheBoxCarries) {
  const numa::Topology topology = numa::from_synthetic("pack:2 core:2 pu:1");
  const std::vector<KeySpec> keys = {{.name = "w", .elements = 100}};
  std::vector<PlanLoad> load;
  std::map<uint32_t, int> jobs;
  for (int job = 0; job < 40; ++job) {
    const Plan plan = make_plan(topology, keys, {.ranks = 2, .load = load});
    EXPECT_EQ(plan.chunks.size(), 1u);
    const QueuePlan& queue = plan.queues[plan.chunks[0].queue];
    ++jobs[plan.cores[queue.core].os_cpu];
    load.push_back({0, plan.cores[queue.core].os_cpu, plan.nics[queue.nic].name, 100 * 4 * 2});
    // The same input gives the same plan.
    const Plan again = make_plan(topology, keys, {.ranks = 2, .load = load});
    const Plan twice = make_plan(topology, keys, {.ranks = 2, .load = load});
    EXPECT_EQ(again.chunks[0].queue, twice.chunks[0].queue);
  }
  EXPECT_EQ(jobs.size(), 4u);
  for (const auto& [cpu, count] : jobs) EXPECT_EQ(count, 10) << "CPU " << cpu;

  // A large job goes round a core that others fill, and balances the sum.
  const std::vector<KeySpec> large = {{.name = "w", .elements = 8192 * 400}};
  const Plan empty = make_plan(topology, large, {.ranks = 2});
  const uint32_t busy = empty.cores[0].os_cpu;
  const Plan around = make_plan(
      topology, large,
      {.ranks = 2, .load = {{0, busy, empty.nics[0].name, uint64_t{8192} * 100 * 4 * 2}}});
  uint64_t least = ~uint64_t{0}, most = 0;
  for (const CorePlan& core : around.cores) {
    const uint64_t all = core.elements + (core.os_cpu == busy ? 8192 * 100 : 0);
    least = std::min(least, all), most = std::max(most, all);
  }
  EXPECT_LE(most - least, 2 * 8192u);
}

}  // namespace plan_test
}  // namespace phub
