// Files that a checkpoint shares with the one before it: they are whole in both, whatever becomes
// of the disk, and stay as long as one of them does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/phub/checkpoint_rig.h"
#include "tests/phub/simulated_disk.h"
#include "tests/seeds.h"
#include "tests/transport/shm_rig.h"
#include "tests/worker/expect_error.h"

namespace phub::testing {
namespace checkpoint_shared_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Loss = SimulatedDisk::Loss;

const std::string kDirectory = "/checkpoints";
const Content kOld{.round = 100, .epoch = 1, .extra = 270'000};  // files of several checksums
const std::vector<std::string> kShared = {kBranchParameters, kBranchMomentum};

// A checkpoint that has its own parameters, and the branch of `from`.
std::string write_sharing(CheckpointStore& store, uint64_t round, CheckpointReader& from) {
  const Content content{.round = round, .epoch = 1, .extra = kOld.extra};
  const auto writer = store.begin(kJob, content.id());
  write_tensors(*writer, content, std::string(kParametersFile));
  for (const std::string& file : kShared) writer->share_tensors(from, file);
  return writer->commit(content.manifest());
}

// All of the newest checkpoint, whose branch is that of the old one. Returns its round.
uint64_t check_newest(CheckpointStore& store) {
  std::vector<Refusal> refused;
  const auto reader = store.newest_whole(kJob, refused);
  EXPECT_TRUE(reader && refused.empty());
  EXPECT_THAT(reader->verify(), IsEmpty());
  for (const std::string& file : kShared) {
    for (size_t i = 0; i < kOld.tensors(file).size(); ++i) {
      std::vector<std::byte> found(kOld.tensor(file, i).size());
      reader->read_tensor(file, i, 0, found);
      EXPECT_TRUE(found == kOld.tensor(file, i)) << file;
    }
  }
  return reader->manifest().round;
}

TEST(CheckpointShared, IsWholeWhereverTheBoxDies) {
  const Seeds seeds = fresh_seeds(1);
  std::mt19937_64 random(seeds.first);
  for (const bool links : {true, false}) {
    bool was_new = false;
    for (uint64_t call = 1; !was_new; ++call) {
      for (const Loss loss : {Loss::kNothing, Loss::kUnsynced, Loss::kRandom}) {
        SCOPED_TRACE(fmt::format("PHUB_SEED={}, call {}, links {}", seeds.first, call, links));
        SimulatedDisk disk;
        disk.have_links(links);
        bool is_durable = false;
        try {
          CheckpointStore store(kDirectory, 1, disk);
          ASSERT_EQ(write_checkpoint(store, kOld), "");
          const auto old = store.open(kJob, kOld.id());
          disk.arm(call, SimulatedDisk::Fault::kCrash);
          is_durable = write_sharing(store, 200, *old).empty();
          disk.disarm();
        } catch (const Crash&) {
        }
        disk.restart(loss, random);
        CheckpointStore store(kDirectory, 1, disk);
        const uint64_t round = check_newest(store);
        ASSERT_TRUE(round == 200 || (round == 100 && !is_durable));
        const auto last = store.open(kJob, {1, round});
        ASSERT_EQ(write_sharing(store, 300, *last), "");
        ASSERT_EQ(check_newest(store), 300u);
        was_new = is_durable;
        if (HasFailure()) return;
      }
    }
  }
}

// The system's own disk. The first checkpoint goes, and what the second one shares stays.
TEST(CheckpointShared, TakesNoMoreOfTheDisk) {
  const TemporaryDirectory directory;
  CheckpointStore store(directory.path() + "/checkpoints", 2);
  ASSERT_EQ(write_checkpoint(store, kOld), "");
  const auto old = store.open(kJob, kOld.id());
  ASSERT_EQ(write_sharing(store, 200, *old), "");
  const std::filesystem::path file = old->folder() + "/" + kBranchParameters;
  EXPECT_EQ(std::filesystem::hard_link_count(file), 2u);
  ASSERT_EQ(write_sharing(store, 300, *store.open(kJob, {1, 200})), "");
  EXPECT_EQ(std::filesystem::hard_link_count(file), 3u) << "old is still open";
  const std::string newest = store.open(kJob, {1, 300})->folder() + "/" + kBranchParameters;
  std::filesystem::remove_all(file.parent_path());
  EXPECT_EQ(check_newest(store), 300u);
  EXPECT_EQ(std::filesystem::hard_link_count(newest), 2u);
}

// The checkpoint says what it should have, and the rest of it is there.
TEST(CheckpointShared, WhatIsGoneIsMissed) {
  for (const bool links : {true, false}) {
    SimulatedDisk disk;
    disk.have_links(links);
    CheckpointStore store(kDirectory, 2, disk);
    ASSERT_EQ(write_checkpoint(store, kOld), "");
    const auto old = store.open(kJob, kOld.id());
    disk.remove(old->folder() + "/" + kBranchMomentum);
    const Content content{.round = 200, .epoch = 1, .extra = kOld.extra};
    const auto writer = store.begin(kJob, content.id());
    write_tensors(*writer, content, std::string(kParametersFile));
    writer->share_tensors(*old, kBranchParameters);
    expect_error(ErrorCode::kNotFound, kBranchMomentum.c_str(),
                 [&] { writer->share_tensors(*old, kBranchMomentum); });
    expect_error(ErrorCode::kNotFound, "has no file 'branch-9",
                 [&] { writer->share_tensors(*old, "branch-9-parameters.safetensors"); });
    ASSERT_EQ(writer->commit(content.manifest()), "");
    const auto reader = store.open(kJob, content.id());
    EXPECT_TRUE(reader->has(kBranchMomentum));
    EXPECT_THAT(reader->verify(), ElementsAre(::testing::HasSubstr(kBranchMomentum)));
  }
}

}  // namespace checkpoint_shared_test
}  // namespace phub::testing
