#include "worker/geeps/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace phub::geeps {
namespace packing_test {

bool share_a_phase(const Span& a, const Span& b, uint32_t phases) {
  for (uint32_t i = 0; i < a.length; ++i) {
    for (uint32_t j = 0; j < b.length; ++j) {
      if ((a.first_phase + i) % phases == (b.first_phase + j) % phases) return true;
    }
  }
  return false;
}

std::vector<Span> random_spans(std::mt19937& engine, uint32_t phases, size_t most) {
  std::vector<Span> spans(1 + engine() % most);
  for (Span& span : spans) {
    span = {static_cast<uint32_t>(engine() % phases), static_cast<uint32_t>(1 + engine() % phases),
            1 + engine() % 20};
  }
  return spans;
}

// Some order of first fits is the best packing: that of its offsets.
uint64_t best_height(const std::vector<Span>& spans, uint32_t phases) {
  std::vector<size_t> order(spans.size());
  std::iota(order.begin(), order.end(), 0u);
  uint64_t best = UINT64_MAX;
  do {
    std::vector<uint64_t> offsets(spans.size());
    uint64_t height = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      const Span& span = spans[order[i]];
      uint64_t offset = 0;
      bool moved = true;
      while (moved) {
        moved = false;
        for (size_t j = 0; j < i; ++j) {
          const uint64_t begin = offsets[order[j]];
          const uint64_t end = begin + spans[order[j]].bytes;
          if (offset < end && begin < offset + span.bytes &&
              share_a_phase(span, spans[order[j]], phases)) {
            offset = end;
            moved = true;
          }
        }
      }
      offsets[order[i]] = offset;
      height = std::max(height, offset + span.bytes);
    }
    best = std::min(best, height);
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

TEST(Packing, BuffersThatAreLiveTogetherNeverOverlap) {
  std::mt19937 engine(3);
  for (int round = 0; round < 2000; ++round) {
    const uint32_t phases = 1 + engine() % 12;
    const auto spans = random_spans(engine, phases, 30);
    const Packing packing = pack(spans, phases);
    ASSERT_EQ(packing.offsets.size(), spans.size());
    uint64_t height = 0;
    for (size_t a = 0; a < spans.size(); ++a) {
      height = std::max(height, packing.offsets[a] + spans[a].bytes);
      for (size_t b = 0; b < a; ++b) {
        if (!share_a_phase(spans[a], spans[b], phases)) continue;
        ASSERT_TRUE(packing.offsets[a] + spans[a].bytes <= packing.offsets[b] ||
                    packing.offsets[b] + spans[b].bytes <= packing.offsets[a])
            << "round " << round << ": " << a << " and " << b;
      }
    }
    ASSERT_EQ(packing.height, height);
    const auto live = loads(spans, phases);
    ASSERT_GE(packing.height, *std::max_element(live.begin(), live.end()));
  }
}

TEST(Packing, IsCloseToTheBest) {
  std::mt19937 engine(4);
  uint64_t sum = 0;
  uint64_t best_sum = 0;
  for (int round = 0; round < 400; ++round) {
    const uint32_t phases = 1 + engine() % 6;
    const auto spans = random_spans(engine, phases, 6);
    const uint64_t height = pack(spans, phases).height;
    const uint64_t best = best_height(spans, phases);
    ASSERT_GE(height, best);
    ASSERT_LE(height, best * 5 / 4) << "round " << round;
    sum += height;
    best_sum += best;
  }
  EXPECT_LE(static_cast<double>(sum), 1.01 * static_cast<double>(best_sum));
}

TEST(Packing, WithALimitItIsTheSameOrNone) {
  std::mt19937 engine(5);
  for (int round = 0; round < 500; ++round) {
    const uint32_t phases = 1 + engine() % 12;
    const auto spans = random_spans(engine, phases, 30);
    const Packing packing = pack(spans, phases);
    const uint64_t more = engine() % 3;
    const auto fits = pack(spans, phases, packing.height + more);
    ASSERT_TRUE(fits.has_value()) << "round " << round;
    ASSERT_EQ(fits->height, packing.height);
    ASSERT_EQ(fits->offsets, packing.offsets);
    if (packing.height > 0) {
      ASSERT_FALSE(pack(spans, phases, packing.height - 1)) << "round " << round;
    }
  }
}

TEST(Packing, LoadsGoOverTheEndOfTheCircle) {
  const std::vector<Span> spans = {{2, 2, 10}, {0, 1, 1}, {1, 3, 100}};
  EXPECT_EQ(loads(spans, 3), (std::vector<uint64_t>{111, 100, 110}));
  EXPECT_EQ(pack({}, 3).height, 0u);
}

}  // namespace packing_test
}  // namespace phub::geeps
