#include "worker/geeps/device_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "kernels/kernels.h"
#include "tests/device/strict_pages.h"
#include "tests/geeps/exchange_rig.h"
#include "tests/geeps/held_exchange.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/standalone_exchange.h"
#include "worker/geeps/worker_exchange.h"

namespace phub::geeps {
namespace device_group_test {

using phub::testing::Box;
using phub::testing::each_rank;
using phub::testing::error_of;
using ::testing::ElementsAre;
using testing::expected;
using testing::gradient_of;
using ::testing::HasSubstr;
using testing::HeldExchange;
using testing::initial_of;
using testing::is_null;
using testing::options_of;
using testing::Parameters;
using testing::parameters_of;
using testing::random_seed;
using testing::same_bits;
using testing::spec_of;
using testing::tables;

using Push = HeldExchange::Push;

// Rank 2 of 5, with keys that are called key0, key1, …
struct Recorder : HeldExchange {
  explicit Recorder(const std::vector<size_t>& elements)
      : HeldExchange(names(elements.size()), elements) {
    slack_is = 7, rank_is = 2, world_is = 5, missing = {};
  }
  static std::vector<std::string> names(size_t count) {
    std::vector<std::string> all;
    while (all.size() < count) all.push_back("key" + std::to_string(all.size()));
    return all;
  }
};

// Members from threads of their own, each in an order of its own; every key is pushed once per
// round, with the sum in the order of the members.
TEST(DeviceGroup, AnyInterleavingGivesTheOrderedSum) {
  const uint64_t seed = random_seed();
  constexpr uint64_t kRounds = 12;
  const std::vector<size_t> elements = {1, 1000, 200'001, 32 << 10};
  for (const uint32_t members : {2u, 3u, 9u}) {
    for (const bool mean : {false, true}) {
      SCOPED_TRACE(::testing::Message() << members << " members, seed " << seed);
      Recorder downstream(elements);
      DeviceGroup group(downstream, {.members = members, .mean = mean, .threads = 3});
      auto all = std::async(std::launch::async, [&] {
        each_rank(members, [&](uint32_t i) {
          testing::run(group.member(i), seed, i, kRounds, std::mt19937_64(seed + i));
        });
      });
      std::vector<uint64_t> rounds(elements.size());
      for (size_t n = 0; n < elements.size() * kRounds; ++n) {
        const Push push = downstream.take();
        const uint64_t round = ++rounds[push.key];
        std::vector<std::vector<float>> gradients;
        for (uint32_t i = 0; i < members; ++i) {
          if (is_null(i, round, push.key)) continue;
          gradients.emplace_back(elements[push.key]);
          for (size_t e = 0; e < elements[push.key]; ++e) {
            gradients.back()[e] = gradient_of(seed, i, round, push.key, e);
          }
        }
        EXPECT_EQ(push.null, gradients.empty()) << "key " << push.key << ", round " << round;
        if (!gradients.empty()) {
          std::vector<const void*> slots;
          for (const auto& gradient : gradients) slots.push_back(gradient.data());
          std::vector<float> sum(elements[push.key]);
          reference::sum(slots, kernels::DType::kF32,
                         mean ? static_cast<float>(1.0 / members) : 1.0f, sum.data(), sum.size());
          EXPECT_TRUE(push.gradient == sum) << "key " << push.key << ", round " << round;
        }
        downstream.give_back(push.key);
      }
      all.get();
    }
  }
}

// The sums that wait while a push takes its time.
TEST(DeviceGroup, HigherPrioritiesGoFirst) {
  Recorder downstream(std::vector<size_t>(5, 100));
  DeviceGroup group(downstream, {.members = 2, .threads = 1});
  const auto push = [&](size_t key, int32_t first, int32_t second) {
    group.member(0).push(key, first);
    group.member(1).push(key, second);
  };
  downstream.set_open(false);
  push(0, 0, 0);
  EXPECT_EQ(downstream.take().key, 0u);  // the only thread is in there now
  push(1, -5, 1);
  push(2, 5, -9);  // the highest of the members' counts
  push(3, 3, 3);
  push(4, 1, 1);
  downstream.set_open(true);
  std::vector<size_t> order;
  std::vector<int32_t> priorities;
  for (int i = 0; i < 4; ++i) {
    const Push pushed = downstream.take();
    order.push_back(pushed.key);
    priorities.push_back(pushed.priority);
  }
  EXPECT_THAT(order, ElementsAre(2, 3, 1, 4));
  EXPECT_THAT(priorities, ElementsAre(5, 3, 1, 1));
}

// Devices in a process are workers, to the bit, and those of one process that computes it all.
TEST(DeviceGroup, DevicesEqualWorkers) {
  constexpr uint32_t kRanks = 3;
  const uint64_t seed = random_seed();
  constexpr uint64_t kRounds = 8;
  Box box;
  for (const char* optimizer : {"none", "sgd", "momentum", "adam"}) {
    for (const char* reduction : {"sum", "mean"}) {
      JobSpec spec = spec_of(optimizer, reduction, kRanks);
      SCOPED_TRACE(::testing::Message() << spec.name << ", seed " << seed);
      const bool initial = spec.initial == "broadcast";
      Parameters workers[kRanks];
      each_rank(kRanks, [&](uint32_t rank) {
        Worker worker(options_of(box, spec, rank));
        worker.broadcast(initial && rank == 0 ? initial_of(spec) : std::vector<float>());
        WorkerExchange exchange(worker, tables());
        testing::run(exchange, seed, rank, kRounds, std::mt19937_64(seed + rank));
        EXPECT_EQ(worker.stats().bytes_copied, 0u);
        workers[rank] = parameters_of(exchange);
        worker.barrier();
      });

      Parameters devices[kRanks], standalone[kRanks];
      const auto run_group = [&](Exchange& downstream, Parameters* seen) {
        DeviceGroup group(downstream, {.members = kRanks, .mean = spec.reduction == "mean"});
        each_rank(kRanks, [&](uint32_t i) {
          testing::run(group.member(i), seed, i, kRounds, std::mt19937_64(seed + kRanks + i));
          seen[i] = parameters_of(group.member(i));
        });
      };
      spec.world_size = 1;
      const std::vector<float> values = initial_of(spec);
      {
        Worker worker(box.options(spec));
        worker.broadcast(initial ? std::span(values) : std::span<const float>());
        WorkerExchange exchange(worker, tables());
        run_group(exchange, devices);
      }
      {
        StandaloneExchange exchange(spec, initial ? std::span(values) : std::span<const float>());
        run_group(exchange, standalone);
      }
      const Parameters want =
          expected(spec_of(optimizer, reduction, kRanks), seed, kRanks, kRounds);
      for (uint32_t i = 0; i < kRanks; ++i) {
        EXPECT_TRUE(same_bits(workers[i], want)) << "worker " << i;
        EXPECT_TRUE(same_bits(devices[i], want)) << "device " << i;
        EXPECT_TRUE(same_bits(standalone[i], want)) << "device without a box " << i;
      }
    }
  }
}

// Two processes of two devices. Gradients are small integers, whose sums are exact in any order.
TEST(DeviceGroup, GroupsMeetAtTheServer) {
  Box box;
  JobSpec spec = spec_of("none", "sum", 2);
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_of(box, spec, rank));
    WorkerExchange exchange(worker, tables());
    DeviceGroup group(exchange, {.members = 2});
    each_rank(2, [&](uint32_t i) {
      Exchange& member = group.member(i);
      EXPECT_EQ(member.rank(), 2 * rank + i);
      EXPECT_EQ(member.world_size(), 4u);
      for (int round = 1; round <= 5; ++round) {
        for (size_t key = 0; key < member.keys(); ++key) {
          std::ranges::fill(member.gradient(key), static_cast<float>(round << (4 * member.rank())));
          member.push(key, 0);
        }
        for (size_t n = 0; n < member.keys(); ++n) {
          const size_t key = member.next().value();
          EXPECT_THAT(member.parameters(key), ::testing::Each(0x1111 * round));
        }
      }
    });
    worker.barrier();
  });
}

// With the memory that a worker has: over shared memory its parameters cannot be written.
TEST(DeviceGroup, CachesOfAllDevicesPinTheSameParameters) {
  Box box;
  JobSpec spec = spec_of("sgd", "sum", 1);
  phub::testing::StrictPages pages;
  Worker worker(box.options(spec));
  worker.broadcast(initial_of(spec));
  WorkerExchange exchange(worker, tables());
  const std::vector<uint64_t> keys = tables()[3].keys;
  {
    DeviceGroup group(exchange, {.members = 3});
    std::vector<std::unique_ptr<HostDevice>> devices;
    std::vector<std::unique_ptr<Cache>> caches;
    for (uint32_t i = 0; i < group.members(); ++i) {
      devices.push_back(make_host_device({.budget_bytes = 16 << 20, .pages = &pages}));
      caches.push_back(std::make_unique<Cache>(*devices[i], group.member(i), tables()));
    }
    for (uint32_t i = 0; i < group.members(); ++i) {
      UpdateBuffer update(*caches[i], 3, keys);
      std::fill_n(update.data(), update.buffer().floats(), 1.0F);
      update.update();
      caches[i]->table_clock(3);
    }
    std::vector<float> first;
    for (const auto& cache : caches) {
      const ReadBuffer read(*cache, 3, keys);
      const std::span<const float> now(read.data(), read.buffer().floats());
      if (first.empty()) first.assign(now.begin(), now.end());
      EXPECT_TRUE(std::ranges::equal(now, first));
    }
    EXPECT_GT(pages.registrations(), group.members()) << "gradients, and the parameters";
    caches.erase(caches.begin());  // the others' stay
    const ReadBuffer read(*caches[0], 3, keys);
    EXPECT_TRUE(std::ranges::equal(std::span(read.data(), read.buffer().floats()), first));
  }
  EXPECT_EQ(pages.registrations(), 0u);
  EXPECT_EQ(pages.refused(), 0u);
  worker.barrier();
}

TEST(DeviceGroup, AMemberHasGradientMemoryOfItsOwn) {
  Recorder downstream({10, 20});
  DeviceGroup group(downstream, {.members = 2});
  for (size_t key = 0; key < 2; ++key) {
    const std::span<float> first = group.member(0).gradient(key);
    const std::span<float> second = group.member(1).gradient(key);
    EXPECT_NE(first.data(), second.data());
    for (const std::span<float> gradient : {first, second}) {
      EXPECT_EQ(gradient.size(), downstream.elements(key));
      EXPECT_NE(gradient.data(), downstream.gradient(key).data());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(gradient.data()) % 4096, 0u);
    }
    EXPECT_EQ(group.member(1).parameters(key).data(), downstream.parameters(key).data());
    EXPECT_EQ(group.member(1).elements(key), downstream.elements(key));
    EXPECT_EQ(group.member(1).name(key), downstream.name(key));
  }
  EXPECT_EQ(group.members(), 2u);
  EXPECT_EQ(group.member(0).keys(), 2u);
  EXPECT_EQ(group.member(0).slack(), 7u);
  EXPECT_EQ(group.member(1).rank(), 5u);
  EXPECT_EQ(group.member(1).world_size(), 10u);
}

// Nothing is summed or copied.
TEST(DeviceGroup, OneMemberWritesIntoTheDownstreamsMemory) {
  Recorder downstream({10});
  DeviceGroup group(downstream, {.members = 1, .mean = true});
  Exchange& member = group.member(0);
  EXPECT_EQ(member.gradient(0).data(), downstream.gradient(0).data());
  member.gradient(0)[3] = 5;
  member.push(0, 4);
  const Push push = downstream.take();
  EXPECT_EQ(push.gradient[3], 5);
  EXPECT_EQ(push.priority, 4);
  downstream.give_back(0);
  EXPECT_EQ(member.next(), 0u);
  member.push_null(0);
  EXPECT_TRUE(downstream.take().null);
}

TEST(DeviceGroup, AnErrorOfTheDownstreamIsEveryMembers) {
  constexpr uint32_t kMembers = 3;
  Recorder downstream({10, 10});
  DeviceGroup group(downstream, {.members = kMembers});
  std::vector<std::future<std::optional<size_t>>> waiting;
  for (uint32_t i = 0; i < kMembers; ++i) {
    waiting.push_back(std::async(std::launch::async, [&, i] { return group.member(i).next(); }));
  }
  downstream.fail(Error(ErrorCode::kRankLost, "rank 4 is lost"));
  for (auto& next : waiting) {
    EXPECT_EQ(error_of(ErrorCode::kRankLost, [&] { next.get(); }), "rank 4 is lost");
  }
  for (uint32_t i = 0; i < kMembers; ++i) {
    Exchange& member = group.member(i);
    EXPECT_EQ(error_of(ErrorCode::kRankLost, [&] { member.push(0, 0); }), "rank 4 is lost");
    EXPECT_EQ(error_of(ErrorCode::kRankLost, [&] { member.push_null(1); }), "rank 4 is lost");
    EXPECT_EQ(error_of(ErrorCode::kRankLost, [&] { member.next(); }), "rank 4 is lost");
  }
}

TEST(DeviceGroup, AMemberThatFailsEndsTheOthers) {
  Recorder downstream({10});
  DeviceGroup group(downstream, {.members = 2});
  auto waiting = std::async(std::launch::async, [&] { return group.member(1).next(); });
  group.member(1).push(0, 0);
  group.member(0).abandon(Error(ErrorCode::kInternal, "device 0 failed"));
  EXPECT_EQ(error_of(ErrorCode::kInternal, [&] { waiting.get(); }), "device 0 failed");
}

// It owes nothing for keys that it has pushed, nor for those that nobody wants.
TEST(DeviceGroup, AMemberThatLeftIsMissedWhereItIsWaitedFor) {
  for (const bool before : {false, true}) {
    Recorder downstream({10, 10});
    DeviceGroup group(downstream, {.members = 2});
    Exchange& stays = group.member(0);
    Exchange& leaves = group.member(1);
    stays.push(0, 0);
    leaves.push(0, 0);
    downstream.give_back(downstream.take().key);
    EXPECT_EQ(stays.next(), 0u);
    if (!before) stays.push(0, 0);
    leaves.stop();
    leaves.leave();
    if (before) stays.push(0, 0);
    EXPECT_EQ(error_of(ErrorCode::kRankLost, [&] { stays.next(); }),
              "device 1 has left without pushing 'key0', which others have");
  }
  Recorder downstream({10});
  DeviceGroup group(downstream, {.members = 2});
  group.member(1).push(0, 0);
  group.member(1).stop();
  group.member(1).leave();
  group.member(0).push(0, 0);
  downstream.give_back(downstream.take().key);
  EXPECT_EQ(group.member(0).next(), 0u);
}

// Devices of other processes, and those of this one that others wait for, whatever is said of it.
TEST(DeviceGroup, DevicesThatAreMissedAreNamed) {
  Recorder downstream({10});
  DeviceGroup group(downstream, {.members = 2});
  EXPECT_THAT(group.member(0).missing_ranks(), ElementsAre());
  downstream.missing = {1};
  EXPECT_THAT(group.member(0).missing_ranks(), ElementsAre(2, 3));
  downstream.missing = {1, 2, 4};
  group.member(0).push(0, 0);
  EXPECT_THAT(group.member(0).missing_ranks(), ElementsAre(2, 3, 5, 8, 9));
  downstream.missing = {};
  const auto device = make_host_device({.budget_bytes = 1 << 20});
  Cache cache(*device, group.member(1), {{"key0", 10, dense(1)}},
              {.timeout = std::chrono::milliseconds(50)});
  cache.table_clock(0);  // the other's push goes out
  (void)downstream.take();
  downstream.missing = {1};
  EXPECT_THAT(error_of(ErrorCode::kTimeout, [&] { (void)cache.read(0, dense(1)); }),
              HasSubstr("Missing ranks, of 10: 2, 3"));
  downstream.give_back(0);
}

// In a summing thread, or, where nothing is summed, in a member's.
TEST(DeviceGroup, ARefusedPushIsEveryMembersError) {
  for (const bool null : {false, true}) {
    Recorder downstream({10});
    DeviceGroup group(downstream, {.members = 2});
    downstream.refuse_pushes("replaced");
    const auto push = [&](uint32_t i) {
      return null ? group.member(i).push_null(0) : group.member(i).push(0, 0);
    };
    push(0);
    if (null) {
      EXPECT_EQ(error_of(ErrorCode::kFenced, [&] { push(1); }), "replaced");
    } else {
      push(1);
    }
    for (uint32_t i = 0; i < 2; ++i) {
      EXPECT_EQ(error_of(ErrorCode::kFenced, [&] { group.member(i).next(); }), "replaced");
      EXPECT_EQ(error_of(ErrorCode::kFenced, [&] { push(i); }), "replaced");
    }
  }
}

TEST(DeviceGroup, StopEndsTheNextOfOneMember) {
  Recorder downstream({10});
  DeviceGroup group(downstream, {.members = 2});
  auto stopped = std::async(std::launch::async, [&] { return group.member(0).next(); });
  auto other = std::async(std::launch::async, [&] { return group.member(1).next(); });
  group.member(0).stop();
  EXPECT_EQ(stopped.get(), std::nullopt);
  group.member(0).push(0, 0);
  group.member(1).push(0, 0);
  downstream.give_back(downstream.take().key);
  EXPECT_EQ(other.get(), 0u);
  EXPECT_EQ(group.member(0).next(), std::nullopt);
  // Where the downstream itself is stopped, nobody gets anything any more.
  downstream.stop();
  EXPECT_EQ(group.member(1).next(), std::nullopt);
}

TEST(DeviceGroup, EndsWhileGradientsAreUnderWay) {
  StandaloneExchange exchange(spec_of("none", "sum", 1));
  DeviceGroup group(exchange, {.members = 2});
  for (uint32_t i = 0; i < 2; ++i) {
    for (size_t key = 0; key < exchange.keys(); ++key) group.member(i).push(key, 0);
  }
}

TEST(DeviceGroup, WrongCallsAreRefused) {
  Recorder downstream({10});
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { DeviceGroup(downstream, {.members = 0}); }),
              HasSubstr("needs a member"));
  DeviceGroup group(downstream, {.members = 2});
  group.member(1).push(0, 0);
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { group.member(1).push(0, 0); }),
              HasSubstr("device 1 pushed 'key0'"));
  group.member(0).push_null(0);
  downstream.give_back(downstream.take().key);
  EXPECT_EQ(group.member(0).next(), 0u);
  // Member 1 has not taken the key yet.
  EXPECT_THAT(error_of(ErrorCode::kInvalid, [&] { group.member(1).push(0, 0); }),
              HasSubstr("device 1"));
  EXPECT_EQ(group.member(1).next(), 0u);
  group.member(1).push(0, 0);
}

}  // namespace device_group_test
}  // namespace phub::geeps
