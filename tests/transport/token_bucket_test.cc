// The token bucket against an oracle that knows only what went when: in no window of time was it
// more than the burst and what the rate gives in that time. And what a rate may be written as.
#include "transport/paced/token_bucket.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "transport/paced/nic_budget.h"
#include "transport/sim/net.h"

namespace phub {
namespace token_bucket_test {

struct Went {
  uint64_t ns = 0, bytes = 0;
};

// Every window that begins and ends with something that went.
void expect_within(const std::vector<Went>& all, uint64_t rate, uint64_t burst) {
  for (size_t first = 0; first < all.size(); ++first) {
    uint64_t bytes = 0;
    for (size_t last = first; last < all.size(); ++last) {
      bytes += all[last].bytes;
      const auto ns = static_cast<long double>(all[last].ns - all[first].ns);
      ASSERT_LE(bytes, burst + static_cast<long double>(rate) * ns / 1e9L)
          << "from " << first << " to " << last;
    }
  }
}

class RandomBuckets : public ::testing::Test {
 protected:
  static constexpr uint64_t kTries = 600;
};

// Asks at times of its own, for whatever it likes.
TEST_F(RandomBuckets, LetNoMoreGoInAnyWindow) {
  const auto seeds = testing::fresh_seeds(40);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(seed);
    SimRandom random(seed);
    const uint64_t rate = random.between(1, uint64_t{1} << random.between(1, 40));
    const uint64_t burst = random.between(1, uint64_t{1} << random.between(1, 24));
    TokenBucket bucket(rate, burst);
    std::vector<Went> went;
    uint64_t now = random.below(1'000'000'000'000);
    uint64_t largest = burst;
    for (uint64_t i = 0; i < kTries; ++i) {
      const uint64_t bytes = random.between(1, random.chance(0.05) ? 3 * burst : burst);
      if (bucket.take(bytes, now)) {
        went.push_back({now, bytes});
        largest = std::max(largest, bytes);
      }
      const uint64_t fill_ns = burst * 1'000'000'000 / rate;
      now += random.chance(0.3) ? 0 : random.below(1 + fill_ns / random.between(1, 50));
    }
    ASSERT_FALSE(went.empty());
    expect_within(went, rate, largest);
  }
}

// Waits for as long as it is told, and not a nanosecond longer.
TEST_F(RandomBuckets, TellWhenTheNextMayGo) {
  const auto seeds = testing::fresh_seeds(40);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(seed);
    SimRandom random(seed);
    const uint64_t rate = random.between(1'000, 1'000'000'000);
    const uint64_t burst = random.between(1'000, 1'000'000);
    TokenBucket bucket(rate, burst);
    const uint64_t start = random.below(1'000'000);
    uint64_t now = start, sent = 0, last = 0;
    for (uint64_t i = 0; i < kTries; ++i) {
      const uint64_t bytes = random.between(1, burst);
      const uint64_t wait = bucket.wait_ns(bytes, now);
      if (wait > 0) {
        TokenBucket early = bucket;
        ASSERT_FALSE(early.take(bytes, now + wait - 1));
      }
      now += wait;
      ASSERT_TRUE(bucket.take(bytes, now));
      sent += bytes, last = bytes;
    }
    // Nothing was left unused but what a nanosecond is too coarse for.
    const long double given = burst + static_cast<long double>(rate) * (now - start) / 1e9L;
    EXPECT_LE(given - sent, static_cast<long double>(kTries * rate) / 1e9L + burst) << last;
    EXPECT_GE(given + 1e-6L, sent);
  }
}

TEST(TokenBucket, FillsUpToItsBurstAndNoFurther) {
  TokenBucket bucket(1'000'000, 500);
  EXPECT_EQ(bucket.available(7), 500);
  EXPECT_TRUE(bucket.take(500, 7));
  EXPECT_EQ(bucket.wait_ns(1, 7), 1'000u);
  EXPECT_EQ(bucket.available(100'007), 100);
  EXPECT_EQ(bucket.available(~uint64_t{0}), 500);
}

TEST(TokenBucket, LetsALargeWriteGoWhenItIsFullAndThenMakesUpForIt) {
  TokenBucket bucket(1'000'000, 500);
  EXPECT_TRUE(bucket.take(100, 0));
  EXPECT_EQ(bucket.wait_ns(2'000, 0), 100'000u);
  EXPECT_TRUE(bucket.take(2'000, 100'000));
  EXPECT_EQ(bucket.available(100'000), -1'500);
  EXPECT_EQ(bucket.wait_ns(500, 100'000), 2'000'000u);
}

TEST(TokenBucket, AChangeOfItsRateHoldsFromThenOn) {
  TokenBucket bucket(1'000'000, 1'000);
  EXPECT_TRUE(bucket.take(1'000, 0));
  bucket.change(2'000'000, 400, 100'000);  // 100 of the old rate
  EXPECT_EQ(bucket.available(100'000), 100);
  EXPECT_EQ(bucket.available(200'000), 300);
  EXPECT_EQ(bucket.available(900'000), 400);
}

TEST(NicBudget, IsWrittenInBitsOrBytes) {
  EXPECT_EQ(parse_rate("1gbit"), 125'000'000u);
  EXPECT_EQ(parse_rate("0.25gbit"), 31'250'000u);
  EXPECT_EQ(parse_rate("250mbit"), 31'250'000u);
  EXPECT_EQ(parse_rate("800kbit"), 100'000u);
  EXPECT_EQ(parse_rate("12500000"), 12'500'000u);
  EXPECT_EQ(describe_rate(31'250'000), "250 Mbit/s");
  for (const char* text : {"", "gbit", "1 gbit", "1gbits", "-1mbit", "1e3mbit", "nan", "1G"}) {
    testing::expect_error(ErrorCode::kInvalid, "is not a rate: 1gbit, 250mbit",
                          [&] { parse_rate(text); });
  }
  EXPECT_THROW(parse_rate("999"), Error);
  EXPECT_THROW(parse_rate("9000000gbit"), Error);
}

// As tcpdump shows them: 14 + 20 + 32 bytes before each 1,448.
TEST(NicBudget, CountsHeaders) {
  EXPECT_EQ(wire_bytes(0), 16u + 66);
  EXPECT_EQ(wire_bytes(1432), 1448u + 66);
  EXPECT_EQ(wire_bytes(1433), 1449u + 2 * 66);
  EXPECT_EQ(wire_bytes(32768), 32784u + 23 * 66);
}

}  // namespace token_bucket_test
}  // namespace phub
