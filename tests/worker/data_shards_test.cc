// What every rank takes of the data, as lists of all ranks: each sample once an epoch, whatever
// the batches and however often the world changes in between; what a cursor goes on with, and which
// it refuses; and real jobs whose server is killed.
#include "worker/data_shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"

namespace phub::testing {
namespace data_shards_test {

using ::testing::ElementsAreArray;

using Numbers = std::vector<uint64_t>;

Numbers all_of(uint64_t samples) {
  Numbers all(samples);
  std::iota(all.begin(), all.end(), 0);
  return all;
}
Numbers sorted(Numbers numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}
void append(Numbers& to, const Numbers& from) { to.insert(to.end(), from.begin(), from.end()); }

// The order of an epoch, by one rank that takes all.
Numbers order_of(DataOptions options, uint64_t epoch) {
  if (options.partition == Partition::kShared) options.rank = 0, options.world_size = 1;
  options.drop_last = false;
  DataShards shards(options);
  shards.skip(epoch, options.samples);
  return shards.next(options.samples);
}

DataOptions drawn(std::mt19937_64& random) {
  DataOptions options = {.samples = 1 + random() % 200,
                         .world_size = 1 + static_cast<uint32_t>(random() % 9),
                         .partition = random() % 4 == 0 ? Partition::kPrivate : Partition::kShared,
                         .seed = random(),
                         .shuffle = random() % 4 != 0,
                         .drop_last = random() % 2 == 0};
  options.rank = static_cast<uint32_t>(random() % options.world_size);
  if (options.drop_last) options.samples += options.world_size;
  return options;
}

// One for each rank.
std::vector<DataShards> world_of(DataOptions options) {
  std::vector<DataShards> world;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    world.emplace_back(options);
  }
  return world;
}

TEST(DataShards, EveryEpochHasEverySampleOnceOverAllRanks) {
  for (Seeds seeds = fresh_seeds(300); seeds.first < seeds.end(); ++seeds.first, --seeds.count) {
    SCOPED_TRACE(seeds.first);
    std::mt19937_64 random(seeds.first);
    DataOptions options = drawn(random);
    options.partition = Partition::kShared;
    std::vector<DataShards> world = world_of(options);
    const uint64_t samples = options.samples, ranks = options.world_size;
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      Numbers taken;
      while (world[0].epoch() == epoch) {
        const size_t batch = 1 + random() % 20;
        const uint64_t left = world[0].left();
        for (DataShards& shards : world) {
          const Numbers mine = shards.next(batch);
          EXPECT_EQ(mine.size(), std::min<uint64_t>(batch, left));
          append(taken, mine);
        }
      }
      for (const DataShards& shards : world) EXPECT_EQ(shards.epoch(), epoch + 1);
      Numbers expected = order_of(options, epoch);
      EXPECT_EQ(sorted(expected), all_of(samples));
      const Numbers order = expected;
      if (options.drop_last) {
        expected.resize(samples / ranks * ranks);
      } else {
        for (uint64_t n = 0; expected.size() % ranks != 0; ++n) {
          expected.push_back(order[n % samples]);
        }
      }
      EXPECT_EQ(sorted(taken), sorted(expected));
    }
  }
}

TEST(DataShards, PrivateSamplesAreEachRanksOwn) {
  const uint64_t seed = fresh_seeds(1).first;
  std::vector<Numbers> orders;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    DataShards shards({.samples = 90 + 10 * rank,
                       .rank = rank,
                       .world_size = 3,
                       .partition = Partition::kPrivate,
                       .seed = seed,
                       .drop_last = true});
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      Numbers taken;
      while (shards.epoch() == epoch) append(taken, shards.next(16));
      EXPECT_EQ(sorted(taken), all_of(90 + 10 * rank));
      taken.resize(20);
      orders.push_back(taken);
    }
  }
  const auto same_count = [&](uint32_t rank) {
    return order_of({.samples = 100,
                     .rank = rank,
                     .world_size = 3,
                     .partition = Partition::kPrivate,
                     .seed = seed},
                    0);
  };
  EXPECT_NE(same_count(0), same_count(1));
  for (size_t i = 0; i < orders.size(); ++i) {
    for (size_t k = 0; k < i; ++k) EXPECT_NE(orders[i], orders[k]) << i << " and " << k;
  }
}

// The sum of (observed - expected)² / expected as standard deviations of a normal distribution, by
// Wilson and Hilferty's cube root: its own tail is long where there are few counts.
double deviation(const std::map<Numbers, uint64_t>& counts) {
  double total = 0;
  for (const auto& [what, count] : counts) total += static_cast<double>(count);
  const double expected = total / static_cast<double>(counts.size());
  double sum = 0;
  for (const auto& [what, count] : counts) sum += std::pow(count - expected, 2);
  const auto freedom = static_cast<double>(counts.size() - 1);
  const double variance = 2 / (9 * freedom);
  return (std::cbrt(sum / expected / freedom) - (1 - variance)) / std::sqrt(variance);
}

// Over many seeds: whole orders, where there are few of them; else the two samples at the front,
// and those at two other places.
TEST(DataShards, AllOrdersAreAsLikely) {
  constexpr double kMostDeviation = 6;
  const uint64_t seed = fresh_seeds(1).first;
  for (const uint64_t samples : {2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 32, 33}) {
    SCOPED_TRACE(samples);
    std::map<Numbers, uint64_t> orders, fronts, others;
    for (uint64_t each = 0; each < 40'000; ++each) {
      const Numbers order = order_of({.samples = samples, .seed = seed + each}, each % 3);
      ++fronts[{order[0], order[1]}];
      ++others[{order[samples / 2 - 1], order[samples - 1]}];
      if (samples <= 5) ++orders[order];
    }
    EXPECT_EQ(fronts.size(), samples * (samples - 1));
    EXPECT_EQ(others.size(), samples * (samples - 1));
    EXPECT_LT(std::abs(deviation(fronts)), kMostDeviation);
    EXPECT_LT(std::abs(deviation(others)), kMostDeviation);
    if (samples > 5) continue;
    EXPECT_EQ(static_cast<double>(orders.size()), std::tgamma(samples + 1));
    EXPECT_LT(std::abs(deviation(orders)), kMostDeviation);
  }
}

TEST(DataShards, LargeDataCostsNothingAndIsSpreadEvenly) {
  const uint64_t seed = fresh_seeds(1).first;
  for (const uint64_t samples :
       {uint64_t{1'000'000'000}, (uint64_t{1} << 40) + 1, uint64_t{1} << 62}) {
    DataShards shards({.samples = samples, .rank = 6, .world_size = 7, .seed = seed});
    const Numbers taken = shards.next(100'000);
    EXPECT_EQ(std::set<uint64_t>(taken.begin(), taken.end()).size(), taken.size());
    EXPECT_LT(*std::max_element(taken.begin(), taken.end()), samples);
    std::map<Numbers, uint64_t> parts, steps;
    for (size_t i = 0; i < taken.size(); ++i) {
      ++parts[{taken[i] / (samples / 64 + 1)}];
      if (i == 0) continue;
      ++steps[{(taken[i] + samples - taken[i - 1]) % samples / (samples / 64 + 1)}];
    }
    EXPECT_EQ(parts.size(), 64u);
    EXPECT_LT(std::abs(deviation(parts)), 6) << samples;
    EXPECT_LT(std::abs(deviation(steps)), 6) << samples;
    shards.skip(samples / 7 / 100'000 - 1, 100'000);  // to the end of the epoch
    EXPECT_EQ(shards.epoch(), 0u);
    EXPECT_LE(shards.left(), 200'000u);
    shards.next(200'000);
    EXPECT_EQ(shards.epoch(), 1u);
  }
}

TEST(DataShards, ARestartAtEveryPositionGoesOnWithTheSameSamples) {
  for (Seeds seeds = fresh_seeds(60); seeds.first < seeds.end(); ++seeds.first, --seeds.count) {
    SCOPED_TRACE(seeds.first);
    std::mt19937_64 random(seeds.first);
    const DataOptions options = drawn(random);
    DataShards undisturbed(options);
    std::vector<size_t> batches;
    std::vector<Numbers> taken;
    std::vector<std::vector<std::byte>> cursors;
    while (undisturbed.epoch() < 3) {
      cursors.push_back(undisturbed.cursor());
      EXPECT_EQ(cursors.back().size(), DataShards::kCursorBytes);
      batches.push_back(1 + random() % 20);
      taken.push_back(undisturbed.next(batches.back()));
    }
    for (size_t from = 0; from < cursors.size(); ++from) {
      DataShards again(options);
      again.skip(random() % 5, 3);  // wherever it is
      again.restore(cursors[from]);
      EXPECT_EQ(again.cursor(), cursors[from]);
      for (size_t i = from; i < taken.size(); ++i) ASSERT_EQ(again.next(batches[i]), taken[i]);
    }
  }
}

TEST(DataShards, SkippedBatchesAreThoseThatWouldHaveCome) {
  for (Seeds seeds = fresh_seeds(200); seeds.first < seeds.end(); ++seeds.first, --seeds.count) {
    SCOPED_TRACE(seeds.first);
    std::mt19937_64 random(seeds.first);
    const DataOptions options = drawn(random);
    DataShards one(options), other(options);
    for (int turn = 0; turn < 5; ++turn) {
      const size_t batch = 1 + random() % 30;
      const uint64_t batches = random() % 60;
      for (uint64_t i = 0; i < batches; ++i) one.next(batch);
      other.skip(batches, batch);
      ASSERT_EQ(one.cursor(), other.cursor());
    }
    EXPECT_EQ(one.next(7), other.next(7));
  }
}

// With other ranks every few batches, an epoch still has each sample once. Only where the ranks of
// its end do not divide what is left, some come twice, or are left out.
TEST(DataShards, AnotherWorldGoesOnInTheMiddleOfAnEpoch) {
  for (Seeds seeds = fresh_seeds(300); seeds.first < seeds.end(); ++seeds.first, --seeds.count) {
    SCOPED_TRACE(seeds.first);
    std::mt19937_64 random(seeds.first);
    DataOptions options = drawn(random);
    options.partition = Partition::kShared;
    options.samples += 9;  // not fewer than ranks
    std::vector<DataShards> world = world_of(options);
    std::map<uint64_t, Numbers> taken;  // by epoch
    uint32_t most_ranks = options.world_size;
    while (world[0].epoch() < 3) {
      for (uint64_t turn = random() % 4; turn > 0 && world[0].epoch() < 3; --turn) {
        const size_t batch = 1 + random() % 8;
        const uint64_t epoch = world[0].epoch();
        for (DataShards& shards : world) append(taken[epoch], shards.next(batch));
      }
      const auto cursor = world[random() % world.size()].cursor();
      options.world_size = 1 + static_cast<uint32_t>(random() % 9);
      most_ranks = std::max(most_ranks, options.world_size);
      world = world_of(options);
      for (DataShards& shards : world) shards.restore(cursor);
    }
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::map<uint64_t, uint64_t> times;
      for (const uint64_t sample : taken[epoch]) ++times[sample];
      if (options.drop_last) {
        EXPECT_EQ(times.size(), taken[epoch].size()) << "a sample came twice";
        EXPECT_GT(times.size() + most_ranks, options.samples);
      } else {
        EXPECT_EQ(times.size(), options.samples) << "a sample was left out";
        EXPECT_LT(taken[epoch].size(), options.samples + most_ranks);
      }
    }
  }
}

TEST(DataShards, CursorsOfOtherDataAreRefused) {
  const DataOptions options = {
      .samples = 100, .rank = 1, .world_size = 4, .partition = Partition::kPrivate, .seed = 5};
  DataShards shards(options);
  shards.skip(3, 10);
  const auto before = shards.cursor();
  const auto refuses = [&](const std::string& words, DataOptions others) {
    DataShards other(others);
    other.skip(1, 10);
    const std::vector<std::byte> cursor = other.cursor();
    expect_error(ErrorCode::kInvalid, words, [&] { shards.restore(cursor); });
    EXPECT_EQ(shards.cursor(), before);
  };
  DataOptions other = options;
  other.samples = 101;
  refuses("number of samples is 101, and that of this data is 100", other);
  other = options, other.seed = 6;
  refuses("seed is 6, and that of this data is 5", other);
  other = options, other.shuffle = false;
  refuses("shuffle is false", other);
  other = options, other.drop_last = true;
  refuses("drop_last is true", other);
  other = options, other.rank = 2;
  refuses("rank is 2, and that of this data is 1", other);
  other = options, other.partition = Partition::kShared;
  refuses("partition is shared, and that of this data is private", other);
  other = options, other.world_size = 7;  // private data does not depend on it
  shards.restore(DataShards(other).cursor());
  EXPECT_EQ(shards.position(), 0u);
}

TEST(DataShards, GarbageIsNoCursor) {
  std::mt19937_64 random(fresh_seeds(1).first);
  DataShards shards({.samples = 1000, .world_size = 3, .seed = 8});
  shards.skip(5, 10);
  const auto good = shards.cursor();
  const auto refuses = [&](const std::vector<std::byte>& bytes) {
    expect_error(ErrorCode::kInvalid, "no cursor of data", [&] { shards.restore(bytes); });
    EXPECT_EQ(shards.cursor(), good);
  };
  for (size_t bytes = 0; bytes < 2 * DataShards::kCursorBytes; ++bytes) {
    std::vector<std::byte> other(good);
    other.resize(bytes);
    if (bytes != good.size()) refuses(other);
    for (std::byte& each : other) each = static_cast<std::byte>(random());
    refuses(other);
  }
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::vector<std::byte> damaged = good;
    damaged[bit / 8] ^= std::byte{1} << bit % 8;
    try {
      DataShards other({.samples = 1000, .world_size = 3, .seed = 8});
      other.restore(damaged);
      EXPECT_EQ(other.cursor(), damaged) << "another place of the same data";
      EXPECT_LT(other.position(), 1000u);
      EXPECT_LT(other.next(1).at(0), 1000u);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalid);
    }
  }
}

TEST(DataShards, BadOptionsAreRefused) {
  const auto refuses = [](const std::string& words, DataOptions options) {
    expect_error(ErrorCode::kInvalid, words, [&] { DataShards{options}; });
  };
  refuses("the data has 0 samples", {});
  refuses("1 to 2^62", {.samples = (uint64_t{1} << 62) + 1});
  refuses("rank 3 of the data is outside of the world of 3",
          {.samples = 10, .rank = 3, .world_size = 3});
  refuses("rank 0 of the data is outside", {.samples = 10, .world_size = 0});
  refuses("3 samples are too few for 4 ranks", {.samples = 3, .world_size = 4, .drop_last = true});
  DataShards few({.samples = 3, .rank = 3, .world_size = 4});
  expect_error(ErrorCode::kInvalid, "0 samples", [&] { few.next(0); });
  expect_error(ErrorCode::kInvalid, "0 samples", [&] { few.next(std::span<uint64_t>()); });
  expect_error(ErrorCode::kInvalid, "0 samples", [&] { few.skip(1, 0); });
  EXPECT_EQ(few.next(5).size(), 1u);
  DataShards as_few({.samples = 4,
                     .rank = 3,
                     .world_size = 4,
                     .partition = Partition::kPrivate,
                     .drop_last = true});
  EXPECT_EQ(as_few.next(5).size(), 4u);
}

// data_orders.txt has orders as Python computes them as well: a change of them would make every
// cursor that was saved go on with other samples.
TEST(DataShards, OrdersStayAsTheyAre) {
  std::ifstream file(PHUB_DATA_ORDERS);
  ASSERT_TRUE(file) << PHUB_DATA_ORDERS;
  size_t lines = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    std::string partition;
    DataOptions options;
    uint64_t epoch = 0, position = 0;
    words >> partition >> options.samples >> options.rank >> options.world_size >> options.seed >>
        options.shuffle >> options.drop_last >> epoch >> position;
    if (partition == "private") options.partition = Partition::kPrivate;
    DataShards shards(options);
    auto cursor = shards.cursor();
    std::memcpy(cursor.data() + 32, &epoch, sizeof epoch);
    std::memcpy(cursor.data() + 40, &position, sizeof position);
    shards.restore(cursor);
    Numbers expected;
    for (uint64_t number = 0; words >> number;) expected.push_back(number);
    EXPECT_THAT(shards.next(20), ElementsAreArray(expected)) << line;
    ++lines;
  }
  EXPECT_GE(lines, 10u);
}

// ---- Jobs whose server is killed.

class DataOfAJob : public SavedBoxTest {
 protected:
  DataOfAJob() : SavedBoxTest(PHUB_BINARY) {}
  static JobSpec spec_of(const std::string& name, uint32_t ranks) {
    JobSpec spec;
    spec.name = name;
    spec.world_size = ranks;
    spec.optimizer = "sgd";
    spec.lease_ms = 30'000;  // nobody is to be lost for being slow
    spec.keys = {{.name = "w", .elements = 1000}};
    return spec;
  }
  static void train(Worker& worker) {
    worker.push_null(0);
    worker.wait(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the box saves meanwhile
  }
};

// What the ranks of a job took, by round.
class Taken {
 public:
  explicit Taken(const DataOptions& data) : order_(order_of(data, 0)) {}
  void add(uint64_t round, const Numbers& batch) { append(rounds_[round], batch); }
  // The job goes on with this round. Returns how many samples were taken before.
  uint64_t begin(uint64_t round) {
    rounds_.erase(rounds_.lower_bound(round), rounds_.end());
    Numbers all;
    for (const auto& [round, samples] : rounds_) append(all, samples);
    const Numbers first(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(all.size()));
    EXPECT_EQ(sorted(all), sorted(first)) << "one came twice, or was left out";
    return all.size();
  }
  uint64_t last() const { return rounds_.empty() ? 0 : rounds_.rbegin()->first; }

 private:
  const Numbers order_;
  std::map<uint64_t, Numbers> rounds_;
};

// 3 ranks, then 2, then 4, in one epoch. A rank that is new has no cursor: it makes one.
TEST_F(DataOfAJob, GoesOnWithFewerAndMoreRanks) {
  constexpr size_t kBatch = 2;
  const DataOptions data = {.samples = 100'000, .seed = fresh_seeds(1).first};
  serve(5);
  std::mutex mutex;  // guards what follows
  Taken taken(data);
  uint32_t before = 0;
  for (const uint32_t ranks : {3u, 2u, 4u}) {
    std::vector<std::jthread> threads;
    std::atomic<uint64_t> first = 0;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        DataOptions mine = data;
        mine.rank = rank;
        mine.world_size = ranks;
        DataShards shards(mine);
        WorkerOptions options = this->options(spec_of("world", ranks), static_cast<int32_t>(rank));
        options.saver = [&](uint64_t) { return RankState{{"data", shards.cursor()}}; };
        Worker worker(options);
        std::unique_lock lock(mutex);
        first = worker.first_round();
        const uint64_t position = taken.begin(first);
        const auto saved = worker.restored("data");
        EXPECT_EQ(saved.has_value(), rank < before);
        if (saved) {
          shards.restore(*saved);
        } else {
          DataShards earlier(data);  // of one rank: its position is that of all
          earlier.skip(position, 1);
          shards.restore(earlier.cursor());
        }
        EXPECT_EQ(shards.position(), position);
        lock.unlock();
        worker.broadcast({});
        worker.barrier();
        try {
          for (uint64_t round = worker.first_round();; ++round) {
            const Numbers batch = shards.next(kBatch);
            train(worker);
            lock.lock();
            taken.add(round, batch);
            lock.unlock();
          }
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kRewound) << error.what();
        }
      });
    }
    EXPECT_TRUE(becomes_status(
        "world", [&](const JobStatus& job) { return first > 0 && job.durable_round >= first; }));
    die_and_come_back(5);
    threads.clear();
    before = ranks;
  }
  taken.begin(taken.last());  // which not all ranks may have ended
}

}  // namespace data_shards_test
}  // namespace phub::testing
