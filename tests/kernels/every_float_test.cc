// The codes of all floats, at scales that are fixed by a chunk's first element, and what is left of
// them. An ordinary run takes a random sample, PHUB_TEST_SCALE=1000 all 2^32 (scripts/proof
// formats).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "kernels/encode.h"
#include "kernels/kernels.h"
#include "tests/kernels/arrays.h"
#include "tests/kernels/slots.h"
#include "tests/seeds.h"

namespace phub::kernels {
namespace every_float_test {

// All floats in blocks of kBlock, those above a block's scale in chunks of their own.
constexpr uint64_t kBlock = 1 << 16;
constexpr uint64_t kBlocks = (uint64_t{1} << 32) / kBlock;
constexpr uint64_t kSample = 66;  // blocks of an ordinary run, of each format and scale

uint64_t blocks_wanted() { return std::min(kBlocks, testing::scaled(kSample)); }

// The codes and residuals of `x`, whose largest magnitude comes first.
void check(DType type, const std::vector<float>& x) {
  const size_t n = x.size();
  std::vector<uint8_t> slot(slot_bytes(type, n));
  std::vector<float> residual(n, -0.0f);  // leaves x as it is, -0 too
  ASSERT_TRUE(encode(x.data(), residual.data(), type, {}, slot.data(), n));
  float scale;
  std::memcpy(&scale, slot.data() + slot.size() - 4, 4);
  ASSERT_EQ(scale, reference::scale_of(type, x[0]));
  for (size_t i = 0; i < n; ++i) {
    const size_t bits = format_of(type).bits;
    uint32_t code = bits == 4 ? slot[i / 2] >> (i % 2 * 4) : slot[i];
    if (bits == 32) std::memcpy(&code, slot.data() + 4 * i, 4);
    const uint32_t mask = ~0u >> (32 - bits);
    ASSERT_EQ(code & mask, reference::code_of(type, x[i], scale, nullptr) & mask)
        << name_of(type) << " of " << x[i] << ", scale " << scale;
    const float sent = reference::value_of_code(type, code) * scale;
    ASSERT_EQ(std::bit_cast<uint32_t>(residual[i]), std::bit_cast<uint32_t>(x[i] - sent)) << x[i];
  }
}

// Each float once: up to `largest` at the scale that it gives, above at that of the largest float.
void check_block(DType type, float largest, uint64_t block) {
  std::vector<float> low = {largest}, high = {std::numeric_limits<float>::max()};
  for (uint64_t i = 0; i < kBlock; ++i) {
    const auto x = std::bit_cast<float>(static_cast<uint32_t>(block * kBlock + i));
    if (std::isfinite(x)) (std::fabs(x) <= largest ? low : high).push_back(x);
  }
  check(type, low);
  if (high.size() > 1) check(type, high);
}

void check_all(DType type, float largest) {
  const phub::testing::Seeds seeds = phub::testing::fresh_seeds(1);
  const uint64_t wanted = blocks_wanted();
  std::atomic<uint64_t> next{0};
  std::mt19937_64 random(seeds.first);
  std::vector<uint64_t> sample(wanted);
  for (uint64_t i = 0; i < wanted; ++i) sample[i] = wanted == kBlocks ? i : random() % kBlocks;
  // Where rounding happens: a few binades around 1, and the subnormals.
  if (wanted < kBlocks) {
    for (uint64_t i = 0; i < wanted; i += 2) sample[i] = 0x3800 + random() % 0x0C00;
    sample[0] = 0;
    sample[1] = kBlocks / 2;  // -0
  }
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (uint64_t i; (i = next.fetch_add(1)) < wanted;) {
        if (!::testing::Test::HasFatalFailure()) check_block(type, largest, sample[i]);
      }
    });
  }
}

TEST(EveryFloat, Fp8E4M3) { check_all(DType::kFp8E4M3, 448.0f); }
TEST(EveryFloat, Fp8E5M2) { check_all(DType::kFp8E5M2, 57344.0f); }
TEST(EveryFloat, Int32) { check_all(DType::kInt32, 4194303.0f); }
TEST(EveryFloat, Int8) { check_all(DType::kInt8, 127.0f); }
TEST(EveryFloat, Int4) { check_all(DType::kInt4, 7.0f); }
TEST(EveryFloat, AtAScaleThatIsNoPowerOfTwo) {
  check_all(DType::kInt8, 1.3f);
  check_all(DType::kInt4, 0.9f);
}

}  // namespace every_float_test
}  // namespace phub::kernels
