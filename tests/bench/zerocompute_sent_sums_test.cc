// The sums that zerocompute compares with, against the scalar oracle of the tests.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "bench/zerocompute/compact_gradients.h"
#include "bench/zerocompute/gradients.h"
#include "bench/zerocompute/sent_sums.h"
#include "tests/oracle/coded.h"
#include "tests/oracle/groups.h"
#include "tests/seeds.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace zerocompute_sent_sums_test {

using kernels::DType;

constexpr uint64_t kPattern = 12345;

KeySpec matrix(const std::string& name, uint64_t rows, uint64_t columns) {
  return {.name = name, .elements = rows * columns, .shape = {rows, columns}};
}

// Some keys of each kind, with tiles of two sizes.
JobSpec some_job(std::mt19937_64& random, uint32_t ranks, const std::string& format) {
  JobSpec spec{.name = "zerocompute", .world_size = ranks, .chunk_elements = 64};
  spec.gradient_dtype = format;
  spec.keys = {{.name = "a", .elements = 1 + random() % 200},
               matrix("factors", 1 + random() % 90, 1 + random() % 30),
               {.name = "b", .elements = 1 + random() % 200},
               matrix("rows", 2 + random() % 90, 1 + random() % 30)};
  set_rank_limit(spec.keys[1], static_cast<uint32_t>(1 + random() % 5));
  set_rows_limit(spec.keys[3], static_cast<uint32_t>(1 + random() % spec.keys[3].shape[0]), false);
  for (const size_t k : {1, 3}) {
    KeySpec& key = spec.keys[k];
    key.tile_rows = static_cast<uint32_t>(
        std::min<uint64_t>(rows_together(key) * (1 + random() % 2), key.shape[0]));
  }
  return spec;
}

// The slot that a rank sends of a chunk, element by element; of a coded one, what it decodes to.
std::vector<std::byte> slot_of(const JobSpec& spec, const ChunkPlace& chunk, uint32_t rank,
                               uint64_t round, uint64_t key_first, std::span<float> residual) {
  const KeySpec& key = spec.keys[chunk.key];
  const auto value = [&](uint64_t element) {
    return static_cast<float>(gradient_value(rank, round, kPattern + key_first + element));
  };
  if (!chunk.is_compact()) {
    std::vector<float> gradient;
    for (uint64_t i = 0; i < chunk.elements; ++i) gradient.push_back(value(chunk.begin + i));
    if (is_coded(spec, chunk.key)) {
      gradient = send_coded(spec, chunk, rank, round, gradient, residual);
    }
    const auto bytes = std::as_bytes(std::span(gradient));
    return {bytes.begin(), bytes.end()};
  }
  std::vector<std::byte> slot(sent_bytes(spec, chunk));
  const uint64_t first_row = chunk.begin / key.shape[1];
  if (is_factors(key)) {
    const reference::Factors& factors = chunk.factors;
    for (size_t p = 0; p < factors.pairs; ++p) {
      for (size_t i = 0; i < factors.rows; ++i) {
        factors.left(slot.data(), p)[i] = value(p * key.shape[0] + first_row + i);
      }
      for (size_t j = 0; j < factors.columns; ++j) {
        factors.right(slot.data(), p)[j] =
            value(factors.pairs * key.shape[0] + p * factors.columns + j);
      }
    }
    factors.set_count(slot.data(), key.rank_limit);
    return slot;
  }
  const std::vector<int64_t> rows = rows_of_rank(rank, round, chunk.key, key);
  uint32_t count = 0;
  for (const int64_t row : rows) {
    const uint64_t here = static_cast<uint64_t>(row) - first_row;
    if (static_cast<uint64_t>(row) < first_row || here >= chunk.rows.rows) continue;
    chunk.rows.set_row(slot.data(), count, static_cast<uint32_t>(here));
    for (size_t j = 0; j < chunk.rows.columns; ++j) {
      chunk.rows.elements(slot.data(), count)[j] =
          value(static_cast<uint64_t>(row) * chunk.rows.columns + j);
    }
    ++count;
  }
  chunk.rows.set_count(slot.data(), count);
  return slot;
}

std::vector<float> expected_sum(const reference::Group& group, const ChunkPlace& chunk,
                                const std::vector<std::vector<std::byte>>& slots) {
  std::vector<const void*> pointers;
  for (const auto& slot : slots) pointers.push_back(slot.data());
  std::vector<float> sum(chunk.elements);
  if (chunk.factors.pairs > 0) {
    reference::sum(group, pointers, chunk.factors, 1, sum.data());
  } else if (chunk.rows.columns > 0) {
    reference::sum(group, pointers, chunk.rows, 1, sum.data());
  } else {
    reference::sum(group, pointers, DType::kF32, 1, sum.data(), chunk.elements);
  }
  return sum;
}

TEST(SentSums, AreThoseOfTheOracle) {
  const auto seeds = testing::fresh_seeds(60);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE("PHUB_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto ranks = static_cast<uint32_t>(1 + random() % 6);
    const char* const kFormats[] = {"f32", "int8", "int4", "fp8-e4m3", "topk"};
    const JobSpec spec = some_job(random, ranks, kFormats[random() % 5]);
    std::string groups;
    if (random() % 2 == 0) {
      groups = reference::some_groups(ranks, [&random](uint64_t n) { return random() % n; });
    }
    SCOPED_TRACE(spec.gradient_dtype + ", groups " + groups);
    const DType format = *kernels::parse_format(spec.gradient_dtype);
    const uint64_t elements = elements_of(spec);
    std::vector<float> memory(SentSums::floats(elements, ranks, format));
    SentSums sums({.ranks = ranks,
                   .format = format,
                   .groups = groups,
                   .pattern_first = kPattern,
                   .keys = spec.keys,
                   .chunk_elements = spec.chunk_elements},
                  memory.data());
    std::vector<std::vector<float>> residuals(ranks, std::vector<float>(elements));
    std::vector<uint64_t> key_first;
    uint64_t so_far = 0;
    for (const KeySpec& key : spec.keys) {
      key_first.push_back(so_far);
      so_far += key.elements;
    }
    const reference::Group group = reference::parse_groups(groups, ranks);
    for (uint64_t round = 1; round <= 3; ++round) {
      const uint64_t middle = random() % elements;  // in two parts
      sums.advance(round, 0, middle);
      sums.advance(round, middle, elements - middle);
      for (const ChunkPlace& chunk : chunks_of(spec)) {
        const uint64_t first = key_first[chunk.key] + chunk.begin;
        std::vector<std::vector<std::byte>> slots;
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          slots.push_back(slot_of(spec, chunk, rank, round, key_first[chunk.key],
                                  std::span(residuals[rank]).subspan(first, chunk.elements)));
        }
        const std::vector<float> want = expected_sum(group, chunk, slots);
        ASSERT_EQ(std::memcmp(want.data(), sums.sums() + first, 4 * want.size()), 0)
            << "round " << round << ", key " << spec.keys[chunk.key].name << ", element "
            << chunk.begin;
      }
    }
  }
}

TEST(SentSums, RowsAreDifferentOnesAndOfTheMatrix) {
  KeySpec key = matrix("rows", 1000, 3);
  set_rows_limit(key, 300, false);
  std::set<std::vector<int64_t>> all;
  std::vector<int> drawn(1000);
  for (uint32_t rank = 0; rank < 5; ++rank) {
    for (uint64_t round = 1; round <= 20; ++round) {
      const std::vector<int64_t> rows = rows_of_rank(rank, round, 7, key);
      ASSERT_EQ(rows.size(), 300u);
      ASSERT_TRUE(std::ranges::adjacent_find(rows, std::ranges::greater_equal()) == rows.end());
      ASSERT_GE(rows.front(), 0);
      ASSERT_LT(rows.back(), 1000);
      ASSERT_TRUE(all.insert(rows).second) << "others of each rank and round";
      for (const int64_t row : rows) ++drawn[static_cast<size_t>(row)];
    }
  }
  // 100 draws, each with 30%: all rows come, and none always. (The numbers are the same each time.)
  EXPECT_GT(*std::ranges::min_element(drawn), 5);
  EXPECT_LT(*std::ranges::max_element(drawn), 60);
  set_rows_limit(key, 1000, false);
  EXPECT_EQ(rows_of_rank(0, 1, 7, key).size(), 1000u);
}

}  // namespace zerocompute_sent_sums_test
}  // namespace phub
