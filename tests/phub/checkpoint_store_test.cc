// Checkpoints in the files of this machine: what lies where, who may read it, locks, full disks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "phub/checkpoint/checked_file.h"
#include "tests/file_size_limit.h"
#include "tests/phub/checkpoint_rig.h"
#include "tests/seeds.h"
#include "tests/temporary_directory.h"
#include "tests/worker/expect_error.h"

namespace phub::testing {
namespace checkpoint_store_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CheckpointFiles : public ::testing::Test {
 protected:
  std::vector<std::string> below(const std::string& folder) const {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
      paths.push_back(entry.path().lexically_relative(folder));
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  }

  const TemporaryDirectory temporary_;
  const std::string root_ = temporary_.path(), directory_ = root_ + "/checkpoints";
};

// There is something of this name already.
void expect_taken(CheckpointStore& store, CheckpointId id) {
  expect_error(ErrorCode::kTaken, "", [&] { store.begin(kJob, id); });
}

TEST_F(CheckpointFiles, LieInFoldersOfTheirJob) {
  CheckpointStore store(directory_, 2);
  const Content content{.round = 123, .epoch = 4, .extra = 600'000};
  EXPECT_EQ(write_checkpoint(store, content), "");
  const std::string folder = directory_ + "/digits%2Ev2/round-000000000123.epoch-4";
  EXPECT_THAT(below(folder),
              ElementsAre("branch-2-parameters.safetensors", "branch-2-state-momentum.safetensors",
                          "clocks.safetensors", "manifest.json", "parameters.safetensors", "rank-1",
                          "rank-1/%2E%2E%2F%2E%2E%2Fposition", "rank-12", "rank-12/random",
                          "state-momentum.safetensors"));
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_)) {
    struct stat info = {};
    ASSERT_EQ(lstat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, entry.is_directory() ? 0700u : 0600u) << entry.path();
  }
  Checkpoints readers(directory_ + "/");
  EXPECT_THAT(readers.jobs(), ElementsAre(kJob));
  EXPECT_THAT(readers.list(kJob), ElementsAre(content.id()));
  EXPECT_THAT(readers.list("no-such-job"), IsEmpty());
  std::vector<Refusal> refused;
  const auto reader = readers.newest_whole(kJob, refused);
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(difference(*reader, content), "");
}

// Whole MiBs go past the kernel's cache where the file system can, what is left does not.
TEST_F(CheckpointFiles, HoldWhatWasWrittenWhateverItsSize) {
  const Seeds seeds = fresh_seeds(20);
  for (const char* folder : {root_.c_str(), "/dev/shm"}) {
    for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
      SCOPED_TRACE(fmt::format("PHUB_SEED={} in {}", seed, folder));
      std::mt19937_64 random(seed);
      const std::vector<size_t> near = {0, 1, kDirectAlignment, kChecksumBytes, 3 * kChecksumBytes};
      const std::vector<std::byte> bytes = bytes_for(seed, near[random() % 5] + random() % 5'000);
      const std::string path = fmt::format("{}/phub-checkpoint-{}", folder, getpid());
      CheckedOutput output(system_files(), path, "file");
      for (std::span<const std::byte> rest = bytes; !rest.empty();) {
        const size_t some = std::min<size_t>(rest.size(), 1 + random() % 200'000);
        output.write(rest.first(some));
        rest = rest.subspan(some);
      }
      output.finish();
      output.sync_and_close();

      std::vector<std::byte> read(bytes.size());
      const std::unique_ptr<InputFile> file = system_files().open(path);
      ASSERT_EQ(file->bytes(), bytes.size());
      file->read(0, read);
      EXPECT_TRUE(read == bytes);
      CheckedInput(system_files(), path, output.entry()).verify();
      system_files().remove(path);
    }
  }
}

TEST_F(CheckpointFiles, TheLastOnesAreKept) {
  CheckpointStore store(directory_, 2);
  for (const uint64_t round : {10, 20, 30}) write_checkpoint(store, {.round = round});
  EXPECT_THAT(store.list(kJob), ElementsAre(CheckpointId{1, 30}, CheckpointId{1, 20}));
  // A higher epoch is newer, whatever its round.
  write_checkpoint(store, {.round = 25, .epoch = 2});
  EXPECT_THAT(store.list(kJob), ElementsAre(CheckpointId{2, 25}, CheckpointId{1, 30}));
}

TEST_F(CheckpointFiles, OneThatIsReadStays) {
  CheckpointStore store(directory_, 1);
  write_checkpoint(store, {.round = 10});
  auto reader = store.open(kJob, {1, 10});
  write_checkpoint(store, {.round = 20});
  EXPECT_EQ(difference(*reader, {.round = 10}), "");
  reader = nullptr;
  write_checkpoint(store, {.round = 30});
  EXPECT_THAT(store.list(kJob), ElementsAre(CheckpointId{1, 30}));
}

TEST_F(CheckpointFiles, WhatIsNotCommittedIsRemoved) {
  CheckpointStore store(directory_, 1);
  {
    const auto writer = store.begin(kJob, {1, 10});
    write_tensors(*writer, {.round = 10}, std::string(kParametersFile));
    EXPECT_THROW(store.begin(kJob, {1, 10}), Error);
    const auto part = writer->add_part(3, "half");
    EXPECT_THROW(writer->add_part(3, "half"), Error);
    EXPECT_THROW(writer->commit(Content{.round = 10}.manifest()), Error);  // the part is not there
  }
  EXPECT_THAT(below(directory_ + "/digits%2Ev2"), IsEmpty());
  write_checkpoint(store, {.round = 10});
  expect_taken(store, {1, 10});
}

TEST_F(CheckpointFiles, HaveOneBoxAtATime) {
  auto store = std::make_unique<CheckpointStore>(directory_, 1);
  const std::string refused =
      error_of(ErrorCode::kTaken, [&] { CheckpointStore second(directory_, 1); });
  EXPECT_THAT(refused, HasSubstr(fmt::format("locked by process {}", getpid())));
  EXPECT_THAT(refused, HasSubstr(directory_ + "/.lock"));
  store = nullptr;
  CheckpointStore third(directory_, 1);
}

TEST_F(CheckpointFiles, EpochsRise) {
  {
    CheckpointStore store(directory_, 1);
    EXPECT_EQ(store.raise_epoch(kJob), 1u);
    EXPECT_EQ(store.raise_epoch(kJob), 2u);
    write_checkpoint(store, {.round = 10, .epoch = 7});
    EXPECT_EQ(store.raise_epoch(kJob), 8u);
  }
  CheckpointStore store(directory_, 1);
  EXPECT_EQ(store.raise_epoch(kJob), 9u);
  store.remove_job(kJob);
  EXPECT_THAT(store.jobs(), IsEmpty());
}

// A box that has run out of descriptors does not go back to an older checkpoint.
TEST_F(CheckpointFiles, WhatTheHostLacksIsNoDamage) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP()
      << "UBSan opens a pipe to look at an object's type, and takes its failure for a fault";
#endif
  CheckpointStore store(directory_, 1);
  write_checkpoint(store, {.round = 10});
  const auto reader = store.open(kJob, {1, 10});
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  expect_error(ErrorCode::kFull, "", [&] { reader->verify(); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(reader->verify(), IsEmpty());
}

// As on a full disk. (The box ignores the signal that the kernel sends.)
TEST_F(CheckpointFiles, AFileThatMayNotGrowIsAnError) {
  CheckpointStore store(directory_, 1);
  const Content content{.round = 10};
  write_checkpoint(store, content);
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  {
    const FileSizeLimit limit(16);
    expect_error(ErrorCode::kFull, "", [&] { write_checkpoint(store, {.round = 20}); });
  }
  std::signal(SIGXFSZ, before);
  EXPECT_THAT(Checkpoints(directory_).list(kJob), ElementsAre(content.id()));
}

// What others put into the directory is neither followed nor taken for ours.
TEST_F(CheckpointFiles, FollowNoLinks) {
  const std::string outside = root_ + "/outside";
  std::filesystem::create_directory(outside);
  CheckpointStore(directory_, 1).raise_epoch(kJob);
  const std::string folder = directory_ + "/digits%2Ev2/";
  std::filesystem::create_directory_symlink(outside, folder + "round-000000000001.epoch-1");
  std::filesystem::create_directory(folder + "writing-x");
  std::filesystem::create_directory_symlink(outside, folder + "writing-x/link");
  std::filesystem::create_directory(folder + "notes");
  std::filesystem::create_directory(directory_ + "/a.b");
  CheckpointStore store(directory_, 1);
  EXPECT_TRUE(std::filesystem::exists(outside));
  EXPECT_FALSE(std::filesystem::exists(folder + "writing-x"));
  EXPECT_TRUE(std::filesystem::exists(folder + "notes"));
  EXPECT_THAT(store.list(kJob), IsEmpty());
  EXPECT_THAT(store.jobs(), ElementsAre(kJob));
}

// A checkpoint that somebody has damaged is not as if it had never been, nor is it removed.
TEST_F(CheckpointFiles, WhatHasTheNameOfACheckpointIsNeverPassedOverInSilence) {
  const std::string folder = directory_ + "/digits%2Ev2/";
  const std::string link = folder + folder_name({1, 40}),
                    no_manifest = folder + folder_name({1, 30}),
                    file = folder + folder_name({1, 20});
  {
    CheckpointStore store(directory_, 5);
    for (const uint64_t round : {10, 30, 40}) write_checkpoint(store, {.round = round});
  }
  std::filesystem::rename(link, root_ + "/elsewhere");
  std::filesystem::create_directory_symlink(root_ + "/elsewhere", link);
  std::filesystem::remove(no_manifest + "/manifest.json");
  std::ofstream(file) << "x";
  std::filesystem::create_directory(folder + "removing-" + folder_name({1, 5}));
  CheckpointStore store(directory_, 5);
  EXPECT_FALSE(std::filesystem::exists(folder + "removing-" + folder_name({1, 5})));
  EXPECT_THAT(store.list(kJob), ElementsAre(CheckpointId{1, 10}));
  std::vector<Refusal> refused;
  const auto reader = store.newest_whole(kJob, refused);
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(difference(*reader, {.round = 10}), "");
  ASSERT_EQ(refused.size(), 3u);
  EXPECT_EQ(refused[0].folder, link);
  EXPECT_THAT(refused[0].why, HasSubstr("it is a symbolic link"));
  EXPECT_EQ(refused[1].folder, no_manifest);
  EXPECT_EQ(refused[1].why, "it has no manifest.json");
  EXPECT_EQ(refused[2].folder, file);
  EXPECT_EQ(refused[2].why, "it is not a folder");
  EXPECT_TRUE(std::filesystem::exists(no_manifest + "/parameters.safetensors"));
  expect_taken(store, {1, 30});
}

// A disk that could not read the newest one for a moment: the job has gone on from the one before.
TEST_F(CheckpointFiles, WhatWasPassedOverIsNotGoneOnFromLater) {
  const std::string newest = directory_ + "/digits%2Ev2/" + folder_name({1, 20});
  {
    CheckpointStore store(directory_, 5);
    for (const uint64_t round : {10, 20}) write_checkpoint(store, {.round = round});
    std::filesystem::rename(newest + "/parameters.safetensors", root_ + "/away");
    std::vector<Refusal> refused;
    const auto reader = store.newest_whole(kJob, refused);
    ASSERT_NE(reader, nullptr);
    store.keep(*reader, refused);
  }
  std::filesystem::rename(root_ + "/away", newest + "/parameters.safetensors");
  CheckpointStore store(directory_, 5);
  std::vector<Refusal> refused;
  const auto reader = store.newest_whole(kJob, refused);
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(difference(*reader, {.round = 10}), "");
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_THAT(refused[0].why, HasSubstr("manifest.json.passed-over"));
  store.keep(*reader, refused);  // is as it was
  EXPECT_TRUE(std::filesystem::exists(newest + "/manifest.json.passed-over"));
  expect_taken(store, {1, 20});
}

// Who can write there could put links in it, which lead elsewhere.
TEST_F(CheckpointFiles, TheFolderIsOurOwn) {
  const auto refused = [&](const std::string& why) {
    expect_error(ErrorCode::kInvalid, directory_ + " " + why,
                 [&] { CheckpointStore store(directory_, 1); });
  };
  std::filesystem::create_directory(root_ + "/other");
  std::filesystem::create_directory_symlink(root_ + "/other", directory_);
  refused("is a symbolic link");
  EXPECT_TRUE(std::filesystem::is_empty(root_ + "/other"));
  std::filesystem::remove(directory_);
  std::filesystem::create_directory(directory_);
  ASSERT_EQ(chmod(directory_.c_str(), 0770), 0);
  refused("has mode 770");
  ASSERT_EQ(chmod(directory_.c_str(), 0755), 0);
  if (geteuid() == 0) {
    ASSERT_EQ(chown(directory_.c_str(), 65534, 65534), 0);
    refused("belongs to user 65534");
    ASSERT_EQ(chown(directory_.c_str(), 0, 0), 0);
  }
  CheckpointStore(directory_, 1).raise_epoch(kJob);
}

TEST_F(CheckpointFiles, AFolderThatIsGoneIsNotMadeAgain) {
  CheckpointStore store(directory_, 1);
  store.check_there();
  const auto refused = [&] {
    const std::string why = "removed, replaced or unmounted";
    expect_error(ErrorCode::kUnavailable, why, [&] { store.raise_epoch(kJob); });
    expect_error(ErrorCode::kUnavailable, why, [&] { store.check_there(); });
  };
  std::filesystem::remove_all(directory_);
  refused();
  CheckpointStore other(directory_, 1);
  refused();
}

TEST_F(CheckpointFiles, TheFolderOfAJobMayBeNoLink) {
  const std::string outside = root_ + "/outside";
  std::filesystem::create_directory(outside);
  CheckpointStore store(directory_, 1);
  std::filesystem::create_directory_symlink(outside, directory_ + "/digits%2Ev2");
  const auto refused = [&](auto call) {
    expect_error(ErrorCode::kInvalid, "/digits%2Ev2: it is a symbolic link", call);
  };
  refused([&] { store.raise_epoch(kJob); });
  refused([&] { store.begin(kJob, {1, 10}); });
  refused([&] { store.list(kJob); });
  refused([&] { store.end(kJob); });
  EXPECT_TRUE(std::filesystem::is_empty(outside));
}

// Written by each version, as they lie in the tree. Later versions read them, too.
TEST(CheckpointGolden, EveryVersionStaysReadable) {
  for (uint32_t version = 1; version <= kManifestVersion; ++version) {
    SCOPED_TRACE(version);
    Checkpoints checkpoints(fmt::format("{}/checkpoint-{}", PHUB_GOLDEN, version));
    ASSERT_THAT(checkpoints.jobs(), ElementsAre(kJob));
    std::vector<Refusal> refused;
    const auto reader = checkpoints.newest_whole(kJob, refused);
    EXPECT_THAT(refused, IsEmpty());
    ASSERT_NE(reader, nullptr);
    const Content content{.round = 123,
                          .epoch = 4,
                          .shapes = version > 1,
                          .clocks = version > 2,
                          .branches = version > 3,
                          .killed = version > 4,
                          .forks = version > 5};
    EXPECT_EQ(difference(*reader, content), "");
  }
}

// A small file system, mounted over the directory.
class FullDisk : public CheckpointFiles {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(directory_);
    mounted_ = mount("phub-test", directory_.c_str(), "tmpfs", 0, "size=1m,mode=700") == 0;
    if (!mounted_) GTEST_SKIP() << "mounting a small file system takes root";
  }
  void TearDown() override {
    if (mounted_) umount2(directory_.c_str(), MNT_DETACH);
  }
  bool mounted_ = false;
};

TEST_F(FullDisk, LeavesTheOneBefore) {
  CheckpointStore store(directory_, 1);
  EXPECT_EQ(write_checkpoint(store, {.round = 10}), "");
  for (int i = 0; i < 3; ++i) {
    const std::string why = error_of(
        ErrorCode::kFull, [&] { write_checkpoint(store, {.round = 20, .extra = 130'000}); });
    EXPECT_THAT(why, ::testing::AllOf(HasSubstr("No space left on device"), HasSubstr(".safet")));
    std::vector<Refusal> refused;
    const auto reader = store.newest_whole(kJob, refused);
    EXPECT_THAT(refused, IsEmpty());
    EXPECT_EQ(difference(*reader, {.round = 10}), "");
  }
  EXPECT_EQ(write_checkpoint(store, {.round = 20, .extra = 50'000}), "");  // room again
}

}  // namespace checkpoint_store_test
}  // namespace phub::testing
