// Keys that are pushed in parts: the bits of keys that are pushed as a whole; each part has its
// result before the next one is pushed; what is not the next part is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/temporary_directory.h"
#include "tests/worker/box.h"
#include "tests/worker/data_connections.h"
#include "transport/error.h"

namespace phub::testing {
namespace parts_test {

using ::testing::HasSubstr;

constexpr uint64_t kLarge = 1'300'003;  // elements: three parts
constexpr size_t kParts = 3;

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "small", .elements = 1000}, {.name = "large", .elements = kLarge}};
  spec.world_size = ranks;
  spec.chunk_elements = 8192;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

void fill(std::span<float> gradient, uint64_t seed) {
  std::minstd_rand random(static_cast<uint32_t>(seed + 1));
  for (float& value : gradient) value = static_cast<float>(random() % 2001) / 1000 - 1;
}

std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalid);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(KeyParts, AreNeighboursThatMakeUpTheKey) {
  const Box box;
  const Worker worker(box.options(spec_of("make-up", 1)));
  EXPECT_EQ(worker.parts(0), 1u);
  EXPECT_EQ(worker.part(0, 0).begin, 0u);
  EXPECT_EQ(worker.part(0, 0).end, 1000u);
  ASSERT_EQ(worker.parts(1), kParts);
  uint64_t end = 0;
  for (size_t part = 0; part < kParts; ++part) {
    EXPECT_EQ(worker.part(1, part).begin, end);
    EXPECT_GT(worker.part(1, part).end, end);
    end = worker.part(1, part).end;
  }
  EXPECT_EQ(end, kLarge);
  EXPECT_THAT(refused([&] { worker.part(1, kParts); }), HasSubstr("part 3 of key 'large'"));
  EXPECT_THAT(refused([&] { worker.part(0, 1); }), HasSubstr("part 1 of key 'small', which has 1"));
}

// Rank 1 pushes as a whole, in the same rounds; and in some rounds rank 0 does.
TEST(KeyParts, HaveTheBitsOfTheWhole) {
  const Box box;
  const uint64_t seed = fresh_seeds(1).first;
  SCOPED_TRACE("PHUB_SEED=" + std::to_string(seed));
  std::vector<std::vector<float>> expected;
  for (const bool in_parts : {false, true}) {
    JobSpec spec = spec_of(in_parts ? "parts" : "whole", 2);
    spec.optimizer = "adam";
    spec.reduction = "mean";
    spec.hyper = {{"lr", 0.01}};
    each_rank(2, [&](uint32_t rank) {
      Worker worker(box.options(spec, rank));
      worker.wait_all();
      for (uint64_t round = 0; round < 5; ++round) {
        fill(worker.gradient(0), seed + 10 * round + rank);
        fill(worker.gradient(1), seed + 1000 + 10 * round + rank);
        if (in_parts && rank == 0 && round != 2) {
          for (size_t part = 0; part < kParts; ++part) {
            worker.push_part(1, part);
            if (part == 1) worker.push(0);  // other keys come between
          }
        } else {
          worker.push(1);
          worker.push(0);
        }
        worker.wait_all();
        if (rank != 0) continue;
        const std::span<const float> result = worker.parameters(1);
        if (!in_parts) {
          expected.emplace_back(result.begin(), result.end());
        } else {
          ASSERT_TRUE(std::ranges::equal(expected[round], result)) << "round " << round;
        }
      }
      worker.leave();
    });
  }
}

// A rank that reads a key whole has it in parts, and sends those chunks that it writes.
TEST(KeyParts, WhatARankOnlyReadsIsNotSent) {
  const Box box;
  const JobSpec spec = spec_of("reads", 2);
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec, rank);
    if (rank == 1) options.interest = {{"large", {{0, spec.chunk_elements}}, {{0, kLarge}}}};
    Worker worker(options);
    worker.wait_all();
    ASSERT_EQ(worker.parts(1), kParts);
    std::ranges::fill(worker.gradient(1), rank == 0 ? 1.0f : 10.0f);
    for (size_t part = 0; part < kParts; ++part) worker.push_part(1, part);
    worker.push_null(0);
    worker.wait_all();
    EXPECT_EQ(worker.parameters(1)[0], 11.0f);
    EXPECT_EQ(worker.parameters(1)[spec.chunk_elements], 1.0f);
    EXPECT_EQ(worker.parameters(1).back(), 1.0f);
    worker.leave();
  });
}

// With gated rounds results come once all of the round's keys are here.
TEST(KeyParts, AGatedRoundHasThemToo) {
  const Box box;
  JobSpec spec = spec_of("gated", 2);
  spec.optimizer = "sgd";
  spec.hyper = {{"lr", 1}};
  spec.on_nonfinite = "skip";
  each_rank(2, [&](uint32_t rank) {
    Worker worker(box.options(spec, rank));
    worker.wait_all();
    for (uint64_t round = 1; round <= 2; ++round) {
      std::ranges::fill(worker.gradient(1), 1.0f);
      for (size_t part = 0; part < kParts; ++part) worker.push_part(1, part, {.announced = true});
      worker.push_null(0);
      for (size_t part = 0; part < kParts; ++part) {
        const auto ended = worker.wait_any();
        ASSERT_TRUE(ended && !ended->error);
      }
      EXPECT_EQ(worker.parameters(1).back(), -2.0f * static_cast<float>(round));
    }
    worker.leave();
  });
}

TEST(KeyParts, EachHasItsResultBeforeTheNextIsPushed) {
  const Box box;
  const JobSpec spec = spec_of("each", 2);
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    for (uint64_t round = 1; round <= 3; ++round) {
      std::ranges::fill(worker.gradient(1), static_cast<float>(round));
      for (size_t part = 0; part < kParts; ++part) {
        // In the second round rank 1 sends no gradient.
        const bool null = round == 2 && rank == 1;
        worker.push_part(1, part, {.null = null, .announced = true});
        if (part + 1 < kParts) EXPECT_FALSE(worker.test(1)) << "others are to come";
        const auto ended = worker.wait_any();
        ASSERT_TRUE(ended && !ended->error);
        EXPECT_EQ(ended->pushed.key, 1u);
        EXPECT_EQ(ended->pushed.round, round);
        EXPECT_EQ(ended->pushed.part, part);
        const auto [begin, end] = worker.part(1, part);
        const float sum = static_cast<float>(round) * (round == 2 ? 1 : 2);
        const auto here = worker.parameters(1).subspan(begin, end - begin);
        EXPECT_TRUE(std::ranges::all_of(here, [&](float value) { return value == sum; }));
        EXPECT_EQ(worker.round(1), part + 1 < kParts ? round - 1 : round);
      }
      worker.wait(1);
    }
  });
}

// A thread that waits for the key sleeps while no part of it is under way.
TEST(KeyParts, WhoeverWaitsForTheKeyHasAllOfThem) {
  const Box box;
  each_worker(box, spec_of("waits", 1), [&](Worker& worker, uint32_t /*rank*/) {
    std::ranges::fill(worker.gradient(1), 2.0f);
    worker.push_part(1, 0);
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      for (size_t part = 1; part < kParts; ++part) worker.push_part(1, part);
    });
    worker.wait(1);
    EXPECT_EQ(worker.round(1), 1u);
    EXPECT_EQ(worker.parameters(1).back(), 2.0f);
    other.join();
  });
}

TEST(KeyParts, WhatIsNotTheNextOneIsRefusedAndChangesNothing) {
  const Box box;
  JobSpec spec = spec_of("refused", 1);
  spec.keys.push_back({.name = "coded", .elements = kLarge, .format = "int8"});
  WorkerOptions options = box.options(spec);
  options.wait_timeout_ms = 20'000;
  Worker worker(options);
  worker.wait_all();
  const auto push = [&](size_t key, size_t part) {
    return refused([&] { worker.push_part(key, part); });
  };
  EXPECT_THAT(push(3, 0), HasSubstr("key 3 is out of range"));
  EXPECT_THAT(push(1, 1), HasSubstr("part 1 of key 'large' was pushed, which is not the next"));
  EXPECT_THAT(push(0, 1), HasSubstr("part 1 of key 'small'"));
  EXPECT_EQ(worker.parts(2), 1u) << "the whole gradient is encoded";
  std::vector<float> own(kLarge, 3.0f);
  worker.register_memory(1, {.gradient = own.data()});
  EXPECT_THAT(push(1, 0), HasSubstr("registered memory"));
  worker.register_memory(1, {});
  std::ranges::fill(worker.gradient(1), 1.0f);
  worker.push_part(1, 0);
  EXPECT_THAT(push(1, 0), HasSubstr("1 of the 3 parts of key 'large' are pushed"));
  EXPECT_THAT(push(1, 2), HasSubstr("part 2 of key 'large'"));
  EXPECT_THAT(refused([&] { worker.push(1); }), HasSubstr("1 of the 3 parts"));
  worker.push_part(1, 1);
  worker.push_part(1, 2);
  EXPECT_THAT(push(1, 3), HasSubstr("part 3 of key 'large'"));
  worker.push_part(0, 0);  // as push() does
  worker.push(2);
  worker.wait_all();
  EXPECT_EQ(worker.parameters(1)[kLarge - 1], 1.0f);
  EXPECT_EQ(worker.round(0), 1u);
  EXPECT_EQ(worker.round(1), 1u);
}

TEST(KeyParts, AStateIsNotOfTheTimeBetweenThem) {
  const Box box;
  JobSpec spec = spec_of("state", 1);
  spec.optimizer = "sgd";
  Worker worker(box.options(spec));
  worker.wait_all();
  std::vector<float> state(1000);
  const std::span<float> arrays[] = {state};
  KeyState small{.key = 0, .arrays = {arrays[0]}};
  worker.push_part(1, 0, {.null = true, .announced = true});
  ASSERT_TRUE(worker.wait_any());
  EXPECT_THAT(refused([&] { worker.get_state({&small, 1}); }), HasSubstr("between rounds"));
  for (size_t part = 1; part < kParts; ++part) worker.push_part(1, part, {.null = true});
  worker.push_null(0);
  worker.wait_all();
  EXPECT_EQ(worker.get_state({&small, 1}), 1u);
}

// The round is over for the key, and this rank's state is saved, with the last of them.
TEST(KeyParts, TheStateIsSavedOnceAllAreHere) {
  const TemporaryDirectory folder = TemporaryDirectory::in_memory();
  const Box box("core:2 pu:1", uint64_t{1} << 33, {}, {.folder = folder.path(), .every = 1});
  std::vector<uint64_t> saved;
  WorkerOptions options = box.options(spec_of("saves", 1));
  options.saver = [&](uint64_t round) {
    saved.push_back(round);
    return RankState();
  };
  Worker worker(options);
  worker.wait_all();
  ASSERT_TRUE(worker.saves());
  worker.push_null(0);
  worker.wait(0);
  for (size_t part = 0; part < kParts; ++part) {
    EXPECT_THAT(saved, ::testing::IsEmpty());
    worker.push_part(1, part, {.null = true, .announced = true});
    ASSERT_TRUE(worker.wait_any());
  }
  EXPECT_THAT(saved, ::testing::ElementsAre(1u));
}

// What was pushed is sent again, and nothing else.
TEST(KeyParts, AConnectionThatBreaksBetweenThemIsMadeAgain) {
  const Box box;
  WorkerOptions options = box.options(spec_of("breaks", 1));
  options.transport = "tcp";
  Worker worker(options);
  worker.wait_all();
  const Ports control = {control_port(box)};
  for (uint64_t round = 1; round <= 3; ++round) {
    std::ranges::fill(worker.gradient(1), static_cast<float>(round));
    for (size_t part = 0; part < kParts; ++part) {
      worker.push_part(1, part);
      for (const int fd : data_connections(control)) shutdown(fd, SHUT_RDWR);
    }
    worker.wait(1);
    EXPECT_TRUE(std::ranges::all_of(worker.parameters(1), [&](float value) {
      return value == static_cast<float>(round);
    })) << round;
  }
  EXPECT_GT(worker.stats().reconnections, 0u);
}

}  // namespace parts_test
}  // namespace phub::testing
