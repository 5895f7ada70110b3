// Workers that outlive their server: they wait for it, join again, and go on from its checkpoint.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/expect_error.h"
#include "tests/worker/options.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "worker/phub.h"

namespace phub::testing {
namespace rejoin_test {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr size_t kElements = 20'000;

class Rejoin : public ::testing::Test {
 protected:
  void serve(const std::string& listen = "127.0.0.1:0", const std::string& folder = "checkpoints") {
    const std::vector<std::string> flags = {"--checkpoints", at(folder), "--checkpoint-every",
                                            "10"};
    server_.emplace(PHUB_BINARY, flags, listen);
  }
  std::string at(const std::string& name) const { return directory_.path() + "/" + name; }
  std::string die() {
    const std::string address = server_->address();
    EXPECT_EQ(server_->end(SIGKILL), -SIGKILL);
    return address;
  }

  // A job of one rank, in this process: every round adds 1 to every parameter.
  WorkerOptions options_of_one(const std::string& name = "one") const {
    JobSpec spec;
    spec.name = name;
    spec.optimizer = "sgd";
    spec.hyper = {{"lr", 1.0}};
    spec.lease_ms = 3000;
    spec.keys = {{"w", kElements}};
    WorkerOptions options = options_of(server_->address(), spec);
    options.rank = 0;
    return options;
  }
  static void train(Worker& worker, uint64_t rounds) {
    for (uint64_t i = 0; i < rounds; ++i) {
      std::ranges::fill(worker.gradient(0), -1.0f);
      worker.push_pull(0);
    }
  }
  // Until the server is gone.
  static Error train_until_it_fails(Worker& worker) {
    try {
      for (;;) train(worker, 1);
    } catch (const Error& error) {
      return {error.code(), error.what()};
    }
  }
  uint64_t saved(const std::string& name, uint64_t round) const {
    ControlClient control(server_->address());
    uint64_t durable = 0;
    becomes([&] {
      for (const JobStatus& job : control.status().jobs) {
        if (job.name == name) durable = job.durable_round;
      }
      return durable >= round;
    });
    return durable;
  }
  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  std::optional<ServerProcess> server_;
};

TEST_F(Rejoin, WorkersGoOnWithoutBeingStartedAgain) {
  std::mt19937_64 random(fresh_seeds(1).first);
  serve();
  Training training(server_->address(), fault_spec("killed", 3, "adam"));
  std::vector<Process*> workers;
  for (int32_t rank = 0; rank < 3; ++rank) workers.push_back(&training.start(rank, {"--rejoin"}));
  for (int life = 0; life < 3; ++life) {
    // The first time before there is a checkpoint: then the job begins anew.
    if (life > 0) {
      ASSERT_TRUE(becomes([&] { return training.status().durable_round > 0; }));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300'000));
    serve(die());
    if (life % 2 == 1) {  // and again, while they join
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200'000));
      serve(die());
    }
    ASSERT_TRUE(becomes([&] { return training.status().state == "running"; }));
    ASSERT_TRUE(training.goes_on(15));
  }
  training.end();
  for (size_t rank = 0; rank < workers.size(); ++rank) {
    EXPECT_TRUE(left(*workers[rank])) << workers[rank]->output();
    const std::string own = fmt::format("joined rank {} ", rank);
    for (size_t at = 0; (at = workers[rank]->output().find("joined rank ", at)) != own.npos; ++at) {
      EXPECT_EQ(workers[rank]->output().substr(at, own.size()), own);
    }
  }
  training.check();
}

// Nobody is there for a while; then a server at another address.
TEST_F(Rejoin, AtOneOfSeveralAddresses) {
  serve();
  const std::string first = server_->address();
  serve();
  const std::string second = server_->address();
  EXPECT_EQ(server_->end(SIGTERM), 0);
  serve(first);
  Training training(fmt::format("{},{}", second, first), fault_spec("moves", 2, "nesterov"));
  std::vector<Process*> workers = {&training.start(0, {"--rejoin"}),
                                   &training.start(1, {"--rejoin"})};
  ASSERT_GE(saved("moves", 10), 10u);
  die();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  serve(second);
  training.move_to(second);
  ASSERT_TRUE(becomes([&] { return training.status().state == "running"; }));
  ASSERT_TRUE(training.goes_on(15));
  training.end();
  for (Process* worker : workers) EXPECT_TRUE(left(*worker)) << worker->output();
  training.check();
}

TEST_F(Rejoin, ParametersAreThoseOfTheRoundBeforeTheFirst) {
  serve();
  WorkerOptions options = options_of_one();
  options.spec.initial = "broadcast";
  auto worker = std::make_unique<Worker>(options);
  const std::vector<float> initial(kElements, 0.0f);
  worker->broadcast(initial);
  expect_error(ErrorCode::kInvalid, "has not lost its server", [&] { worker->rejoin(); });
  train(*worker, 25);
  const uint64_t last = saved("one", 10);
  serve(die());
  const Error error = train_until_it_fails(*worker);
  EXPECT_EQ(error.code(), ErrorCode::kRewound);
  EXPECT_THAT(error.what(), HasSubstr("'one'"));
  worker = worker->rejoin();
  EXPECT_EQ(worker->first_round(), last + 1);
  EXPECT_FALSE(worker->broadcast(initial));
  EXPECT_THAT(worker->parameters(0), Each(static_cast<float>(last)));
  train(*worker, 1);
  EXPECT_THAT(worker->parameters(0), Each(static_cast<float>(last + 1)));
}

TEST_F(Rejoin, RegisteredMemoryStaysRegistered) {
  serve();
  std::vector<float> gradient(kElements, -1.0f), parameters(kElements);
  auto worker = std::make_unique<Worker>(options_of_one());
  worker->register_memory(0, {.gradient = gradient.data(), .parameters = parameters.data()});
  for (int i = 0; i < 15; ++i) worker->push_pull(0);
  EXPECT_THAT(parameters, Each(15.0f));
  const uint64_t last = saved("one", 10);
  serve(die());
  EXPECT_EQ(error_of(ErrorCode::kRewound,
                     [&] {
                       for (;;) worker->push_pull(0);
                     })
                .empty(),
            false);
  worker = worker->rejoin();
  EXPECT_EQ(worker->first_round(), last + 1);
  std::ranges::fill(parameters, -1.0f);
  worker->wait(0);
  worker->push_pull(0);
  EXPECT_THAT(parameters, Each(static_cast<float>(last + 1)));
}

TEST_F(Rejoin, AJobThatHasEndedMeanwhile) {
  serve();
  Worker worker(options_of_one());
  train(worker, 15);
  EXPECT_GE(saved("one", 10), 10u);
  serve(die());
  ControlClient(server_->address()).remove("one");
  EXPECT_EQ(train_until_it_fails(worker).code(), ErrorCode::kRewound);
  expect_error(ErrorCode::kNotFound, "has ended", [&] { worker.rejoin(); });
}

// One that runs under its name is another one.
TEST_F(Rejoin, AnotherJobOfItsName) {
  serve();
  Worker worker(options_of_one());
  train(worker, 15);
  EXPECT_GE(saved("one", 10), 10u);
  serve(die());
  EXPECT_EQ(train_until_it_fails(worker).code(), ErrorCode::kRewound);
  ControlClient(server_->address()).remove("one");
  Worker another(options_of_one());
  EXPECT_EQ(another.first_round(), 1u);
  expect_error(ErrorCode::kNotFound, "this is another one", [&] { worker.rejoin(); });
  train(another, 5);
}

TEST_F(Rejoin, AServerThatDoesNotKnowTheJob) {
  serve();
  Worker worker(options_of_one());
  train(worker, 3);
  serve(die(), "empty");
  EXPECT_EQ(train_until_it_fails(worker).code(), ErrorCode::kRewound);
  expect_error(ErrorCode::kFenced, "this server knows of 0", [&] { worker.rejoin(); });
  expect_error(ErrorCode::kNotFound, "there is no job 'nothing'",
               [&] { ControlClient(server_->address()).remove("nothing"); });
}

// It has lasted longer than the heartbeats' interval.
TEST_F(Rejoin, ABarrierTellsThatTheServerIsGone) {
  serve();
  WorkerOptions options = options_of_one("two");
  options.spec.world_size = 2;
  options.await_ranks = false;
  Worker first(options);
  options.rank = 1;
  Worker second(options);
  auto waits = std::async(std::launch::async,
                          [&] { return error_of(ErrorCode::kRewound, [&] { first.barrier(); }); });
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(1200)), std::future_status::timeout);
  die();
  EXPECT_THAT(waits.get(), HasSubstr("'two'"));
}

// The server dies once more while the first one has rejoined and waits for the second.
TEST_F(Rejoin, OnceMoreWhileOthersAreAwaited) {
  serve();
  WorkerOptions options = options_of_one("two");
  options.spec.world_size = 2;
  const auto join_as = [&options](int32_t rank) {
    WorkerOptions own = options;
    own.rank = rank;
    return std::make_unique<Worker>(own);
  };
  auto joining = std::async(std::launch::async, [&] { return join_as(0); });
  std::unique_ptr<Worker> second = join_as(1), first = joining.get();
  serve(die());
  error_of(ErrorCode::kRewound, [&] { first->barrier(); });
  error_of(ErrorCode::kRewound, [&] { second->barrier(); });
  auto rejoining = std::async(std::launch::async, [&] { return first->rejoin(); });
  ASSERT_TRUE(becomes([&] {
    const ServerStatus status = ControlClient(server_->address()).status();
    return !status.jobs.empty() && !status.jobs.front().ranks.empty() &&
           status.jobs.front().ranks.front().state == "live";
  }));
  serve(die());
  second = second->rejoin();
  first = rejoining.get();
  EXPECT_EQ(first->rank(), 0u);
  auto waits = std::async(std::launch::async, [&] { second->barrier(); });
  first->barrier();
  waits.get();
}

TEST_F(Rejoin, AJobThatHasEndedUnsaved) {
  serve();
  Worker worker(options_of_one());
  train(worker, 3);
  serve(die());
  EXPECT_EQ(train_until_it_fails(worker).code(), ErrorCode::kRewound);
  ControlClient(server_->address()).remove("one");
  expect_error(ErrorCode::kNotFound, "has ended", [&] { worker.rejoin(); });
}

// The server stands still; another one takes the job over, with a copy of its checkpoints, as no
// lock reaches there. The first wakes, and has nothing to say to workers of the later life.
TEST_F(Rejoin, AServerThatWakesAfterAnotherTookOver) {
  serve();
  ServerProcess other(PHUB_BINARY, {"--checkpoints", at("copy"), "--checkpoint-every", "10"});
  WorkerOptions options = options_of_one();
  options.server += "," + other.address();
  options.connect_timeout_ms = 5000;
  options.silence_limit_ms = 1500;
  auto worker = std::make_unique<Worker>(options);
  EXPECT_EQ(worker->server(), server_->address());
  train(*worker, 15);
  const uint64_t last = saved("one", 10);
  server_->stop();
  std::filesystem::copy(at("checkpoints/one"), at("copy/one"),
                        std::filesystem::copy_options::recursive);
  EXPECT_EQ(train_until_it_fails(*worker).code(), ErrorCode::kRewound);
  worker = worker->rejoin();
  EXPECT_EQ(worker->server(), other.address());
  EXPECT_EQ(worker->first_round(), last + 1);
  train(*worker, 5);
  server_->go_on();
  ControlClient first(server_->address());
  const JoinRequest request{.spec = worker->spec(),
                            .rank = 0,
                            .transport = worker->connection().substr(0, 3),
                            .epoch = 2};
  expect_error(ErrorCode::kFenced, "of job 'one'", [&] { first.join(request, 10'000); });
  train(*worker, 5);
  EXPECT_THAT(worker->parameters(0), Each(static_cast<float>(last + 10)));
}

TEST_F(Rejoin, EndsWithItsWorker) {
  serve();
  Worker worker(options_of_one());
  train(worker, 5);
  die();
  EXPECT_EQ(train_until_it_fails(worker).code(), ErrorCode::kRewound);
  auto ended = std::async(std::launch::async,
                          [&] { return error_of(ErrorCode::kFenced, [&] { worker.rejoin(); }); });
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  worker.end("the test is over");
  EXPECT_THAT(ended.get(), HasSubstr("ended while it rejoined"));
}

TEST_F(Rejoin, HasALimit) {
  serve();
  WorkerOptions options = options_of_one();
  options.rejoin_limit_ms = 200;
  Worker worker(options);
  train(worker, 5);
  die();
  EXPECT_EQ(train_until_it_fails(worker).code(), ErrorCode::kRewound);
  error_of(ErrorCode::kUnavailable, [&] { worker.rejoin(); });
  error_of(ErrorCode::kUnavailable, [&] { worker.rejoin(); });
}

// Without checkpoints a job dies with its server.
TEST_F(Rejoin, OnlyIfTheJobIsSaved) {
  server_.emplace(PHUB_BINARY);
  Worker worker(options_of_one());
  train(worker, 5);
  die();
  EXPECT_EQ(train_until_it_fails(worker).code(), ErrorCode::kUnavailable);
  error_of(ErrorCode::kInvalid, [&] { worker.rejoin(); });
}

// --- the same in C -------------------------------------------------------------------------------

struct Ended {
  std::atomic<int> code = -1;
};

TEST_F(Rejoin, InC) {
  serve();
  phub_options* options = nullptr;
  phub_worker* worker = nullptr;
  ASSERT_EQ(phub_options_create(&options), PHUB_OK);
  for (const auto& [name, value] : std::vector<std::pair<const char*, std::string>>{
           {"server", server_->address()},
           {"job", "c"},
           {"optimizer", "sgd"},
           {"rank", "0"},
           {"lease_ms", "3000"},
           {"transport", options_of_one().transport}}) {
    ASSERT_EQ(phub_options_set(options, name, value.c_str()), PHUB_OK) << phub_last_error();
  }
  ASSERT_EQ(phub_options_set_hyper(options, "lr", 1), PHUB_OK);
  ASSERT_EQ(phub_options_add_key(options, "w", kElements), PHUB_OK);
  ASSERT_EQ(phub_worker_create(options, &worker), PHUB_OK) << phub_last_error();
  phub_options_destroy(options);
  const auto train = [worker] {
    void* gradient = nullptr;
    if (phub_gradient(worker, 0, &gradient, nullptr) != PHUB_OK) return PHUB_INTERNAL;
    std::fill_n(static_cast<float*>(gradient), kElements, -1.0f);
    if (const phub_code code = phub_push(worker, 0, 0); code != PHUB_OK) return code;
    return phub_wait(worker, 0);
  };
  EXPECT_EQ(phub_rejoin(worker, nullptr), PHUB_INVALID);
  for (int i = 0; i < 15; ++i) ASSERT_EQ(train(), PHUB_OK) << phub_last_error();
  const uint64_t last = saved("c", 10);
  Ended ended;
  std::thread waits([worker, &ended] {  // a call of another thread, which the server's end ends
    phub_code code = PHUB_OK;
    while (code == PHUB_OK) code = phub_barrier(worker);
    ended.code = code;
  });
  serve(die());
  phub_code code = PHUB_OK;
  while (code == PHUB_OK) code = train();
  EXPECT_EQ(code, PHUB_REWOUND) << phub_last_error();
  EXPECT_STREQ(phub_code_name(code), "rewound");
  waits.join();
  EXPECT_EQ(ended.code, PHUB_REWOUND);
  uint64_t first_round = 0;
  ASSERT_EQ(phub_rejoin(worker, &first_round), PHUB_OK) << phub_last_error();
  EXPECT_EQ(first_round, last + 1);
  EXPECT_EQ(phub_rejoin(worker, nullptr), PHUB_INVALID);
  ASSERT_EQ(phub_wait_all(worker), PHUB_OK);
  ASSERT_EQ(train(), PHUB_OK) << phub_last_error();
  std::vector<float> parameters(kElements);
  ASSERT_EQ(phub_pull(worker, 0, parameters.data(), kElements * sizeof(float)), PHUB_OK);
  EXPECT_THAT(parameters, Each(static_cast<float>(last + 1)));
  EXPECT_EQ(phub_worker_destroy(worker), PHUB_OK);
}

}  // namespace rejoin_test
}  // namespace phub::testing
