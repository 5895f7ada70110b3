// Bits that flip and files that end: never loaded as if nothing were wrong. PHUB_TEST_SCALE
// multiplies their number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/phub/checkpoint_rig.h"
#include "tests/phub/simulated_disk.h"
#include "tests/seeds.h"

namespace phub::testing {
namespace checkpoint_damage_test {

using ::testing::HasSubstr;

const Content kOld{.round = 7};
const Content kNew{.round = 9, .extra = 300'000};  // 1.2 MB: two checksums

// Changes the file in one of the ways in which disks and people do.
std::string damage(std::vector<std::byte>& bytes, std::mt19937_64& random) {
  const size_t near_begin = std::min<size_t>(bytes.size(), 1000);
  const size_t at = random() % (random() % 2 == 0 ? near_begin : bytes.size());
  switch (random() % 8) {
    case 0:
      bytes.resize(at);
      return fmt::format("cut at {}", at);
    case 1:
      bytes.insert(bytes.end(), 1 + random() % 600, std::byte{0});
      return "longer";
    case 2: {
      const size_t end = std::min(bytes.size(), at + 512);
      const bool zeros = std::all_of(bytes.begin() + at, bytes.begin() + end,
                                     [](std::byte byte) { return byte == std::byte{0}; });
      if (zeros) break;
      std::fill(bytes.begin() + at, bytes.begin() + end, std::byte{0});
      return fmt::format("zeros from {}", at);
    }
    default:
      break;
  }
  bytes[at] ^= static_cast<std::byte>(1u << random() % 8);
  return fmt::format("a bit of byte {}", at);
}

class CheckpointDamage : public ::testing::Test {
 protected:
  CheckpointDamage() : store_("/checkpoints", 2, disk_) {
    write_checkpoint(store_, kOld);
    write_checkpoint(store_, kNew);
    folder_ = "/checkpoints/digits%2Ev2/" + folder_name(kNew.id());
  }
  SimulatedDisk disk_;
  CheckpointStore store_;
  std::string folder_;
};

TEST_F(CheckpointDamage, IsNeverLoaded) {
  const std::vector<std::string> files = disk_.files_below(folder_);
  ASSERT_EQ(files.size(), 8u);
  const Seeds seeds = fresh_seeds(scaled(1000));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    const std::string& path = files[random() % files.size()];
    std::vector<std::byte>& bytes = *disk_.bytes_of(path);
    const std::vector<std::byte> whole = bytes;
    SCOPED_TRACE(fmt::format("PHUB_SEED={}: {}: {}", seed, path, damage(bytes, random)));
    ASSERT_NE(bytes, whole);

    // A box that starts goes back to the one before, and says which it refused.
    std::vector<Refusal> refused;
    const auto reader = store_.newest_whole(kJob, refused);
    ASSERT_NE(reader, nullptr);
    ASSERT_EQ(reader->manifest().round, kOld.round);
    ASSERT_EQ(refused.size(), 1u);
    EXPECT_EQ(refused[0].folder, folder_);
    EXPECT_THAT(refused[0].why, HasSubstr(path));

    // Who reads it all the same gets an error, and never other bytes.
    try {
      const auto damaged = store_.open(kJob, kNew.id());
      EXPECT_EQ(difference(*damaged, kNew), "");
      ADD_FAILURE() << "all of it was read";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalid);
    }
    bytes = whole;
    if (HasFailure()) return;
  }
  std::vector<Refusal> refused;
  EXPECT_EQ(store_.newest_whole(kJob, refused)->manifest().round, kNew.round);
}

TEST_F(CheckpointDamage, OfAMissingFileIsNamed) {
  for (const std::string& path : disk_.files_below(folder_)) {
    const std::vector<std::byte> whole = *disk_.bytes_of(path);
    disk_.remove(path);
    std::vector<Refusal> refused;
    EXPECT_EQ(store_.newest_whole(kJob, refused)->manifest().round, kOld.round);
    if (!path.ends_with("manifest.json")) {
      ASSERT_EQ(refused.size(), 1u);
      EXPECT_THAT(refused[0].why, HasSubstr(path));
    }
    const auto file = disk_.create(path);
    file->write(whole);
    file->close();
  }
}

// A whole checkpoint in the place of another.
TEST_F(CheckpointDamage, IncludesACheckpointUnderAWrongName) {
  const std::string other = "/checkpoints/digits%2Ev2/" + folder_name({.epoch = 1, .round = 10});
  disk_.rename(folder_, other);
  std::vector<Refusal> refused;
  EXPECT_EQ(store_.newest_whole(kJob, refused)->manifest().round, kOld.round);
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_THAT(refused[0].why, HasSubstr("round 9"));
}

// A damaged one counts for nothing when older ones are removed.
TEST_F(CheckpointDamage, DoesNotPushOutAWholeOne) {
  (*disk_.bytes_of(folder_ + "/manifest.json"))[100] ^= std::byte{1};
  std::vector<Refusal> refused;
  EXPECT_EQ(store_.newest_whole(kJob, refused)->manifest().round, kOld.round);
  const Content next{.round = 8, .epoch = 2};
  EXPECT_EQ(write_checkpoint(store_, next), "");
  EXPECT_THAT(store_.list(kJob), ::testing::ElementsAre(next.id(), kNew.id(), kOld.id()));
  EXPECT_EQ(store_.newest_whole(kJob, refused)->manifest().round, 8u);
  const Content after{.round = 10, .epoch = 2};
  EXPECT_EQ(write_checkpoint(store_, after), "");
  EXPECT_THAT(store_.list(kJob), ::testing::ElementsAre(after.id(), next.id()));
}

}  // namespace checkpoint_damage_test
}  // namespace phub::testing
