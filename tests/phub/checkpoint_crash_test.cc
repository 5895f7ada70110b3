// A checkpoint is cut short at every call of the file layer, in every way. What is found afterwards
// is the one before or the new one, whole. PHUB_TEST_SCALE multiplies the random losses of power.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/phub/checkpoint_rig.h"
#include "tests/phub/simulated_disk.h"
#include "tests/seeds.h"

namespace phub::testing {
namespace checkpoint_crash_test {

using Loss = SimulatedDisk::Loss;
using Fault = SimulatedDisk::Fault;

const std::string kDirectory = "/checkpoints";
const Content kOld{.round = 100};
const Content kNew{.round = 200};
const Content kNext{.round = 300};

// The round of what a box finds when it starts; 0: nothing. Fails if it is not whole.
uint64_t found_round(Checkpoints& checkpoints) {
  std::vector<Refusal> refused;
  const auto reader = checkpoints.newest_whole(kJob, refused);
  for (const Refusal& refusal : refused) ADD_FAILURE() << refusal.folder << ": " << refusal.why;
  if (reader == nullptr) return 0;
  const uint64_t round = reader->manifest().round;
  EXPECT_EQ(difference(*reader, {.round = round}), "") << "round " << round;
  // None that is being removed looks as if it were there.
  for (const CheckpointId id : checkpoints.list(kJob)) {
    EXPECT_THAT(checkpoints.open(kJob, id)->verify(), ::testing::IsEmpty()) << "round " << id.round;
  }
  return round;
}

// A disk with the old checkpoint, durable.
std::unique_ptr<SimulatedDisk> disk_with_old(std::mt19937_64& random) {
  auto disk = std::make_unique<SimulatedDisk>();
  {
    CheckpointStore store(kDirectory, 1, *disk);
    EXPECT_EQ(write_checkpoint(store, kOld), "");
  }
  disk->restart(Loss::kUnsynced, random);
  return disk;
}

// Starts a box that writes the new one. Whether it said that it is durable.
bool try_to_write(SimulatedDisk& disk, const Content& content) {
  try {
    CheckpointStore store(kDirectory, 1, disk);
    return write_checkpoint(store, content).empty() || true;
  } catch (const Crash&) {
  } catch (const Error&) {
  }
  return false;
}

uint64_t calls_to_write(std::mt19937_64& random) {
  const auto disk = disk_with_old(random);
  const uint64_t before = disk->calls();
  EXPECT_TRUE(try_to_write(*disk, kNew));
  return disk->calls() - before;
}

// A box that starts after whatever has happened: it finds something whole, can go on, and nothing
// else is left.
void expect_recovery(SimulatedDisk& disk, bool said_durable) {
  CheckpointStore store(kDirectory, 1, disk);
  const uint64_t round = found_round(store);
  EXPECT_TRUE(round == kNew.round || (round == kOld.round && !said_durable)) << "round " << round;
  EXPECT_EQ(write_checkpoint(store, kNext), "");
  EXPECT_EQ(found_round(store), kNext.round);
  EXPECT_THAT(store.list(kJob), ::testing::ElementsAre(kNext.id()));
  EXPECT_EQ(disk.files_below(kDirectory).size(), 9u);  // 5 of tensors, 2 parts, manifest, lock
}

TEST(CheckpointCrash, LeavesTheOldOrTheNewOneAtEveryCall) {
  const Seeds seeds = fresh_seeds(1);
  std::mt19937_64 random(seeds.first);
  const uint64_t calls = calls_to_write(random);
  ASSERT_GT(calls, 30u);
  fmt::print("{} calls of the file layer\n", calls);
  const uint64_t random_losses = scaled(8);
  uint64_t old_found = 0, new_found = 0;
  for (uint64_t call = 1; call <= calls + 1; ++call) {
    for (uint64_t way = 0; way < 2 + random_losses; ++way) {
      SCOPED_TRACE(fmt::format("PHUB_SEED={}, call {}, loss {}", seeds.first, call, way));
      const auto disk = disk_with_old(random);
      disk->arm(call, Fault::kCrash);
      const bool said_durable = try_to_write(*disk, kNew);
      EXPECT_EQ(disk->fired(), call <= calls);
      disk->restart(way == 0 ? Loss::kNothing : way == 1 ? Loss::kUnsynced : Loss::kRandom, random);
      Checkpoints reader(kDirectory, *disk);
      ++(found_round(reader) == kOld.round ? old_found : new_found);
      expect_recovery(*disk, said_durable);
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(old_found, 0u);
  EXPECT_GT(new_found, 0u);
}

// A box was killed; the next one goes on from what it finds, and its host loses power.
TEST(CheckpointCrash, WhatAJobGoesOnFromStays) {
  std::mt19937_64 random(1);
  const uint64_t calls = calls_to_write(random);
  bool new_found = false;
  for (uint64_t call = 1; call <= calls; ++call) {
    SCOPED_TRACE(fmt::format("call {}", call));
    const auto disk = disk_with_old(random);
    disk->arm(call, Fault::kCrash);
    try_to_write(*disk, kNew);
    disk->restart(Loss::kNothing, random);
    uint64_t gone_on_from = 0;
    {
      CheckpointStore store(kDirectory, 1, *disk);
      std::vector<Refusal> refused;
      const auto reader = store.newest_whole(kJob, refused);
      ASSERT_NE(reader, nullptr);
      store.keep(*reader, refused);
      gone_on_from = reader->manifest().round;
    }
    new_found |= gone_on_from == kNew.round;
    disk->restart(Loss::kUnsynced, random);
    Checkpoints reader(kDirectory, *disk);
    EXPECT_EQ(found_round(reader), gone_on_from);
  }
  EXPECT_TRUE(new_found);
}

// The box that starts after a crash crashes, too.
TEST(CheckpointCrash, MayHappenAgainWhileItIsCleanedUp) {
  const Seeds seeds = fresh_seeds(scaled(300));
  std::mt19937_64 first(1);
  const uint64_t calls = calls_to_write(first);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const auto disk = disk_with_old(random);
    bool said_durable = false;
    for (int i = 0; i < 3 && !said_durable; ++i) {
      disk->arm(1 + random() % calls, Fault::kCrash);
      said_durable = try_to_write(*disk, kNew);
      disk->restart(static_cast<Loss>(random() % 3), random);
    }
    if (said_durable) disk->disarm();
    expect_recovery(*disk, said_durable);
    if (HasFailure()) return;
  }
}

TEST(CheckpointCrash, EveryFailingCallIsReportedAndTheOldOneStands) {
  const Seeds seeds = fresh_seeds(1);
  std::mt19937_64 random(seeds.first);
  const uint64_t calls = calls_to_write(random);
  for (const Fault fault : {Fault::kFail, Fault::kFailDone, Fault::kFull}) {
    for (uint64_t call = 1; call <= calls; ++call) {
      SCOPED_TRACE(fmt::format("PHUB_SEED={}, call {}, fault {}", seeds.first, call,
                               static_cast<int>(fault)));
      const auto disk = disk_with_old(random);
      disk->arm(call, fault);
      std::string problem;
      bool durable = false;
      try {
        CheckpointStore store(kDirectory, 1, *disk);
        try {
          problem = write_checkpoint(store, kNew);
          durable = true;
        } catch (const Error& error) {
          problem = error.what();
        }
        // In the same process: what failed left nothing, and can be tried again.
        disk->disarm();
        EXPECT_EQ(found_round(store), durable ? kNew.round : kOld.round);
        if (!durable && fault != Fault::kFull) {
          EXPECT_EQ(write_checkpoint(store, kNew), "");
          durable = true;
        }
      } catch (const Error& error) {  // of the start
        problem = error.what();
      }
      EXPECT_TRUE(fault == Fault::kFull || !problem.empty());
      disk->restart(static_cast<Loss>(random() % 3), random);
      expect_recovery(*disk, durable);
      if (HasFailure()) return;
    }
  }
}

TEST(CheckpointCrash, AnEpochIsNeverGivenTwice) {
  const Seeds seeds = fresh_seeds(scaled(200));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    SimulatedDisk disk;
    uint64_t last = 0;
    for (int i = 0; i < 5; ++i) {
      disk.arm(1 + random() % 25, Fault::kCrash);
      try {
        CheckpointStore store(kDirectory, 1, disk);
        for (int j = 0; j < 3; ++j) {
          const uint64_t epoch = store.raise_epoch(kJob);
          ASSERT_GT(epoch, last);
          last = epoch;
        }
      } catch (const Crash&) {
      }
      disk.restart(static_cast<Loss>(random() % 3), random);
    }
  }
}

}  // namespace checkpoint_crash_test
}  // namespace phub::testing
