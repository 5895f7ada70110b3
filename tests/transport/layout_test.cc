#include "transport/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>

#include "kernels/slots.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {
namespace layout_test {

using ::testing::HasSubstr;

struct Sample {
  std::vector<KeySpec> keys;
  uint32_t chunk_elements = 32;
  std::vector<std::vector<uint32_t>> queue_chunks;
  std::vector<uint32_t> queue_node;
};

// Three of four samples's keys have formats of their own, coded ones among them.
Sample sample(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return random() % n; };
  Sample s;
  s.chunk_elements = 32 * static_cast<uint32_t>(1 + below(8));
  const uint64_t keys = 1 + below(8);
  for (uint64_t k = 0; k < keys; ++k) {
    s.keys.push_back({.name = "k" + std::to_string(k), .elements = 1 + below(2000)});
    if (seed % 4 == 0) continue;
    s.keys.back().format = kSlotFormats[below(kSlotFormats.size())].name;
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
  QueueOffsets offsets;
  if (!by_keys) offsets = offsets_of_queues(layout, s.queue_chunks, s.queue_node);
  lay_out_queues(layout, s.queue_chunks, offsets);
  return layout;
}

// The same of gradients, whose keys have formats: in bytes. A key of a plain format is one piece.
void expect_own_slots(const Sample& s, const Layout& layout, bool by_keys) {
  std::vector<int> worker(layout.gradients_bytes / kSlotAlignment, -1);
  std::vector<int> box(layout.slots_bytes / kSlotAlignment, -1);
  ASSERT_EQ(worker.size() * kSlotAlignment, layout.gradients_bytes);
  for (uint32_t c = 0; c < layout.chunks.size(); ++c) {
    const ChunkLayout& chunk = layout.chunks[c];
    const SlotFormat& format = layout.key_format[chunk.key];
    ASSERT_EQ(chunk.slot_bytes, format.bytes(chunk.elements));
    if (format.is_plain() && chunk.key_element > 0) {
      const ChunkLayout& before = layout.chunks[c - 1];
      ASSERT_EQ(chunk.gradient_offset, before.gradient_offset + before.slot_bytes);
    }
    for (const auto& [memory, at] :
         {std::pair{&worker, chunk.gradient_offset}, {&box, chunk.slot_offset}}) {
      ASSERT_EQ(at % kSlotAlignment, 0u);
      for (uint64_t b = 0; b < chunk.slot_bytes; b += kSlotAlignment) {
        const uint64_t unit = (at + b) / kSlotAlignment;
        ASSERT_LT(unit, memory->size());
        ASSERT_EQ((*memory)[unit], -1) << "chunk " << c;
        (*memory)[unit] = static_cast<int>(s.queue_node[chunk.queue]);
      }
      for (uint32_t part = 0; part < initial_parts(chunk.elements, chunk.slot_bytes); ++part) {
        const InitialPart p = initial_part(chunk.elements, chunk.slot_bytes, part);
        ASSERT_LE(p.count * sizeof(float), layout.slot_room_of(chunk)) << format.name;
      }
    }
  }
  constexpr size_t kPage = 4096 / kSlotAlignment;
  for (size_t i = 0; i < box.size() && !by_keys; ++i) {
    for (size_t j = i + 1; j < std::min(box.size(), i + kPage); ++j) {
      ASSERT_TRUE(box[i] == box[j] || box[i] == -1 || box[j] == -1);
    }
  }
}

// Neither at the worker nor at the box do two slots overlap, or one lie outside; at the box, nodes
// are a page apart; at the worker, a key is one piece.
TEST(Layout, EveryChunkHasItsOwnPlaceOnBothSides) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Sample s = sample(seed);
    const bool by_keys = seed % 3 == 0;
    const Layout layout = layout_of(s, by_keys);
    expect_own_slots(s, layout, by_keys);
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

// Chunks of a queue that share slots have them in turn, each in room enough, and no two queues have
// the same.
TEST(Layout, ChunksShareSlotsInTurn) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Sample s = sample(seed);
    std::vector<uint32_t> shares;
    for (size_t q = 0; q < s.queue_chunks.size(); ++q) {
      const size_t most = std::max<size_t>(s.queue_chunks[q].size(), 1);
      shares.push_back(static_cast<uint32_t>(std::min<size_t>(1 + (seed + q) % 3, most)));
    }
    Layout layout = lay_out_keys(s.keys, s.chunk_elements);
    lay_out_queues(layout, s.queue_chunks,
                   offsets_of_queues(layout, s.queue_chunks, s.queue_node, shares));
    std::map<uint64_t, std::pair<uint32_t, uint32_t>> slot_at;  // of which queue, which one
    for (const ChunkLayout& chunk : layout.chunks) {
      const auto slot = std::pair(chunk.queue, chunk.index % shares[chunk.queue]);
      ASSERT_EQ(slot_at.try_emplace(chunk.slot_offset, slot).first->second, slot);
      ASSERT_EQ(chunk.slot_offset % kSlotAlignment, 0u);
      auto next = slot_at.upper_bound(chunk.slot_offset);
      const uint64_t end = next == slot_at.end() ? layout.slots_bytes : next->first;
      ASSERT_LE(chunk.slot_offset + layout.slot_room_of(chunk), end);
    }
    JoinReply reply;
    reply.layout = routes_of(layout);
    reply.spec.keys = s.keys;
    reply.spec.chunk_elements = s.chunk_elements;
    const Layout worker = phub::layout_of(reply);
    for (size_t c = 0; c < layout.chunks.size(); ++c) {
      ASSERT_EQ(worker.chunks[c].slot_offset, layout.chunks[c].slot_offset);
    }
    EXPECT_EQ(worker.queue_shares, shares);
  }
}

// Each sum of a rack has its trailer behind it, and no sum is in another's place.
TEST(Layout, SumsOfARack) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Sample s = sample(seed);
    for (KeySpec& key : s.keys) key.format.clear();  // what goes up is f32
    Layout layout = lay_out_keys(s.keys, s.chunk_elements);
    layout.trailer_elements = kTrailerElements;
    lay_out_queues(layout, s.queue_chunks, {});
    const std::vector<uint64_t> offsets = offsets_of_sums(layout);
    ASSERT_EQ(offsets.size(), layout.chunks.size() + 1);
    for (size_t c = 0; c < layout.chunks.size(); ++c) {
      ASSERT_EQ(offsets[c] % (kChunkAlignment * 4), 0u);
      ASSERT_GE(offsets[c + 1], offsets[c] + (layout.chunks[c].elements + kTrailerElements) * 4);
    }
    EXPECT_EQ(link_layout(layout, 3, {}, 1).gradients_at_worker(), offsets.back());
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
      ASSERT_EQ(worker.chunks[c].gradient_offset, box.chunks[c].gradient_offset);
      ASSERT_EQ(worker.chunks[c].slot_offset, box.chunks[c].slot_offset);
      ASSERT_EQ(worker.chunks[c].slot_bytes, box.chunks[c].slot_bytes);
      ASSERT_EQ(worker.chunks[c].queue, box.chunks[c].queue);
      ASSERT_EQ(worker.chunks[c].index, box.chunks[c].index);
    }
    const LinkLayout link = link_layout(box, 3, {}, 1);
    EXPECT_EQ(link.gradients_at_worker(), box.gradients_bytes);
    EXPECT_EQ(link.slots_bytes, box.slots_bytes);
    if (const uint32_t element = element_bytes_of_all(box)) {
      EXPECT_EQ(link.gradients_at_worker(), box.total_elements * element);
      EXPECT_EQ(link.slots_bytes, box.box_elements * element);
      EXPECT_TRUE(reply.layout.queue_slots.empty());
    }
    EXPECT_EQ(link.results_at_worker(), box.total_elements * 4);
    EXPECT_EQ(link.results_bytes, box.box_elements * 4);
    const LinkLayout halves = link_layout(box, 3, {.element_bytes = 2}, 3);
    EXPECT_EQ(halves.results_at_worker(), box.total_elements * 2);
    EXPECT_EQ(halves.all_results_bytes(), box.box_elements * 6);
  }
}

// Behind the view each chunk has room for its difference, which overlaps no other's.
TEST(Layout, DifferencesHaveTheirOwnPlaces) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Sample s = sample(seed);
    const Layout layout = layout_of(s, seed % 3 == 0);
    for (const SlotFormat& format : kSlotFormats) {
      if (!format.for_results()) continue;
      JobSpec spec;
      spec.parameter_dtype = format.name;
      const ResultFormat results = result_format(spec);
      EXPECT_EQ(results.element_bytes, format.is_plain() ? format.unit_bytes : 4);
      const LinkLayout link = link_layout(layout, 3, results, 1);
      EXPECT_EQ(link.results_bytes,
                layout.box_elements * (results.element_bytes + (format.is_plain() ? 0 : 2)));
      if (format.is_plain()) continue;
      std::map<uint64_t, uint64_t> taken;  // where from, and where to
      for (const ChunkLayout& chunk : layout.chunks) {
        const ResultPlace place =
            difference_place(results, layout.box_elements, chunk.box_offset, chunk.elements);
        EXPECT_EQ(place.bytes, format.bytes(chunk.elements));
        EXPECT_EQ(place.byte % kSlotAlignment, 0u);
        EXPECT_GE(place.byte, layout.box_elements * 4);
        EXPECT_LE(place.byte + place.bytes, link.results_bytes);
        taken.emplace(place.byte, place.byte + place.bytes);
      }
      ASSERT_EQ(taken.size(), layout.chunks.size());
      for (auto at = taken.begin(), next = std::next(at); next != taken.end(); ++at, ++next) {
        ASSERT_LE(at->second, next->first);
      }
    }
  }
}

// The chunks of a matrix whose factors or rows are sent are whole rows, and so many that each lies
// on whole cache lines; those of rows have about as many elements as other chunks.
TEST(Layout, AMatrixIsCutIntoRows) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const bool factors = seed % 2 == 0;
    KeySpec key{.name = "m", .shape = {1 + random() % 500, 1 + random() % 100}};
    const uint64_t columns = key.shape[1];
    key.elements = key.shape[0] * columns;
    uint32_t chunk_elements = 64;
    if (factors) {
      set_rank_limit(key, static_cast<uint32_t>(1 + random() % 5));
    } else {
      set_rows_limit(key, static_cast<uint32_t>(1 + random() % 40), random() % 2 == 0);
      chunk_elements = static_cast<uint32_t>(32 * (1 + random() % 200));
    }
    key.tile_rows = tile_rows_for(key, 1 + random() % 9, chunk_elements);
    ASSERT_GT(key.tile_rows, 0u);
    if (!factors && key.tile_rows > rows_together(key)) {
      ASSERT_LE(key.tile_rows * columns, std::max<uint64_t>(chunk_elements, columns));
    }
    const std::vector<KeySpec> keys = {
        {.name = "a", .elements = 33}, key, {.name = "b", .elements = 5}};
    const Layout layout = lay_out_keys(keys, chunk_elements);
    uint64_t next = 0;
    for (const ChunkLayout& chunk : layout.chunks) {
      if (chunk.key != 1) continue;
      ASSERT_EQ(chunk.key_element, next);
      ASSERT_EQ(chunk.elements % columns, 0u);
      ASSERT_EQ(chunk.offset % kChunkAlignment, 0u);
      ASSERT_EQ(chunk.gradient_offset % kSlotAlignment, 0u);
      const uint64_t rows = chunk.elements / columns;
      const uint64_t sent = std::min<uint64_t>(rows, key.rows_limit);
      ASSERT_EQ(chunk.slot_bytes, factors ? 4 * (key.rank_limit * (rows + columns) + 1)
                                          : 4 * (sent * (1 + columns) + 1));
      ASSERT_EQ(chunk.slot_bytes,
                kernels::slot_bytes(
                    {.elements = chunk.elements,
                     .form = factors ? kernels::SlotForm::kFactors : kernels::SlotForm::kRows,
                     .columns = columns,
                     .limit = factors ? key.rank_limit : key.rows_limit}));
      ASSERT_LE(initial_parts(chunk.elements, chunk.slot_bytes), 255u);
      next += chunk.elements;
    }
    ASSERT_EQ(next, key.elements);
    Sample s{
        .keys = keys, .chunk_elements = chunk_elements, .queue_chunks = {{}}, .queue_node = {0}};
    for (uint32_t c = 0; c < layout.chunks.size(); ++c) s.queue_chunks[0].push_back(c);
    expect_own_slots(s, layout_of(s, false), false);
    expect_own_slots(s, layout_of(s, true), true);
  }
}

// The largest tile has a slot and initial parts that a write and an immediate can name.
void expect_tiles_that_fit(const KeySpec& key) {
  const uint64_t rows = key.shape[0], columns = key.shape[1], most = most_tile_rows(key);
  if (most == 0) {
    const uint64_t least = std::min<uint64_t>(rows, rows_together(key));
    EXPECT_TRUE(key.rank_limit * (least + columns) > kMaxChunkElements ||
                least * columns > kMaxChunkElements);
    return;
  }
  const auto width = static_cast<uint32_t>(columns);
  const SlotFormat format =
      key.rank_limit > 0 ? factor_format(key.rank_limit, width) : row_format(key.rows_limit, width);
  EXPECT_LE(most, rows);
  EXPECT_LE(most * columns, kMaxChunkElements);
  const uint64_t bytes = format.bytes(most * columns);
  EXPECT_LE(bytes, (key.rank_limit > 0 ? 4ull : 8ull) * kMaxChunkElements + 4);
  EXPECT_LE(initial_parts(static_cast<uint32_t>(most * columns), bytes), 255u);
}

// In whatever order limits are set, the format is that of those that are left.
TEST(Layout, TheFormatFollowsTheLimits) {
  std::mt19937_64 random(7);
  KeySpec key{.name = "m", .elements = 64, .shape = {8, 8}};
  for (int i = 0; i < 200; ++i) {
    const bool rows = random() % 2 == 0;
    const uint32_t limit = random() % 2 == 0 ? 0 : 8;
    rows ? set_rows_limit(key, limit, false) : set_rank_limit(key, limit);
    EXPECT_EQ(key.format, key.rows_limit > 0 ? "rows" : key.rank_limit > 0 ? "factors" : "");
  }
}

TEST(Layout, NoTileIsTooLarge) {
  for (const uint64_t rows : {1u, 31u, 1000u, 10'000'000u}) {
    for (const uint64_t columns : {1u, 7u, 32u, 4096u, 25'088u, 500'000u, 500'001u, 1'048'575u}) {
      for (const uint32_t limit : {1u, 2u, 32u, 1000u, 100'000u, 1'048'575u}) {
        SCOPED_TRACE(::testing::Message() << rows << " x " << columns << ", limit " << limit);
        KeySpec key{.name = "m", .elements = rows * columns, .shape = {rows, columns}};
        set_rank_limit(key, limit);
        expect_tiles_that_fit(key);
        set_rank_limit(key, 0);
        set_rows_limit(key, limit, false);
        expect_tiles_that_fit(key);
      }
    }
  }
}

TEST(Layout, AMatrixThatDoesNotFitIsRefused) {
  using Spoil = void (*)(KeySpec&);
  const Spoil kCases[] = {
      [](auto& key) { key.tile_rows = 0; },  [](auto& key) { key.tile_rows = 21; },
      [](auto& key) { key.rank_limit = 0; }, [](auto& key) { key.rank_limit = 1 << 24; },
      [](auto& key) { key.shape = {600}; },  [](auto& key) { key.shape = {}; },
      [](auto& key) { key.shape[1] = 0; },   [](auto& key) { key.shape[1] = 31; },
      [](auto& key) { key.elements = 601; },
  };
  for (size_t i = 0; i < std::size(kCases); ++i) {
    KeySpec key{.name = "m", .elements = 600, .shape = {20, 30}, .tile_rows = 16};
    set_rank_limit(key, 2);
    EXPECT_EQ(lay_out_keys({&key, 1}, 64).chunks.size(), 2u);
    kCases[i](key);
    EXPECT_THROW(lay_out_keys({&key, 1}, 64), Error) << "case " << i;
  }
}

TEST(Layout, AnAnswerThatDoesNotFitTogetherIsRefused) {
  const Sample s = sample(7);
  JoinReply good;
  good.layout = routes_of(layout_of(s, false));
  good.spec.keys = s.keys;
  good.spec.chunk_elements = s.chunk_elements;
  const auto full = std::ranges::find_if(good.layout.queue_chunks,
                                         [](const auto& chunks) { return !chunks.empty(); }) -
                    good.layout.queue_chunks.begin();
  const struct {
    const char* says;
    std::function<void(JoinReply&, JobLayout&)> spoil;
  } kCases[] = {
      {"", [](auto&, auto&) {}},
      {"keys", [](auto&, auto& l) { l.key_offset[0] += 32; }},
      {"keys", [](auto&, auto& l) { l.total_elements += 32; }},
      {"keys", [](auto& r, auto&) { r.spec.keys.pop_back(); }},
      {"offsets", [](auto&, auto& l) { l.queue_offset.push_back(0); }},
      {"have a queue", [&](auto&, auto& l) { l.queue_chunks[full].pop_back(); }},
      {"another queue", [&](auto&, auto& l) { l.queue_chunks[full].push_back(0); }},
      {"does not exist", [&](auto&, auto& l) { l.queue_chunks[full][0] = 1u << 30; }},
      {"begins at element", [&](auto&, auto& l) { l.queue_offset[full] = ~uint64_t{0}; }},
      {"rounds", [](auto& r, auto&) { r.first_round = 0; }},
      {"chunks", [](auto& r, auto&) { r.spec.chunk_elements += 1; }},
      {"offsets", [](auto&, auto& l) { l.queue_slots.clear(); }},
      {"begin at byte", [&](auto&, auto& l) { l.queue_slots[full] = ~uint64_t{0}; }},
      {"", [&](auto&, auto& l) { l.queue_shares.assign(l.queue_chunks.size(), 1); }},
      {"offsets", [&](auto&, auto& l) { l.queue_shares.assign(l.queue_chunks.size() + 1, 1); }},
      {"no slot", [&](auto&, auto& l) { l.queue_shares.assign(l.queue_chunks.size(), 0); }},
      {"slots for", [&](auto&, auto& l) { l.queue_shares.assign(l.queue_chunks.size(), ~0u); }},
  };
  for (const auto& [says, spoil] : kCases) {
    JoinReply reply = good;
    spoil(reply, reply.layout);
    std::string message;
    try {
      phub::layout_of(reply);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInternal);
      message = error.what();
    }
    EXPECT_EQ(message.empty(), *says == 0) << message;
    EXPECT_THAT(message, HasSubstr(says));
  }
}

TEST(Layout, InitialParametersFitTheSlotOfEveryFormat) {
  for (const SlotFormat& format : kSlotFormats) {
    for (uint32_t n = 1; n <= 300; ++n) {
      const uint64_t bytes = format.bytes(n);
      const uint32_t parts = initial_parts(n, bytes);
      uint32_t next = 0;
      for (uint32_t part = 0; part < parts; ++part) {
        const InitialPart p = initial_part(n, bytes, part);
        ASSERT_EQ(p.first, next);
        ASSERT_LE(p.count * sizeof(float), slot_room(format, n)) << format.name << " " << n;
        next += p.count;
      }
      ASSERT_EQ(next, n);
      if (format.name == "f32") {
        ASSERT_EQ(parts, 1u);
      }
      if (format.bits == 16) {  // as it always was
        ASSERT_EQ(parts, 2u);
        ASSERT_EQ(initial_part(n, bytes, 0).count, n / 2);
      }
    }
  }
}

// The wire's sizes are those of the functions that read slots.
TEST(Layout, SlotsAreOfTheSizeThatKernelsRead) {
  for (const kernels::Format& format : kernels::kFormats) {
    const SlotFormat* ours = find_slot_format(format.name);
    ASSERT_TRUE(ours) << format.name;
    const kernels::DType dtype = *kernels::parse_format(format.name);
    for (uint64_t n = 1; n <= 1000; ++n) {
      ASSERT_EQ(ours->bytes(n), kernels::slot_bytes(dtype, n)) << format.name << " " << n;
    }
  }
  for (const SlotFormat& ours : kSlotFormats) {
    EXPECT_TRUE(kernels::parse_format(ours.name)) << ours.name;
  }
}

// Where all keys have one plain format, gradients lie as results do.
TEST(Layout, OnePlainFormatLiesAsElementsDo) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Sample s = sample(seed);
    for (KeySpec& key : s.keys) key.format = seed % 2 ? "f32" : "bf16";
    const uint64_t element = seed % 2 ? 4 : 2;
    const Layout layout = layout_of(s, seed % 3 == 0);
    ASSERT_EQ(element_bytes_of_all(layout), element);
    for (const ChunkLayout& chunk : layout.chunks) {
      ASSERT_EQ(chunk.gradient_offset, chunk.offset * element);
      ASSERT_EQ(chunk.slot_offset, chunk.box_offset * element);
      ASSERT_EQ(chunk.slot_bytes, chunk.elements * element);
    }
  }
}

}  // namespace layout_test
}  // namespace phub
