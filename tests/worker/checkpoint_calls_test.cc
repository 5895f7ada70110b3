// Checkpoints that a rank asks for: the server is a process, which is killed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "phub/checkpoint/store.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/saved_box.h"
#include "transport/control/control_client.h"
#include "transport/control/http_client.h"

namespace phub::testing {
namespace checkpoint_calls_test {

using ::testing::HasSubstr;

constexpr size_t kElements = 20'000;
constexpr uint32_t kLongMs = 60'000;

JobSpec spec_of(const std::string& name, uint32_t ranks = 1) {
  JobSpec spec;
  spec.name = name;
  spec.world_size = ranks;
  spec.optimizer = "adam";
  spec.lease_ms = 30'000;  // nobody is to be lost for being slow
  spec.keys = {{.name = "w", .elements = kElements}, {.name = "b", .elements = 7}};
  return spec;
}

void train(Worker& worker, uint64_t rounds = 1) {
  for (; rounds > 0; --rounds) {
    for (size_t key = 0; key < worker.keys(); ++key) {
      const std::span<float> gradient = worker.gradient(key);
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 13) - 5;
      worker.push(key);
    }
    worker.wait_all();
  }
}

// Of key 0: parameters and states.
struct State {
  std::vector<std::vector<float>> memory{3, std::vector<float>(kElements)};
  KeyState key{.key = 0, .arrays = {memory[0], memory[1], memory[2]}};
};

class CheckpointCalls : public SavedBoxTest {
 protected:
  CheckpointCalls() : SavedBoxTest(PHUB_BINARY) {}
  // The server, for the first time or again.
  void serve(uint64_t every = 1'000'000) {
    if (server_) {
      EXPECT_EQ(server_->end(SIGKILL), -SIGKILL);
    }
    SavedBoxTest::serve(every);
  }
  uint64_t newest(const std::string& job) {
    const auto all = Checkpoints(folder()).list(job);
    return all.empty() ? 0 : all.front().round;
  }
};

// A job that all ranks have left is saved as they left it, whatever was saved last.
TEST_F(CheckpointCalls, TheEndOfAJobIsSaved) {
  for (const uint32_t ranks : {1, 2}) {
    const std::string name = fmt::format("end{}", ranks);
    serve(7);
    std::vector<float> last;
    each_rank(ranks, [&](uint32_t rank) {
      Worker worker(options(spec_of(name, ranks), static_cast<int32_t>(rank)));
      train(worker, 40);
      if (rank == 0) last.assign(worker.parameters(0).begin(), worker.parameters(0).end());
      worker.leave();
    });
    ASSERT_TRUE(becomes([&] { return newest(name) == 40; })) << newest(name);
    EXPECT_TRUE(server_->printed("all ranks have left after round 40, and that is saved"))
        << server_->output();
    Checkpoints saved(folder());
    const auto reader = saved.open(name, saved.list(name).front());
    std::vector<float> read(kElements);
    reader->read_tensor(kParametersFile, 0, 0, std::as_writable_bytes(std::span(read)));
    EXPECT_EQ(read, last);
    Worker again(server_->options(spec_of(name)));
    EXPECT_EQ(again.first_round(), 1u);
    EXPECT_TRUE(
        server_->printed("begins at round 1: the one of this name, whose newest checkpoint "
                         "is of round 40, has ended"))
        << server_->output();
  }
}

// Its ranks save their own state every 1000 rounds, and a snapshot waits for such a round.
TEST_F(CheckpointCalls, TheEndOfAJobWhoseRanksSaveIsSavedWithoutTheirState) {
  serve(1000);
  WorkerOptions options = server_->options(spec_of("saver"));
  options.saver = [](uint64_t) { return RankState{{"state", {}}}; };
  {
    Worker worker(options);
    train(worker, 25);
    worker.leave();
  }
  EXPECT_TRUE(becomes([&] { return newest("saver") == 25; })) << newest("saver");
  EXPECT_TRUE(server_->printed("all ranks have left after round 25, and that is saved"))
      << server_->output();
}

// Somebody has removed the manifest of its only checkpoint.
TEST_F(CheckpointCalls, AJobDoesNotBeginAnewBecauseItsCheckpointIsDamaged) {
  serve();
  {
    Worker worker(server_->options(spec_of("lost")));
    train(worker, 3);
    worker.await_checkpoint(worker.checkpoint(), kLongMs);
    EXPECT_EQ(server_->end(SIGKILL), -SIGKILL);
  }
  const std::string saved = fmt::format("{}/lost/{}", folder(), folder_name({1, newest("lost")}));
  std::filesystem::remove(saved + "/manifest.json");
  server_.reset();
  serve();
  expect_error(ErrorCode::kInvalid, saved + " is passed over: it has no manifest.json",
               [&] { Worker(server_->options(spec_of("lost"))); });
  EXPECT_TRUE(std::filesystem::exists(saved + "/parameters.safetensors"));
}

// A new job cannot begin without its folder, which may come back.
TEST_F(CheckpointCalls, WhoJoinsWaitsForTheFolder) {
  serve();
  const std::string elsewhere = directory_.path() + "/elsewhere";
  HttpClient first(server_->address());
  EXPECT_EQ(first.request("GET", "/readyz", "", "", 30000).status, 200u);
  std::filesystem::rename(folder(), elsewhere);
  EXPECT_TRUE(becomes([&] {  // at once, unless the look at the folder takes long
    return first.request("GET", "/readyz", "", "", 30000).status == 503u;
  }));
  WorkerOptions options = server_->options(spec_of("waits"));
  expect_error(ErrorCode::kUnavailable, "removed, replaced or unmounted", [&] {
    ControlClient(server_->address()).join({.spec = options.spec, .transport = "tcp"}, kLongMs);
  });
  HttpClient probe(server_->address());
  options.connect_timeout_ms = kLongMs;
  auto joins = std::async(std::launch::async, [&] { return std::make_unique<Worker>(options); });
  EXPECT_EQ(probe.request("GET", "/readyz", "", "", 30000).status, 503u);
  std::filesystem::rename(elsewhere, folder());
  const std::unique_ptr<Worker> worker = joins.get();
  train(*worker);
  EXPECT_TRUE(
      becomes([&] { return probe.request("GET", "/readyz", "", "", 30000).status == 200u; }));
  worker->leave();
}

TEST_F(CheckpointCalls, SaveWhatIsCompleteNow) {
  serve();
  Worker worker(server_->options(spec_of("now")));
  expect_error(ErrorCode::kInvalid, "no round of job 'now' is complete",
               [&] { worker.checkpoint(); });
  for (const uint64_t rounds : {1, 1, 4}) {
    train(worker, rounds);
    const uint64_t round = worker.checkpoint();
    EXPECT_EQ(round, worker.round(0));
    worker.await_checkpoint(round, kLongMs);
    EXPECT_EQ(newest("now"), round);
  }
  // Of the same round there is one already.
  EXPECT_EQ(worker.checkpoint(), 6u);
  worker.await_checkpoint(6, kLongMs);
  worker.await_checkpoint(2);
  expect_error(ErrorCode::kTimeout, "no checkpoint of round 7",
               [&] { worker.await_checkpoint(7, 30); });
}

TEST_F(CheckpointCalls, ThatFailedAreTriedAgain) {
  serve();
  Worker worker(server_->options(spec_of("again")));
  train(worker, 2);
  worker.await_checkpoint(worker.checkpoint(), kLongMs);
  train(worker);
  // A file where the job's folder is.
  const std::string job = folder() + "/again", away = folder() + "-away";
  std::filesystem::rename(job, away);
  std::ofstream(job) << "in the way";
  EXPECT_ANY_THROW(worker.await_checkpoint(worker.checkpoint(), kLongMs));
  HttpClient reader(server_->address());
  const auto metrics = [&] { return reader.request("GET", "/metrics", "", "", 30000).body; };
  EXPECT_THAT(metrics(), HasSubstr("phub_job_failed_saves_total{job=\"again\"} 1\n"));
  std::filesystem::remove(job);
  std::filesystem::rename(away, job);
  EXPECT_EQ(worker.checkpoint(), 3u);
  worker.await_checkpoint(3, kLongMs);
  EXPECT_EQ(newest("again"), 3u);
  EXPECT_THAT(metrics(), HasSubstr("phub_job_failed_saves_total{job=\"again\"} 1\n"));
}

// A rank's transfer is one at a time, whatever threads ask.
TEST_F(CheckpointCalls, StatesAreTheirsWhoAsked) {
  serve();
  JobSpec spec = spec_of("threads");
  spec.keys[1].elements = 1'000'000;  // several pieces
  Worker worker(server_->options(spec));
  train(worker, 2);
  const auto read = [&worker](size_t key, std::vector<float>& into) {
    std::vector<float> states[2];
    for (auto& state : states) state.resize(into.size());
    KeyState state{.key = key, .arrays = {into, states[0], states[1]}};
    worker.get_state({&state, 1});
  };
  std::vector<float> first(kElements), second(spec.keys[1].elements);
  read(0, first);
  read(1, second);
  std::vector<float> other(second.size());
  std::jthread beside([&] {
    for (int i = 0; i < 5; ++i) read(1, other);
  });
  for (int i = 0; i < 20; ++i) {
    std::vector<float> again(first.size());
    read(0, again);
    EXPECT_TRUE(again == first);
  }
  beside.join();
  EXPECT_TRUE(other == second);
}

// The others go on meanwhile, and ask as well.
TEST_F(CheckpointCalls, OfSeveralRanksAreOne) {
  serve();
  constexpr uint64_t kRounds = 40;
  each_rank(3, [&](uint32_t rank) {
    Worker worker(options(spec_of("several", 3), static_cast<int32_t>(rank)));
    for (uint64_t round = 1; round <= kRounds; ++round) {
      train(worker);
      if (round % 4 != rank) continue;
      const uint64_t saved = worker.checkpoint();
      EXPECT_GE(saved, round);
      EXPECT_LE(saved, round + 1);
      if (round % 3 == 0) worker.await_checkpoint(saved, kLongMs);
    }
    worker.barrier();
    worker.await_checkpoint(worker.checkpoint(), kLongMs);
  });
  EXPECT_EQ(newest("several"), kRounds);
}

// Where the optimizer is in its steps is saved with the state that was set.
TEST_F(CheckpointCalls, KeepTheStepsThatWereSet) {
  serve();
  auto worker = std::make_unique<Worker>(server_->options(spec_of("steps")));
  train(*worker, 3);
  State state;
  EXPECT_EQ(worker->get_state({&state.key, 1}), 3u);
  state.key.step = 1000;
  EXPECT_EQ(worker->set_state({&state.key, 1}), 4u);
  worker->await_checkpoint(worker->checkpoint(), kLongMs);  // of before it
  EXPECT_EQ(newest("steps"), 3u);
  train(*worker, 2);
  worker->await_checkpoint(worker->checkpoint(), kLongMs);
  EXPECT_EQ(newest("steps"), 5u);
  State saved, restored;
  EXPECT_EQ(worker->get_state({&saved.key, 1}), 5u);
  EXPECT_EQ(saved.key.step, 1002u);
  train(*worker, 2);
  State later, again;
  EXPECT_EQ(worker->get_state({&later.key, 1}), 7u);

  serve();
  expect_error(ErrorCode::kRewound, "", [&] {
    for (;;) train(*worker);
  });
  worker = std::make_unique<Worker>(server_->options(spec_of("steps")));
  EXPECT_EQ(worker->first_round(), 6u);
  EXPECT_EQ(worker->get_state({&restored.key, 1}), 5u);
  EXPECT_EQ(restored.key.step, 1002u);
  EXPECT_EQ(restored.memory, saved.memory);
  train(*worker, 2);
  EXPECT_EQ(worker->get_state({&again.key, 1}), 7u);
  EXPECT_EQ(again.key.step, 1004u);
  EXPECT_EQ(again.memory, later.memory);
}

TEST_F(CheckpointCalls, WithRanksThatSaveAreOfTheirRounds) {
  serve(5);
  WorkerOptions options = server_->options(spec_of("savers"));
  options.saver = [](uint64_t round) {
    if (round >= 15) throw std::runtime_error("no state");
    return RankState{{"round", std::vector<std::byte>(round)}};
  };
  options.spec.progress_limit_ms = 3000;
  Worker worker(options);
  train(worker, 2);
  const uint64_t round = worker.checkpoint();
  EXPECT_EQ(round, 5u);
  expect_error(ErrorCode::kTimeout, "", [&] { worker.await_checkpoint(round, 30); });
  train(worker, 3);
  worker.await_checkpoint(round, kLongMs);
  EXPECT_EQ(newest("savers"), 5u);
  train(worker, 9);
  EXPECT_TRUE(becomes([&] { return worker.checkpoint() == 15; }));
  EXPECT_ANY_THROW(train(worker));
  expect_error(ErrorCode::kRankLost, "the parts of ranks 0 have not come",
               [&] { worker.await_checkpoint(15, kLongMs); });
}

// Beside one that is, a job that is not saved begins anew after its server.
TEST_F(CheckpointCalls, AJobMayBeLeftOut) {
  serve(2);
  JobSpec spec = spec_of("left-out");
  spec.saved = "no";
  for (int life = 0; life < 2; ++life) {
    WorkerOptions options = this->options(spec, 0);
    options.saver = [](uint64_t) { return ADD_FAILURE() << "asked", RankState(); };
    Worker worker(options);
    EXPECT_EQ(worker.first_round(), 1u);
    EXPECT_FALSE(worker.saves());
    train(worker, 9);
    expect_error(ErrorCode::kInvalid, "its option saved is 'no'", [&] { worker.checkpoint(); });
    EXPECT_EQ(status("left-out").durable_round, 0u);
    if (life == 0) serve(2);
  }
  EXPECT_FALSE(std::filesystem::exists(folder() + "/left-out"));
}

TEST(CheckpointErrors, OfAServerOrJobThatIsNotSaved) {
  {
    Box box(1);
    Worker worker(box.options(spec_of("none")));
    expect_error(ErrorCode::kInvalid, "phub serve --checkpoints", [&] { worker.checkpoint(); });
    expect_error(ErrorCode::kInvalid, "keeps no", [&] { worker.await_checkpoint(1); });
  }
  const TemporaryDirectory directory = TemporaryDirectory::in_memory();
  const ServerProcess server(PHUB_BINARY, {"--checkpoints", directory.path() + "/saved"});
  JobSpec spec = spec_of("sums");
  spec.optimizer = "none";
  Worker sums(server.options(spec));
  train(sums);
  expect_error(ErrorCode::kInvalid, "has no saver", [&] { sums.checkpoint(); });
  WorkerOptions options = server.options(spec_of("early", 2));
  options.await_ranks = false;
  Worker early(options);
  expect_error(ErrorCode::kInvalid, "has not begun", [&] { early.checkpoint(); });
}

}  // namespace checkpoint_calls_test
}  // namespace phub::testing
