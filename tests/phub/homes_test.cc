// Chunks lie at the machines of the ranks that exchange them, as far as the boxes stay balanced.
#include "phub/plan/homes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <vector>

#include "numa/topology.h"
#include "phub/plan/plan.h"

namespace phub {
namespace homes_test {

using ::testing::HasSubstr;

constexpr uint32_t kChunk = 256;
constexpr uint64_t kBytes = 4 * kChunk;

// Boxes of one node, by the number of their machine.
numa::Topology boxes_on(const std::vector<uint64_t>& hosts, uint32_t cores = 2) {
  numa::Topology all;
  for (uint32_t box = 0; box < hosts.size(); ++box) {
    all.nodes.push_back({.os_node = 0, .memory_bytes = 1 << 30, .box = box, .host = hosts[box]});
    for (uint32_t core = 0; core < cores; ++core) all.cores.push_back({box, core});
    all.nics.push_back({box, "eth0"});
  }
  all.source = "boxes of a test";
  return all;
}

// A key with a chunk for each set of ranks.
KeySpec key_of(const std::vector<uint64_t>& chunks) {
  KeySpec key{.name = "rows", .elements = kChunk * chunks.size()};
  for (size_t c = 0; c < chunks.size(); ++c) {
    key.exchanged_by.push_back({.end = (c + 1) * kChunk, .ranks = {chunks[c]}});
  }
  return key;
}
std::vector<uint64_t> times(size_t count, uint64_t ranks) {
  return std::vector<uint64_t>(count, ranks);
}

PlanOptions options_of(std::vector<uint64_t> rank_hosts) {
  return {.ranks = static_cast<uint32_t>(rank_hosts.size()),
          .chunk_elements = kChunk,
          .shared_memory = false,
          .rank_hosts = std::move(rank_hosts)};
}

std::vector<uint32_t> box_of_chunks(const Plan& plan) {
  std::vector<uint32_t> boxes;
  for (const ChunkLayout& chunk : plan.chunks) {
    boxes.push_back(plan.cores[plan.queues[chunk.queue].core].box);
  }
  return boxes;
}
std::vector<uint32_t> queue_of_chunks(const Plan& plan) {
  std::vector<uint32_t> queues;
  for (const ChunkLayout& chunk : plan.chunks) queues.push_back(chunk.queue);
  return queues;
}

TEST(Homes, ChunksOfOneMachineLieThere) {
  const numa::Topology topology = boxes_on({7, 9});
  std::vector<uint64_t> chunks;
  for (size_t i = 0; i < 20; ++i)
    chunks.push_back(i % 3 == 0 ? 0b0001 : i % 3 == 1 ? 0b1100 : 0b0010);
  const std::vector<KeySpec> keys = {key_of(chunks)};
  const Plan plan = make_plan(topology, keys, options_of({7, 7, 9, 9}));
  uint64_t all = 0;
  for (size_t c = 0; c < chunks.size(); ++c) {
    EXPECT_EQ(box_of_chunks(plan)[c], chunks[c] == 0b1100 ? 1u : 0u) << c;
    all += kBytes * static_cast<uint64_t>(std::popcount(chunks[c]));
  }
  EXPECT_EQ(plan.homes, (HomeBytes{.known = true, .stays = all}));
  EXPECT_EQ(part_of(plan, 1).homes, plan.homes);
}

// Where most of its ranks are; of machines with as many, where the load is less.
TEST(Homes, SharedChunksLieWhereMostRanksAre) {
  const std::vector<uint64_t> rank_hosts = {7, 7, 9, 9, 5};  // at 5 is no box
  const Plan plan = make_plan(
      boxes_on({9, 7, 3}),
      std::vector{key_of({0b00111, 0b01101, 0b10001, 0b10000, 0b01001, 0b01010, 0b00101})},
      options_of(rank_hosts));
  const std::vector<uint32_t> boxes = box_of_chunks(plan);
  EXPECT_EQ(boxes[0], 1u);
  EXPECT_EQ(boxes[1], 0u);
  EXPECT_EQ(boxes[2], 1u);
  EXPECT_EQ(boxes[3], 2u) << "it has no home, and this box had nothing";
  EXPECT_EQ(plan.homes.without_box, 2 * kBytes);
  EXPECT_EQ(plan.homes.stays + plan.homes.for_balance, (2 + 2 + 1 + 1 + 1 + 1) * kBytes);
  EXPECT_EQ(plan.homes.shared, (1 + 1 + 1 + 1 + 1) * kBytes);
}

TEST(Homes, BoxesStayBalanced) {
  // One machine has all ranks: its box has a quarter more than its even share.
  const std::vector<KeySpec> keys = {key_of(times(160, 0b11))};
  for (const size_t boxes : {2u, 4u}) {
    std::vector<uint64_t> hosts = {0, 7, 3, 4};
    hosts.resize(boxes);
    const Plan plan = make_plan(boxes_on(hosts), keys, options_of({7, 7}));
    const auto at_home = static_cast<uint64_t>(std::ranges::count(box_of_chunks(plan), 1u));
    EXPECT_EQ(at_home, 160 / boxes * 5 / 4);
    EXPECT_EQ(plan.homes, (HomeBytes{.known = true,
                                     .stays = at_home * 2 * kBytes,
                                     .for_balance = (160 - at_home) * 2 * kBytes}));
  }
  // The boxes' cores count, not the boxes.
  numa::Topology uneven = boxes_on({7, 9});
  uneven.nics.clear();
  uneven.cores = {{0, 0}, {0, 1}, {0, 2}, {1, 0}};
  const Plan plan = make_plan(uneven, std::vector{key_of(times(160, 0b10))}, options_of({7, 9}));
  EXPECT_EQ(std::ranges::count(box_of_chunks(plan), 1u), 50);
  // What other jobs bring counts for the other chunks alone.
  PlanOptions busy = options_of({7, 7});
  busy.load = {{1, 0, "eth0", 160 * 2 * kBytes}, {1, 1, "eth0", 160 * 2 * kBytes}};
  const Plan around = make_plan(boxes_on({3, 7}), keys, busy);
  EXPECT_EQ(std::ranges::count(box_of_chunks(around), 1u), 100);
}

// Of chunks that cannot all go home, those stay that other machines exchange, too.
TEST(Homes, ChunksOfOneMachineGoFirst) {
  std::vector<uint64_t> chunks = times(50, 0b111);
  chunks.insert(chunks.end(), 50, 0b011);
  const Plan plan = make_plan(boxes_on({7, 3}), std::vector{key_of(chunks)}, options_of({7, 7, 4}));
  const std::vector<uint32_t> boxes = box_of_chunks(plan);
  EXPECT_EQ(std::count(boxes.begin() + 50, boxes.end(), 0u), 50);
}

TEST(Homes, WithoutAChoiceThePlanIsAsBefore) {
  std::mt19937_64 random(3);
  for (int turn = 0; turn < 50; ++turn) {
    std::vector<uint64_t> chunks(1 + random() % 60);
    for (uint64_t& ranks : chunks) ranks = 1 + random() % 15;
    std::vector<KeySpec> keys = {key_of(chunks), {.name = "all", .elements = 1 + random() % 5000}};
    const auto expect_same = [&](const numa::Topology& topology, std::vector<uint64_t> rank_hosts) {
      const Plan plain = make_plan(topology, keys, options_of(times(4, 0)));
      const Plan told = make_plan(topology, keys, options_of(std::move(rank_hosts)));
      EXPECT_FALSE(plain.homes.known);
      EXPECT_EQ(describe(plain.homes), "");
      EXPECT_EQ(queue_of_chunks(told), queue_of_chunks(plain));
      EXPECT_EQ(told.homes.stays, 0u);
    };
    expect_same(boxes_on({7}), {7, 7, 7, 8});     // there is one box
    expect_same(boxes_on({7, 9}), {1, 2, 3, 4});  // nobody sits at a box
    expect_same(boxes_on({0, 0}), {0, 0, 7, 9});  // boxes say nothing
    expect_same(boxes_on({7, 9}), times(4, 0));   // ranks say nothing
  }
  // All boxes are on one machine.
  const std::vector<KeySpec> keys = {key_of(times(9, 0b01))};
  EXPECT_EQ(queue_of_chunks(make_plan(boxes_on({7, 7}), keys, options_of({7, 9}))),
            queue_of_chunks(make_plan(boxes_on({7, 7}), keys, options_of({0, 0}))));
}

TEST(Homes, HoldForAnything) {
  std::mt19937_64 random(4);
  uint64_t stay = 0, stayed = 0;
  for (int turn = 0; turn < 300; ++turn) {
    const auto ranks = static_cast<uint32_t>(1 + random() % 8);
    std::vector<uint64_t> hosts(2 + random() % 3), rank_hosts(ranks), chunks(1 + random() % 90);
    for (uint64_t& host : hosts) host = random() % 5;
    for (uint64_t& host : rank_hosts) host = random() % 5;
    for (uint64_t& of : chunks) of = 1 + random() % ((1u << ranks) - 1);
    const std::vector<KeySpec> keys = {key_of(chunks)};
    const numa::Topology topology = boxes_on(hosts);
    const Plan plan = make_plan(topology, keys, options_of(rank_hosts));
    EXPECT_EQ(queue_of_chunks(plan),
              queue_of_chunks(make_plan(topology, keys, options_of(rank_hosts))));
    uint64_t all = 0, here = 0, load = 0, before = 0;
    std::vector<uint64_t> of_box(hosts.size());
    const std::vector<uint32_t> boxes = box_of_chunks(plan);
    const std::vector<uint32_t> plain =
        box_of_chunks(make_plan(topology, keys, options_of(times(ranks, 0))));
    const std::vector<uint64_t> bytes = exchanged_bytes(plan, keys, ranks);
    for (size_t c = 0; c < chunks.size(); ++c) {
      of_box[boxes[c]] += bytes[c];
      load += bytes[c];
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        if ((chunks[c] >> rank & 1) == 0) continue;
        all += kBytes;
        if (rank_hosts[rank] == 0) continue;
        if (hosts[boxes[c]] == rank_hosts[rank]) here += kBytes;
        if (hosts[plain[c]] == rank_hosts[rank]) before += kBytes;
      }
    }
    const double even = static_cast<double>(load) / static_cast<double>(hosts.size());
    EXPECT_LE(static_cast<double>(std::ranges::max(of_box)), kMostOfEven * even + kBytes);
    if (!plan.homes.known) continue;
    EXPECT_EQ(plan.homes.stays, here);
    EXPECT_EQ(here + plan.homes.shared + plan.homes.for_balance + plan.homes.without_box, all);
    EXPECT_THAT(describe(plan.homes), HasSubstr("stay at their ranks' machines"));
    stay += here, stayed += before;
  }
  EXPECT_GT(stay, stayed * 5 / 4);
}

// Keys whose ranges are unknown are exchanged by all ranks: they lie where most of these are.
TEST(Homes, AllRanksExchangeOtherKeys) {
  const std::vector<KeySpec> keys = {{.name = "all", .elements = 80 * kChunk}};
  const Plan plan = make_plan(boxes_on({7, 9}), keys, options_of({9, 9, 7}));
  EXPECT_EQ(std::ranges::count(box_of_chunks(plan), 1u), 50);
  EXPECT_EQ(plan.homes, (HomeBytes{.known = true,
                                   .stays = (50 * 2 + 30) * kBytes,
                                   .shared = 80 * kBytes,
                                   .for_balance = 30 * kBytes}));
  const JobSpec spec{.name = "job", .keys = keys, .world_size = 3, .max_ranks = 3};
  EXPECT_THAT(describe(plan, spec), HasSubstr(describe(plan.homes)));
}

// A set of ranks has as many words as it needs.
TEST(Homes, OfManyRanks) {
  std::vector<uint64_t> rank_hosts(200, 7);
  std::ranges::fill(rank_hosts.begin() + 100, rank_hosts.end(), 9);
  KeySpec key{.name = "rows", .elements = 2 * kChunk};
  key.exchanged_by = {{.end = kChunk, .ranks = {0, 0, 0, 0x80}},
                      {.end = kChunk + 10, .ranks = {1}},
                      {.end = 2 * kChunk, .ranks = {0, 1}}};
  const Plan plan = make_plan(boxes_on({7, 9}), std::vector{key}, options_of(rank_hosts));
  EXPECT_EQ(box_of_chunks(plan), (std::vector<uint32_t>{1, 0}));
  EXPECT_EQ(plan.homes.stays, 3 * kBytes);
  EXPECT_EQ(ranks_exchanging(plan.chunks[1], key), (std::vector<uint64_t>{1, 1}));
  EXPECT_EQ(exchanged_bytes(plan, std::vector{key}, 200),
            (std::vector<uint64_t>{(kBytes + 199) / 200, (2 * kBytes + 199) / 200}));
}

}  // namespace homes_test
}  // namespace phub
