// What `phub checkpoint …` prints, and that it fails when something is damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "phub/commands/commands.h"
#include "tests/phub/checkpoint_rig.h"
#include "tests/temporary_directory.h"

namespace phub::testing {
namespace checkpoint_command_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class CheckpointCommand : public ::testing::Test {
 protected:
  CheckpointCommand() {
    CheckpointStore store(directory_, 3);
    write_checkpoint(store, {.round = 10});
    write_checkpoint(store, {.round = 20});
  }

  // Output, and the error's text if there is one.
  std::string run(std::vector<std::string> arguments) {
    CLI::App app;
    add_checkpoint_command(app);
    arguments.insert(arguments.begin(), "checkpoint");
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    ::testing::internal::CaptureStdout();
    std::string error;
    try {
      app.parse(arguments);
    } catch (const std::exception& thrown) {
      error = std::string("error: ") + thrown.what();
    }
    return ::testing::internal::GetCapturedStdout() + error;
  }
  void damage(const std::string& file) {
    const std::string path =
        directory_ + "/digits%2Ev2/" + folder_name({.epoch = 1, .round = 20}) + "/" + file;
    std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(stream);
    stream.seekp(50);
    stream.put('\x01');
  }

  const TemporaryDirectory temporary_;
  const std::string root_ = temporary_.path(), directory_ = root_ + "/checkpoints";
};

TEST_F(CheckpointCommand, Lists) {
  const std::string text = run({"list", directory_});
  EXPECT_THAT(text, ContainsRegex("EPOCH +ROUND +FILES +SIZE +RANKS +BRANCHES +JOB\n"
                                  " +1 +20 +7 +[0-9.]+ KiB +2 +2 +digits.v2\n"
                                  " +1 +10 +7 +[0-9.]+ KiB +2 +2 +digits.v2\n"));
  EXPECT_THAT(run({"list", root_ + "/none"}), HasSubstr("error: list of " + root_ + "/none"));
}

TEST_F(CheckpointCommand, Shows) {
  const std::string text = run({"show", directory_, kJob, "--round", "10"});
  EXPECT_THAT(text,
              HasSubstr("job 'digits.v2', epoch 1, after round 10: 2 keys, optimizer momentum"));
  EXPECT_THAT(text, HasSubstr("F32 [10, 7]  fc.weight"));
  EXPECT_THAT(text, HasSubstr("saved by rank 1 as '../../position'"));
  EXPECT_THAT(text, HasSubstr("branch 0 lr=0.25\nbranch 2, forked from 1 before round 3\n"
                              "branch 0 runs from round 1 on\nbranch 2 runs from round 14 on\n"));
  EXPECT_THAT(text, HasSubstr("branch-2-state-momentum.safetensors  "));
  EXPECT_THAT(run({"show", directory_, kJob}), HasSubstr("after round 20"));
  EXPECT_THAT(run({"show", directory_, kJob, "--round", "11"}), HasSubstr("no such checkpoint"));
  EXPECT_THAT(run({"show", directory_, "other"}), HasSubstr("of job 'other'"));
}

TEST_F(CheckpointCommand, Verifies) {
  EXPECT_THAT(run({"verify", directory_}), HasSubstr("2 checkpoints, all whole"));
  damage("state-momentum.safetensors");
  const std::string text = run({"verify", directory_});
  EXPECT_THAT(text, HasSubstr("DAMAGED  job 'digits.v2', epoch 1, round 20"));
  EXPECT_THAT(text, HasSubstr("state-momentum.safetensors: the checksum of bytes 0 to"));
  EXPECT_THAT(text, HasSubstr("whole    job 'digits.v2', epoch 1, round 10"));
  EXPECT_THAT(text, HasSubstr("error: 1 of 2 checkpoints"));
  damage("manifest.json");
  EXPECT_THAT(run({"verify", directory_}), HasSubstr("manifest: its checksum is"));
  EXPECT_THAT(run({"list", directory_}), HasSubstr("damaged: see"));
}

TEST_F(CheckpointCommand, NothingFoundIsNotWhole) {
  for (const char* command : {"list", "verify"}) {
    EXPECT_THAT(run({command, directory_, "other"}),
                HasSubstr("error: " + directory_ + " has no checkpoint of job 'other'"));
    // A job's folder in place of the box's, and a folder of something else.
    EXPECT_THAT(run({command, directory_ + "/digits%2Ev2"}), HasSubstr("no box has written there"));
    EXPECT_THAT(run({command, root_}), HasSubstr("error: " + root_ + " has no checkpoints"));
    const std::string fresh = root_ + "/fresh";
    const CheckpointStore box(fresh, 3);
    EXPECT_THAT(run({command, fresh}), Not(HasSubstr("error")));
  }
}

TEST_F(CheckpointCommand, ExportsTheTensors) {
  const std::string to = root_ + "/exported";
  EXPECT_THAT(run({"export", directory_, kJob, to}), HasSubstr(to + "/parameters.safetensors"));
  const auto content = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string folder = directory_ + "/digits%2Ev2/" + folder_name({.epoch = 1, .round = 20});
  for (const std::string& file : {std::string(kParametersFile), kMomentum, kBranchMomentum}) {
    EXPECT_FALSE(content(to + "/" + file).empty());
    EXPECT_EQ(content(to + "/" + file), content(folder + "/" + file));
  }
  EXPECT_THAT(run({"export", directory_, kJob, to + "/" + std::string(kParametersFile)}),
              HasSubstr("is no folder"));
  EXPECT_FALSE(std::filesystem::exists(to + "/rank-1"));
  EXPECT_THAT(run({"export", directory_, kJob, to}), HasSubstr("is there already"));
  damage("state-momentum.safetensors");
  EXPECT_THAT(run({"export", directory_, kJob, to + "2"}), HasSubstr("error"));
}

}  // namespace checkpoint_command_test
}  // namespace phub::testing
