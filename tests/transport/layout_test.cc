#include "transport/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {
namespace {

using ::testing::HasSubstr;

struct Sample {
  std::vector<KeySpec> keys;
  uint32_t chunk_elements = 32;
  std::vector<std::vector<uint32_t>> queue_chunks;
  std::vector<uint32_t> queue_node;
};

Sample sample(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return random() % n; };
  Sample s;
  s.chunk_elements = 32 * static_cast<uint32_t>(1 + below(8));
  const uint64_t keys = 1 + below(8);
  for (uint64_t k = 0; k < keys; ++k) {
    s.keys.push_back({.name = "k" + std::to_string(k), .elements = 1 + below(2000)});
  }
  const uint64_t queues = 1 + below(6);
  s.queue_chunks.resize(queues);
  for (uint64_t q = 0, node = 0; q < queues; ++q) {
    s.queue_node.push_back(static_cast<uint32_t>(node));
    node += below(2);
  }
  const size_t chunks = lay_out_keys(s.keys, s.chunk_elements).chunks.size();
  for (uint32_t c = 0; c < chunks; ++c) s.queue_chunks[below(queues)].push_back(c);
  return s;
}

Layout layout_of(const Sample& s, bool by_keys) {
  Layout layout = lay_out_keys(s.keys, s.chunk_elements);
  std::vector<uint64_t> offsets;
  if (!by_keys) offsets = offsets_of_queues(layout, s.queue_chunks, s.queue_node);
  lay_out_queues(layout, s.queue_chunks, offsets);
  return layout;
}

// Neither at the worker nor at the box do two slots overlap, or one lie outside; at the box, nodes
// are a page apart; at the worker, a key is one piece.
TEST(Layout, EveryChunkHasItsOwnPlaceOnBothSides) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Sample s = sample(seed);
    const bool by_keys = seed % 3 == 0;
    const Layout layout = layout_of(s, by_keys);
    std::vector<int> worker(layout.total_elements / kChunkAlignment, -1);
    std::vector<int> box(layout.box_elements / kChunkAlignment, -1);
    std::vector<uint64_t> key_elements(s.keys.size());
    for (uint32_t c = 0; c < layout.chunks.size(); ++c) {
      const ChunkLayout& chunk = layout.chunks[c];
      ASSERT_EQ(chunk.key_element, key_elements[chunk.key]);
      ASSERT_EQ(chunk.offset, layout.key_offset[chunk.key] + chunk.key_element);
      key_elements[chunk.key] += chunk.elements;
      ASSERT_EQ(s.queue_chunks[chunk.queue][chunk.index], c);
      for (const auto& [memory, at] :
           {std::pair{&worker, chunk.offset}, {&box, chunk.box_offset}}) {
        ASSERT_EQ(at % kChunkAlignment, 0u);
        for (uint64_t e = 0; e < slot_elements(chunk.elements); e += kChunkAlignment) {
          const uint64_t unit = (at + e) / kChunkAlignment;
          ASSERT_LT(unit, memory->size());
          ASSERT_EQ((*memory)[unit], -1) << "chunk " << c;
          (*memory)[unit] = static_cast<int>(s.queue_node[chunk.queue]);
        }
      }
    }
    for (size_t k = 0; k < s.keys.size(); ++k) ASSERT_EQ(key_elements[k], s.keys[k].elements);
    ASSERT_EQ(std::count(worker.begin(), worker.end(), -1), 0) << "a hole between keys";
    if (by_keys) continue;
    // 4096 bytes of the smallest element.
    constexpr size_t kPage = 4096 / 2 / kChunkAlignment;
    for (size_t i = 0; i < box.size(); ++i) {
      for (size_t j = i + 1; j < std::min(box.size(), i + kPage); ++j) {
        ASSERT_TRUE(box[i] == box[j] || box[i] == -1 || box[j] == -1);
      }
    }
  }
}

// Each sum of a rack has its trailer behind it, and no sum is in another's place.
TEST(Layout, SumsOfARack) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Sample s = sample(seed);
    Layout layout = lay_out_keys(s.keys, s.chunk_elements);
    layout.trailer_elements = kTrailerElements;
    lay_out_queues(layout, s.queue_chunks, {});
    const std::vector<uint64_t> offsets = offsets_of_sums(layout);
    ASSERT_EQ(offsets.size(), layout.chunks.size() + 1);
    for (size_t c = 0; c < layout.chunks.size(); ++c) {
      ASSERT_EQ(offsets[c] % kChunkAlignment, 0u);
      ASSERT_GE(offsets[c + 1], offsets[c] + layout.chunks[c].elements + kTrailerElements);
    }
    EXPECT_EQ(link_layout(layout, 3, 4, 4, 1).gradients_at_worker(), offsets.back() * 4);
  }
}

// What the worker derives from a join's answer is what the box has, whatever the nodes.
TEST(Layout, BothSidesComeToTheSame) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Sample s = sample(seed);
    const Layout box = layout_of(s, seed % 3 == 0);
    JoinReply reply;
    reply.layout = routes_of(box);
    reply.spec.keys = s.keys;
    reply.spec.chunk_elements = s.chunk_elements;
    const Layout worker = phub::layout_of(reply);
    ASSERT_EQ(worker.total_elements, box.total_elements);
    ASSERT_EQ(worker.box_elements, box.box_elements);
    ASSERT_EQ(worker.chunks.size(), box.chunks.size());
    for (size_t c = 0; c < box.chunks.size(); ++c) {
      ASSERT_EQ(worker.chunks[c].offset, box.chunks[c].offset);
      ASSERT_EQ(worker.chunks[c].box_offset, box.chunks[c].box_offset);
      ASSERT_EQ(worker.chunks[c].queue, box.chunks[c].queue);
      ASSERT_EQ(worker.chunks[c].index, box.chunks[c].index);
    }
    const LinkLayout link = link_layout(box, 3, 2, 4, 1);
    EXPECT_EQ(link.gradients_at_worker(), box.total_elements * 2);
    EXPECT_EQ(link.slots_bytes, box.box_elements * 2);
    EXPECT_EQ(link.results_at_worker(), box.total_elements * 4);
    EXPECT_EQ(link.results_bytes, box.box_elements * 4);
  }
}

TEST(Layout, AnAnswerThatDoesNotFitTogetherIsRefused) {
  const Sample s = sample(7);
  JoinReply good;
  good.layout = routes_of(layout_of(s, false));
  good.spec.keys = s.keys;
  good.spec.chunk_elements = s.chunk_elements;
  const auto message = [&](auto spoil) {
    JoinReply reply = good;
    spoil(reply);
    try {
      phub::layout_of(reply);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInternal);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([](JoinReply&) {}), "");
  const auto& queues = good.layout.queue_chunks;
  const size_t full =
      static_cast<size_t>(std::find_if(queues.begin(), queues.end(),
                                       [](const auto& chunks) { return !chunks.empty(); }) -
                          queues.begin());
  EXPECT_THAT(message([](JoinReply& r) { r.layout.key_offset[0] += 32; }), HasSubstr("keys"));
  EXPECT_THAT(message([](JoinReply& r) { r.layout.total_elements += 32; }), HasSubstr("keys"));
  EXPECT_THAT(message([](JoinReply& r) { r.spec.keys.pop_back(); }), HasSubstr("keys"));
  EXPECT_THAT(message([](JoinReply& r) { r.layout.queue_offset.push_back(0); }),
              HasSubstr("offsets"));
  EXPECT_THAT(message([&](JoinReply& r) { r.layout.queue_chunks[full].pop_back(); }),
              HasSubstr("have a queue"));
  EXPECT_THAT(message([&](JoinReply& r) { r.layout.queue_chunks[full].push_back(0); }),
              HasSubstr("another queue"));
  EXPECT_THAT(message([&](JoinReply& r) { r.layout.queue_chunks[full][0] = 1u << 30; }),
              HasSubstr("does not exist"));
  EXPECT_THAT(message([&](JoinReply& r) { r.layout.queue_offset[full] = ~uint64_t{0}; }),
              HasSubstr("begins at element"));
  EXPECT_THAT(message([](JoinReply& r) { r.first_round = 0; }), HasSubstr("rounds"));
}

TEST(Layout, InitialParametersOf16BitsFitTheSlot) {
  for (uint32_t n = 1; n <= 300; ++n) {
    uint32_t next = 0;
    for (uint32_t part = 0; part < initial_parts(2); ++part) {
      const InitialPart p = initial_part(n, 2, part);
      EXPECT_EQ(p.first, next);
      EXPECT_LE(p.count * sizeof(float), slot_elements(n) * 2) << n;
      next += p.count;
    }
    EXPECT_EQ(next, n);
    EXPECT_EQ(initial_part(n, 4, 0).count, n);
  }
}

}  // namespace
}  // namespace phub
