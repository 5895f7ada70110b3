// A server that neither answers nor closes its connections (it lost its power, it hangs, packets
// are dropped): whoever waits for it is told within the limit, and destroying a worker ends all
// that it waits for at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/worker/server_process.h"
#include "worker/phub.h"

namespace phub::testing {
namespace silent_server_test {

using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

// Far more than a limit or a goodbye takes, far less than for ever.
constexpr seconds kSoon{20};

JobSpec spec_of(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "w", .elements = 1000}};
  spec.world_size = 2;
  spec.lease_ms = 10'000;
  spec.progress_limit_ms = 600'000;
  return spec;
}

class SilentServer : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("PHUB_TRANSPORT", GetParam(), 1); }
  void TearDown() override { unsetenv("PHUB_TRANSPORT"); }
};

// Both ranks of a job; the second one never pushes, and enters no barrier.
struct Pair {
  Pair(const ServerProcess& server, const JobSpec& spec, uint32_t silence_limit_ms) {
    const auto join = [&](int32_t rank) {
      WorkerOptions options = server.options(spec);
      options.rank = rank;
      options.silence_limit_ms = silence_limit_ms;
      auto worker = std::make_unique<Worker>(options);
      worker->wait_all();
      return worker;
    };
    auto other = std::async(std::launch::async, [&] { return join(1); });
    first = join(0);
    second = other.get();
  }
  std::unique_ptr<Worker> first, second;
};

ErrorCode code_of(const std::function<void()>& call, std::string& message) {
  try {
    call();
  } catch (const Error& error) {
    message = error.what();
    return error.code();
  }
  return ErrorCode::kInvalid;
}

TEST_P(SilentServer, WaitsAndBarriersEndAtTheLimitAndSaySo) {
  ServerProcess server(PHUB_BINARY);
  Pair pair(server, spec_of("silent"), 1500);
  Worker& worker = *pair.first;
  worker.push(0);
  server.stop();
  const auto began = steady_clock::now();
  std::string in_wait, in_barrier;
  auto barrier = std::async(std::launch::async,
                            [&] { return code_of([&] { worker.barrier(); }, in_barrier); });
  EXPECT_EQ(code_of([&] { worker.wait(0); }, in_wait), ErrorCode::kUnavailable);
  EXPECT_EQ(barrier.get(), ErrorCode::kUnavailable);
  const auto took = steady_clock::now() - began;
  EXPECT_GE(took, std::chrono::milliseconds(1000));
  EXPECT_LT(took, kSoon);
  EXPECT_THAT(in_wait, HasSubstr("has answered no heartbeat"));
  EXPECT_EQ(in_barrier, in_wait);
  pair.first.reset();
  pair.second.reset();
  EXPECT_LT(steady_clock::now() - began, 2 * kSoon);
}

TEST_P(SilentServer, AServerThatIsSlowForLessThanTheLimitIsWaitedFor) {
  ServerProcess server(PHUB_BINARY);
  JobSpec spec = spec_of("slow");
  spec.lease_ms = 60'000;  // of the ranks: none is lost meanwhile
  Pair pair(server, spec, 60'000);
  pair.first->push(0);
  server.stop();
  auto waiting = std::async(std::launch::async, [&] { pair.first->wait(0); });
  EXPECT_EQ(waiting.wait_for(std::chrono::milliseconds(700)), std::future_status::timeout);
  server.go_on();
  pair.second->push(0);
  pair.second->wait(0);
  waiting.get();
}

// Calls of other threads when the worker is destroyed, with the server silent and no limit near.
TEST_P(SilentServer, DestroyingEndsWhatOtherThreadsWaitFor) {
  ServerProcess server(PHUB_BINARY);
  const auto join = [&](int64_t rank) {
    phub_options* options = nullptr;
    phub_worker* worker = nullptr;
    EXPECT_EQ(phub_options_from_environment(&options), PHUB_OK);  // PHUB_TRANSPORT
    EXPECT_EQ(phub_options_set(options, "server", server.address().c_str()), PHUB_OK);
    EXPECT_EQ(phub_options_set(options, "job", "destroyed"), PHUB_OK);
    EXPECT_EQ(phub_options_set_number(options, "world_size", 2), PHUB_OK);
    EXPECT_EQ(phub_options_set_number(options, "rank", rank), PHUB_OK);
    EXPECT_EQ(phub_options_set_number(options, "lease_ms", 600'000), PHUB_OK);
    EXPECT_EQ(phub_options_set_number(options, "silence_limit_ms", 600'000), PHUB_OK);
    EXPECT_EQ(phub_options_set(options, "optimizer", "sgd"), PHUB_OK);
    EXPECT_EQ(phub_options_add_key(options, "w", 1000), PHUB_OK);
    EXPECT_EQ(phub_worker_create(options, &worker), PHUB_OK) << phub_last_error();
    EXPECT_EQ(phub_options_destroy(options), PHUB_OK);
    EXPECT_EQ(phub_wait_all(worker), PHUB_OK);
    return worker;
  };
  auto other = std::async(std::launch::async, [&] { return join(1); });
  phub_worker* worker = join(0);
  phub_worker* second = other.get();
  ASSERT_EQ(phub_push(worker, 0, 0), PHUB_OK);
  const double rate = 0.1;
  const char* name = "lr";
  std::vector<std::future<phub_code>> calls;
  const auto start = [&](auto call) { calls.push_back(std::async(std::launch::async, call)); };
  start([&] { return phub_barrier(worker); });
  start([&] { return phub_wait(worker, 0); });
  for (auto& call : calls) {
    EXPECT_EQ(call.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  }
  server.stop();
  start([&] { return phub_barrier(worker); });
  start([&] { return phub_set_hyper(worker, &name, &rate, 1, nullptr); });
  for (auto& call : calls) {
    EXPECT_EQ(call.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  }
  const auto began = steady_clock::now();
  auto gone = std::async(std::launch::async, [&] { return phub_worker_destroy(second); });
  EXPECT_EQ(phub_worker_destroy(worker), PHUB_OK);
  for (auto& call : calls) EXPECT_EQ(call.get(), PHUB_FENCED) << phub_last_error();
  EXPECT_EQ(gone.get(), PHUB_OK);
  EXPECT_LT(steady_clock::now() - began, kSoon);
}

INSTANTIATE_TEST_SUITE_P(Transports, SilentServer, ::testing::Values("shm", "tcp"),
                         [](const auto& transport) { return std::string(transport.param); });

}  // namespace silent_server_test
}  // namespace phub::testing
