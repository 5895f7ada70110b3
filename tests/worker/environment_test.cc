// What launchers say, and which of them is believed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "transport/error.h"
#include "worker/worker.h"

namespace phub {
namespace environment_test {

using Variables = std::map<std::string, std::string>;

const Variables kPhub = {{"PHUB_RANK", "1"}, {"PHUB_WORLD_SIZE", "3"}};
const Variables kTorchrun = {{"RANK", "4"}, {"WORLD_SIZE", "8"}};
const Variables kKubernetes = {{"JOB_COMPLETION_INDEX", "2"}, {"WORLD_SIZE", "4"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}, {"SLURM_STEP_ID", "3"}};
const Variables kMpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "6"}, {"OMPI_COMM_WORLD_SIZE", "7"}};

class Environment : public ::testing::Test {
 protected:
  Environment() {
    for (const char* name :
         {"PHUB_RANK", "PHUB_WORLD_SIZE", "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS",
          "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
          "JOB_COMPLETION_INDEX", "PHUB_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID",
          "SLURM_STEP_ID", "SLURM_JOB_NUM_NODES", "SLURM_HET_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
      unsetenv(name);
    }
  }
  static void set(const Variables& variables) {
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  // The message with which a worker with these options is refused, before it asks a server.
  static std::string refusal(WorkerOptions options = options_from_environment()) {
    options.spec.name = "job";
    options.spec.keys = {{.name = "key", .elements = 1}};
    options.server = "127.0.0.1:1";
    options.connect_timeout_ms = 1;
    try {
      const Worker worker(options);
      return {};
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInvalid) return error.what();
      // It has asked.
      EXPECT_THAT(error.code(), ::testing::AnyOf(ErrorCode::kUnavailable, ErrorCode::kTimeout));
      return {};
    }
  }
  // What reading the environment says on stderr.
  static std::string said() {
    ::testing::internal::CaptureStderr();
    options_from_environment();
    return ::testing::internal::GetCapturedStderr();
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
      EXPECT_THAT(refusal(), ::testing::HasSubstr(missing == "WORLD_SIZE" ? " without WORLD_SIZE"
                                                  : missing == "JOB_COMPLETION_INDEX"
                                                      ? "WORLD_SIZE=4 without RANK"
                                                      : " without " + missing));
      for (const auto& [name, value] : pair) unsetenv(name.c_str());
    }
  }
  set(kSlurm);
  unsetenv("SLURM_NTASKS");
  EXPECT_THAT(refusal(), ::testing::HasSubstr("SLURM_PROCID=5 without SLURM_NTASKS"));
}

TEST_F(Environment, HalfOfOurPairDoesNotFallBackToALaunchers) {
  set(kTorchrun);
  setenv("PHUB_RANK", "1", 1);
  EXPECT_THAT(refusal(), ::testing::HasSubstr("PHUB_RANK=1 without PHUB_WORLD_SIZE"));
}

TEST_F(Environment, TheProgramMayHaveTheRank) {
  set({{"RANK", "1"}});
  WorkerOptions options = options_from_environment();
  EXPECT_THAT(refusal(options), ::testing::HasSubstr("RANK=1 without WORLD_SIZE"));
  options.spec.world_size = 2;
  EXPECT_THAT(refusal(options), ::testing::HasSubstr("RANK=1 without WORLD_SIZE"));
  options.rank = 0;
  EXPECT_EQ(refusal(options), "");
  set({{"PHUB_WORLD_SIZE", "3"}});
  options = options_from_environment();
  EXPECT_EQ(options.spec.world_size, 3u);
  EXPECT_THAT(refusal(options), ::testing::HasSubstr("PHUB_WORLD_SIZE=3 without PHUB_RANK"));
  options.rank = 0;
  EXPECT_EQ(refusal(options), "");
  set({{"PHUB_RANK", "many"}});
  options = options_from_environment();
  EXPECT_THAT(refusal(options), ::testing::HasSubstr("PHUB_RANK='many' is not a number"));
  options.rank = 0;
  EXPECT_EQ(refusal(options), "");
}

TEST_F(Environment, LaunchersThatContradictEachOtherAreSaid) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(said(), "");
  set({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}});
  EXPECT_THAT(
      said(),
      ::testing::AllOf(::testing::HasSubstr("RANK=0 and WORLD_SIZE=1 (torchrun) count, and "
                                            "PMI_RANK=1 and PMI_SIZE=2 (MPICH or Intel MPI) do "
                                            "not"),
                       ::testing::HasSubstr("SLURM_PROCID=5 and SLURM_NTASKS=8 (Slurm) do not")));
  EXPECT_EQ(said(), "");  // once
  set({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}});
  EXPECT_EQ(said(), "");  // the same as MPI's, within one of two tasks of Slurm
  set(kPhub);
  set({{"RANK", "0"}});
  EXPECT_EQ(said(), "");  // by hand
}

TEST_F(Environment, AStepOfSeveralComponentsIsRefused) {
  set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_ID", "0"}});
  setenv("SLURM_HET_SIZE", "2", 1);
  EXPECT_THAT(refusal(), ::testing::HasSubstr("SLURM_HET_SIZE=2"));
  set(kMpich);  // which counts the tasks of all
  EXPECT_EQ(options_from_environment().rank, 1);
  unsetenv("PMI_RANK");
  unsetenv("PMI_SIZE");
  unsetenv("SLURM_HET_SIZE");
  EXPECT_EQ(options_from_environment().rank, 0);
  setenv("SLURM_PROCID", "1", 1);  // srun A : B
  EXPECT_THAT(refusal(), ::testing::HasSubstr("step of several components"));
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
              ::testing::HasSubstr("SLURM_NTASKS=4, but this process is the batch script"));
  setenv("SLURM_STEP_ID", "4294967290", 1);  // salloc's shell
  EXPECT_THAT(refusal(), ::testing::HasSubstr("start the program with srun"));
  setenv("SLURM_STEP_ID", "0", 1);
  EXPECT_EQ(options_from_environment().rank, 0);
  unsetenv("SLURM_STEP_ID");
  setenv("SLURM_NTASKS", "1", 1);
  EXPECT_EQ(options_from_environment().rank, -1);  // alone
  unsetenv("SLURM_NTASKS");
  setenv("SLURM_JOB_NUM_NODES", "2", 1);
  EXPECT_THAT(refusal(), ::testing::HasSubstr("SLURM_JOB_NUM_NODES=2"));
}

TEST_F(Environment, ARankOutsideTheWorldIsRefused) {
  set(kPhub);
  setenv("PHUB_RANK", "3", 1);
  EXPECT_THAT(refusal(), ::testing::HasSubstr("PHUB_RANK=3 and PHUB_WORLD_SIZE=3"));
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

}  // namespace environment_test
}  // namespace phub
