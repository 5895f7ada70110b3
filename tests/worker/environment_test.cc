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
const Variables kSlurm = {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}, {"SLURM_STEP_ID", "3"}};
const Variables kMpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "6"}, {"OMPI_COMM_WORLD_SIZE", "7"}};

class Environment : public testing::Test {
 protected:
  Environment() {
    for (const char* name :
         {"PHUB_RANK", "PHUB_WORLD_SIZE", "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
          "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
          "JOB_COMPLETION_INDEX", "PHUB_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID",
          "SLURM_STEP_ID", "SLURM_JOB_NUM_NODES", "MASTER_ADDR", "MASTER_PORT"}) {
      unsetenv(name);
    }
  }
  static void set(const Variables& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  // The message with which the environment is refused; empty if it is accepted.
  static std::string refusal() {
    try {
      options_from_environment();
      return {};
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalid);
      return error.what();
    }
  }
};

TEST_F(Environment, OurOwnRankWinsOverALaunchers) {
  EXPECT_EQ(options_from_environment().rank, -1);
  set(kKubernetes);
  EXPECT_EQ(options_from_environment().rank, 2);
  EXPECT_EQ(options_from_environment().spec.world_size, 4u);
  set(kSlurm);
  EXPECT_EQ(options_from_environment().rank, 5);
  set(kMpich);
  EXPECT_EQ(options_from_environment().rank, 1);
  EXPECT_EQ(options_from_environment().spec.world_size, 2u);
  set(kOpenMpi);
  EXPECT_EQ(options_from_environment().rank, 6);
  EXPECT_EQ(options_from_environment().spec.world_size, 7u);
  set(kTorchrun);
  EXPECT_EQ(options_from_environment().rank, 4);
  EXPECT_EQ(options_from_environment().spec.world_size, 8u);
  set(kPhub);
  EXPECT_EQ(options_from_environment().rank, 1);
  EXPECT_EQ(options_from_environment().spec.world_size, 3u);
}

TEST_F(Environment, HalfAPairIsAnError) {
  for (const Variables& pair : {kPhub, kTorchrun, kOpenMpi, kMpich, kKubernetes}) {
    for (const auto& [missing, unused] : pair) {
      set(pair);
      unsetenv(missing.c_str());
      EXPECT_THAT(refusal(), testing::HasSubstr(missing == "WORLD_SIZE" ? " without WORLD_SIZE"
                                                : missing == "JOB_COMPLETION_INDEX"
                                                    ? "WORLD_SIZE=4 without RANK"
                                                    : " without " + missing));
      for (const auto& [name, value] : pair) unsetenv(name.c_str());
    }
  }
  set(kSlurm);
  unsetenv("SLURM_NTASKS");
  EXPECT_THAT(refusal(), testing::HasSubstr("SLURM_PROCID=5 without SLURM_NTASKS"));
}

TEST_F(Environment, HalfOfOurPairDoesNotFallBackToALaunchers) {
  set(kTorchrun);
  setenv("PHUB_RANK", "1", 1);
  EXPECT_THAT(refusal(), testing::HasSubstr("PHUB_RANK=1 without PHUB_WORLD_SIZE"));
}

TEST_F(Environment, MpiInABatchScriptIsNotTheScript) {
  set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_ID", "7"}});
  set(kMpich);
  EXPECT_EQ(options_from_environment().rank, 1);
  EXPECT_EQ(options_from_environment().spec.world_size, 2u);
  setenv("SLURM_STEP_ID", "0", 1);  // of mpirun's helper: not in each rank
  EXPECT_EQ(options_from_environment().spec.name, "slurm-7");
}

TEST_F(Environment, ABatchScriptIsNoRankOfItsTasks) {
  set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
  EXPECT_THAT(refusal(),
              testing::HasSubstr("SLURM_NTASKS=4, but this process is the batch script"));
  setenv("SLURM_STEP_ID", "4294967290", 1);  // salloc's shell
  EXPECT_THAT(refusal(), testing::HasSubstr("start the program with srun"));
  setenv("SLURM_STEP_ID", "0", 1);
  EXPECT_EQ(options_from_environment().rank, 0);
  unsetenv("SLURM_STEP_ID");
  setenv("SLURM_NTASKS", "1", 1);
  EXPECT_EQ(options_from_environment().rank, -1);  // alone
  unsetenv("SLURM_NTASKS");
  setenv("SLURM_JOB_NUM_NODES", "2", 1);
  EXPECT_THAT(refusal(), testing::HasSubstr("SLURM_JOB_NUM_NODES=2"));
}

TEST_F(Environment, ARankOutsideTheWorldIsRefused) {
  set(kPhub);
  setenv("PHUB_RANK", "3", 1);
  EXPECT_THAT(refusal(), testing::HasSubstr("PHUB_RANK=3 and PHUB_WORLD_SIZE=3"));
}

TEST_F(Environment, StepsOfAnAllocationAreJobsOfTheirOwn) {
  set(kSlurm);
  setenv("SLURM_JOB_ID", "77", 1);
  EXPECT_EQ(options_from_environment().spec.name, "slurm-77.3");
  setenv("SLURM_STEP_ID", "4", 1);
  EXPECT_EQ(options_from_environment().spec.name, "slurm-77.4");
  set(kPhub);  // a rank that is started again, in a step of its own
  EXPECT_EQ(options_from_environment().spec.name, "slurm-77");
}

TEST_F(Environment, TorchrunWithoutARunIdHasAJob) {
  set(kTorchrun);
  for (const char* none : {"none", ""}) {
    setenv("TORCHELASTIC_RUN_ID", none, 1);
    unsetenv("MASTER_ADDR");
    EXPECT_EQ(options_from_environment().spec.name, "torchrun");
    set({{"MASTER_ADDR", "fd00::1"}, {"MASTER_PORT", "29500"}});
    EXPECT_EQ(options_from_environment().spec.name, "torchrun-fd00--1-29500");
    unsetenv("MASTER_PORT");
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
