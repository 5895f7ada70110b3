#include "phub/job/membership_log.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>

namespace phub {
namespace membership_log_test {

using Kind = LogRecord::Kind;

// All that is left, page by page.
std::vector<LogRecord> read(MembershipLog& log, uint64_t from = 0) {
  std::vector<LogRecord> all;
  for (LogPage page{.more = true}; page.more;) {
    page = log.page(from + all.size());
    EXPECT_TRUE(all.empty() || page.first == from + all.size());
    EXPECT_TRUE(!page.more || !page.records.empty());
    all.insert(all.end(), page.records.begin(), page.records.end());
  }
  return all;
}

using Left = std::tuple<uint32_t, uint32_t, uint64_t, uint32_t>;  // rank, incarnation, round, chunk

std::set<Left> left_out(const std::vector<LogRecord>& records) {
  std::set<Left> out;
  for (const LogRecord& record : records) {
    EXPECT_EQ(record.kind, Kind::kExcluded);
    for (uint64_t round = record.round; round <= record.last_round; ++round) {
      for (const ChunkSpan& span : record.chunks) {
        for (uint32_t c = span.first; c <= span.last; ++c) {
          EXPECT_TRUE(out.insert({record.rank, record.incarnation, round, c}).second);
        }
      }
    }
  }
  return out;
}

TEST(MembershipLog, ALongReasonCanBeReadAgain) {
  MembershipLog log(10);
  const std::string reason(60000, 'r');
  log.add({.kind = Kind::kFailed, .reason = reason});
  EXPECT_EQ(read(log).at(0).reason, reason);
}

TEST(MembershipLog, ARankThatIsAlwaysLeftOutIsOneRecord) {
  MembershipLog log(10000);
  for (uint64_t round = 1; round <= 500; ++round) {
    for (const uint32_t core : {0u, 1u}) {  // whose chunks alternate
      for (uint32_t chunk = core; chunk < 10000; chunk += 2) log.exclude(3, 1, chunk, round);
    }
  }
  const std::vector<LogRecord> records = read(log);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0], (LogRecord{.kind = Kind::kExcluded,
                                   .round = 1,
                                   .rank = 3,
                                   .incarnation = 1,
                                   .last_round = 500,
                                   .chunks = {{0, 9999}}}));
  EXPECT_LE(log.bytes(), 1000u);
}

TEST(MembershipLog, ExclusionsAreToldExactly) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const auto below = [&](uint32_t n) {
    return std::uniform_int_distribution<uint32_t>(0, n - 1)(random);
  };
  for (int run = 0; run < 50; ++run) {
    std::set<Left> truth;
    std::vector<LogRecord> records;
    uint64_t round = 1;
    const uint32_t chunks = 1 + below(200);
    MembershipLog log(chunks);
    for (int i = 0; i < 2000; ++i) {
      if (below(50) == 0) round += 1 + below(2);
      const uint64_t of = round - std::min<uint64_t>(round - 1, below(4));
      const Left left{below(3), 1 + static_cast<uint32_t>(i / 1000), of, below(chunks)};
      if (truth.insert(left).second) {
        log.exclude(std::get<0>(left), std::get<1>(left), std::get<3>(left), of);
      }
      if (below(500) == 0) {  // reading in between neither loses nor repeats anything
        for (LogRecord& record : read(log, records.size())) records.push_back(std::move(record));
      }
    }
    for (LogRecord& record : read(log, records.size())) records.push_back(std::move(record));
    ASSERT_EQ(left_out(records), truth) << "run " << run;
    ASSERT_EQ(read(log), records) << "run " << run;
  }
}

TEST(MembershipLog, AFullLogDropsItsOldestPagesAndTheNumbersSayIt) {
  MembershipLog log(4);
  uint64_t written = 0;
  const auto write = [&](uint64_t until) {
    for (; written < until; ++written) {
      log.add({.kind = Kind::kHyper, .round = written + 1, .values = {{"lr", 0.5}}});
    }
  };
  write(20000);
  EXPECT_EQ(log.page(0).first, 0u);
  EXPECT_GE(log.bytes(), 20000u * 50);
  log.limit(200000);
  EXPECT_LE(log.bytes(), 200000u);
  const LogPage oldest = log.page(0);
  EXPECT_GT(oldest.first, 0u);
  ASSERT_FALSE(oldest.records.empty());
  EXPECT_EQ(oldest.records.front().round, oldest.first + 1);
  const std::vector<LogRecord> kept = read(log, oldest.first);
  EXPECT_EQ(oldest.first + kept.size(), written);
  // Whoever reads along loses nothing.
  EXPECT_EQ(log.page(written).first, written);
  EXPECT_TRUE(log.page(written).records.empty());
  const uint64_t from = written;
  write(from + 10);
  const LogPage newest = log.page(from);
  EXPECT_EQ(newest.first, from);
  EXPECT_EQ(newest.records.size(), 10u);
}

// A million records: each page is small, and the log never holds more than it may.
TEST(MembershipLog, IsBounded) {
  MembershipLog log(4);
  const std::string name(4000, 'x');
  uint64_t most = 0;
  for (uint64_t round = 1; round <= 40'000; ++round) {
    log.add({.kind = Kind::kHyper, .round = round, .values = {{name, 1.0 / round}}});
    most = std::max(most, log.bytes());
  }
  EXPECT_LE(most, MembershipLog::kMostBytes + 4 * MembershipLog::kPageBytes);
  const LogPage page = log.page(39'000);
  EXPECT_LE(page.records.size(), 2000u);
  EXPECT_GT(log.page(0).first, 0u);
}

TEST(MembershipLog, ALossWithManyRangesIsToldInParts) {
  MembershipLog log(5000);
  std::vector<uint64_t> last(5000);
  for (uint32_t c = 0; c < 5000; ++c) last[c] = 7 + c % 2;
  log.add({.kind = Kind::kLost, .rank = 2, .incarnation = 1, .last_rounds = ranges_of(last)});
  const std::vector<LogRecord> records = read(log);
  EXPECT_EQ(records.size(), (5000 + MembershipLog::kMostRanges - 1) / MembershipLog::kMostRanges);
  std::vector<uint64_t> told;
  for (const LogRecord& record : records) {
    EXPECT_EQ(record.rank, 2u);
    EXPECT_LE(record.last_rounds.size(), MembershipLog::kMostRanges);
    for (const ChunkRange& range : record.last_rounds) {
      ASSERT_EQ(range.first, told.size());
      told.resize(range.last + 1, range.round);
    }
  }
  EXPECT_EQ(told, last);
}

TEST(MembershipLog, LateRoundsInARowMakeOneRecord) {
  MembershipLog log(2);
  for (const uint64_t round : {3, 4, 5, 9}) log.note_late(1, 1, 0, round);
  log.note_late(2, 1, 0, 5);
  log.note_late(2, 1, 3, 5);  // of another fragment
  log.note_late(2, 1, 0, 6);
  log.note_late(1, 2, 0, 10);
  std::vector<LogRecord> records = log.page(0).records;
  std::ranges::sort(records, {}, [](const LogRecord& r) { return std::pair(r.rank, r.round); });
  const auto late = [](uint32_t rank, uint32_t incarnation, uint64_t first, uint64_t last,
                       uint32_t fragment = 0) {
    return LogRecord{.kind = LogRecord::Kind::kLate,
                     .round = first,
                     .rank = rank,
                     .incarnation = incarnation,
                     .last_round = last,
                     .fragment = fragment};
  };
  EXPECT_EQ(records, (std::vector{late(1, 1, 3, 5), late(1, 1, 9, 9), late(1, 2, 10, 10),
                                  late(2, 1, 5, 6), late(2, 1, 5, 5, 3)}));
}

}  // namespace membership_log_test
}  // namespace phub
