// What launchers say, and which of them is believed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "transport/error.h"
#include "worker/worker.h"

namespace phub {
namespace {

using Variables = std::map<std::string, std::string>;

const Variables kPhub = {{"PHUB_RANK", "1"}, {"PHUB_WORLD_SIZE", "3"}};
const Variables kTorchrun = {{"RANK", "4"}, {"WORLD_SIZE", "8"}};
const Variables kKubernetes = {{"JOB_COMPLETION_INDEX", "2"}, {"WORLD_SIZE", "4"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}};

class Environment : public testing::Test {
 protected:
  Environment() {
    for (const char* name :
         {"PHUB_RANK", "PHUB_WORLD_SIZE", "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
          "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX", "PHUB_JOB",
          "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"}) {
      unsetenv(name);
    }
  }
  static void set(const Variables& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
};

TEST_F(Environment, OurOwnRankWinsOverALaunchers) {
  EXPECT_EQ(options_from_environment().rank, -1);
  set(kKubernetes);
  EXPECT_EQ(options_from_environment().rank, 2);
  EXPECT_EQ(options_from_environment().spec.world_size, 4u);
  set(kSlurm);
  EXPECT_EQ(options_from_environment().rank, 5);
  set(kTorchrun);
  EXPECT_EQ(options_from_environment().rank, 4);
  EXPECT_EQ(options_from_environment().spec.world_size, 8u);
  set(kPhub);
  EXPECT_EQ(options_from_environment().rank, 1);
  EXPECT_EQ(options_from_environment().spec.world_size, 3u);
}

TEST_F(Environment, ARankWithoutAWorldDoesNotCount) {
  set(kTorchrun);
  setenv("PHUB_RANK", "1", 1);
  EXPECT_EQ(options_from_environment().rank, 4);
}

TEST_F(Environment, ARankOutsideTheWorldIsRefused) {
  set(kPhub);
  setenv("PHUB_RANK", "3", 1);
  try {
    options_from_environment();
    FAIL() << "it was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalid);
    EXPECT_THAT(error.what(), testing::HasSubstr("PHUB_RANK=3 and PHUB_WORLD_SIZE=3"));
  }
}

TEST_F(Environment, TheJobIsOursOrTheLaunchers) {
  EXPECT_EQ(options_from_environment().spec.name, "");
  setenv("SLURM_JOB_ID", "77", 1);
  EXPECT_EQ(options_from_environment().spec.name, "slurm-77");
  setenv("TORCHELASTIC_RUN_ID", "none", 1);  // what torchrun says if it was given none
  EXPECT_EQ(options_from_environment().spec.name, "slurm-77");
  setenv("TORCHELASTIC_RUN_ID", "run-3", 1);
  EXPECT_EQ(options_from_environment().spec.name, "run-3");
  setenv("PHUB_JOB", "digits", 1);
  EXPECT_EQ(options_from_environment().spec.name, "digits");
}

}  // namespace
}  // namespace phub
