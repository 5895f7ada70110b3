// A server that dies, is told to end, or finds its checkpoints damaged, and is started again: real
// processes, and every round compared with the replay of the log.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/worker/saved_box.h"
#include "tests/worker/training.h"

namespace phub::testing {
namespace restore_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Restore : public SavedBoxTest {
 protected:
  Restore() : SavedBoxTest(PHUB_BINARY) {}
  // The server, for the first time or again.
  void serve(uint64_t every = 20) { SavedBoxTest::serve(every); }

  static std::vector<Process*> start(Training& training, int32_t ranks, const Flags& flags = {}) {
    std::vector<Process*> workers;
    for (int32_t rank = 0; rank < ranks; ++rank) workers.push_back(&training.start(rank, flags));
    return workers;
  }
  // The round that a worker begins with, once it has joined.
  static uint64_t first_round_of(Process& worker) {
    EXPECT_TRUE(worker.printed("joined", kLong)) << worker.output();
    uint32_t rank = 0, incarnation = 0;
    unsigned long long round = 0;
    EXPECT_EQ(std::sscanf(worker.output().c_str(), "joined rank %u incarnation %u round %llu",
                          &rank, &incarnation, &round),
              3)
        << worker.output();
    return round;
  }
  void end_server(int signal, std::vector<Process*>& workers) {
    EXPECT_EQ(server_->end(signal), signal == SIGKILL ? -SIGKILL : 0) << server_->output();
    for (Process* worker : workers) {
      EXPECT_EQ(worker->wait(kLong), 3);
      EXPECT_THAT(worker->output(), HasSubstr("rewound: "));
    }
  }
  static bool saved(const Training& training, uint64_t round) {
    return becomes([&] { return training.status().durable_round >= round; });
  }
};

TEST_F(Restore, AServerThatIsToldToEndSavesFirst) {
  serve(1'000'000'000);
  Training training(server_->address(), fault_spec("told", 3, "adam"));
  std::vector<Process*> workers = start(training, 3);
  ASSERT_TRUE(training.goes_on(50));
  const uint64_t round = training.round();
  end_server(SIGTERM, workers);
  serve();
  training.move_to(server_->address());
  workers = start(training, 3);
  EXPECT_GT(first_round_of(*workers[0]), round);
  training.undo_from(first_round_of(*workers[0]));
  ASSERT_TRUE(training.goes_on(5));
  training.end();
  training.check();
}

TEST_F(Restore, AJobThatHasEndedBeginsAnew) {
  serve();
  Training first(server_->address(), fault_spec("ends", 2, "adam"));
  start(first, 2);
  ASSERT_TRUE(saved(first, 1));
  first.end();
  first.check();
  Training second(server_->address(), fault_spec("ends", 2, "adam"));
  EXPECT_EQ(first_round_of(*start(second, 2)[0]), 1u);
  ASSERT_TRUE(saved(second, 1));
  second.end();
  second.check();
}

// Nobody else comes in time, or the first one dies again: that is not the job's end.
TEST_F(Restore, AJobThatIsAbandonedGoesOnLater) {
  serve();
  Training training(server_->address(), fault_spec("abandoned", 2, "adam"));
  std::vector<Process*> workers = start(training, 2);
  ASSERT_TRUE(saved(training, 1));
  end_server(SIGKILL, workers);
  serve();
  training.move_to(server_->address());
  Process& alone = training.start(1);
  ASSERT_TRUE(becomes([&] { return training.rank(1).state == "live"; })) << alone.output();
  alone.send(SIGKILL);
  ASSERT_EQ(alone.wait(kLong), -SIGKILL);
  EXPECT_TRUE(becomes([&] { return training.status().name.empty(); }));
  Process& nobody = training.start(7);
  EXPECT_EQ(nobody.wait(kLong), 3) << nobody.output();
  EXPECT_TRUE(becomes([&] { return training.status().name.empty(); }));
  workers = start(training, 2, {"--patient"});
  EXPECT_GT(first_round_of(*workers[0]), 1u);
  ASSERT_TRUE(training.goes_on(10));
  training.end();
}

TEST_F(Restore, WhatDiffersIsRefusedUntilTheJobIsDeleted) {
  serve();
  Training training(server_->address(), fault_spec("same", 2, "adam"));
  std::vector<Process*> workers = start(training, 2);
  ASSERT_TRUE(saved(training, 1));
  end_server(SIGKILL, workers);
  serve();
  for (const char* optimizer : {"nesterov", "none"}) {
    Training other(server_->address(), fault_spec("same", 2, optimizer));
    Process& refused = other.start(0);
    EXPECT_EQ(refused.wait(kLong), 3);
    EXPECT_THAT(refused.output(), AllOf(HasSubstr("job 'same' is to go on after round "),
                                        HasSubstr("differs from it: optimizer")));
  }
  ControlClient(server_->address()).remove("same");
  EXPECT_THROW(ControlClient(server_->address()).remove("same"), Error);
  Training anew(server_->address(), fault_spec("same", 2, "nesterov"));
  EXPECT_EQ(first_round_of(*start(anew, 2)[0]), 1u);
  anew.end();
}

TEST_F(Restore, NoCheckpointIsWhole) {
  serve();
  Training training(server_->address(), fault_spec("broken", 2, "adam"));
  std::vector<Process*> workers = start(training, 2);
  ASSERT_TRUE(saved(training, 1));
  end_server(SIGKILL, workers);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder() + "/broken")) {
    if (entry.path().extension() == ".safetensors") std::filesystem::resize_file(entry.path(), 9);
  }
  serve();
  training.move_to(server_->address());
  Process& refused = training.start(0);
  EXPECT_EQ(refused.wait(kLong), 3);
  EXPECT_THAT(refused.output(), AllOf(HasSubstr("none of those that it has is whole"),
                                      HasSubstr("parameters.safetensors")));
}

TEST_F(Restore, ADamagedCheckpointIsPassedOver) {
  serve();
  Training training(server_->address(), fault_spec("damaged", 2, "adam"));
  std::vector<Process*> workers = start(training, 2);
  ASSERT_TRUE(saved(training, 1));
  ASSERT_TRUE(saved(training, training.status().durable_round + 1));
  end_server(SIGKILL, workers);
  std::vector<std::string> folders;
  for (const auto& entry : std::filesystem::directory_iterator(folder() + "/damaged")) {
    if (entry.path().filename().string().starts_with("round-")) folders.push_back(entry.path());
  }
  std::ranges::sort(folders);
  ASSERT_GE(folders.size(), 2u);
  std::fstream file(folders.back() + "/state-exp_avg.safetensors",
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-5, std::ios::end);
  const auto byte = static_cast<char>(file.peek() ^ 1);
  file.seekp(-5, std::ios::end);
  file.put(byte);
  file.close();
  serve();
  training.move_to(server_->address());
  workers = start(training, 2);
  const std::string before = std::filesystem::path(folders[folders.size() - 2]).filename();
  EXPECT_EQ(first_round_of(*workers[0]), std::stoull(before.substr(6)) + 1);
  training.undo_from(first_round_of(*workers[0]));
  EXPECT_THAT(server_->output(), AllOf(HasSubstr(folders.back() + " is passed over: "),
                                       HasSubstr("state-exp_avg.safetensors")));
  ASSERT_TRUE(training.goes_on(10));
  training.end();
  training.check();
}

TEST_F(Restore, AnotherServerIsKeptOut) {
  serve();
  Process other({PHUB_BINARY, "serve", "--listen", "127.0.0.1:0", "--checkpoints", folder()},
                directory_.path() + "/other");
  EXPECT_EQ(other.wait(kLong), 1);
  EXPECT_THAT(other.output(), HasSubstr(std::to_string(server_->pid())));
}

}  // namespace restore_test
}  // namespace phub::testing
