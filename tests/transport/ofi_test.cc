// Over libfabric: writes to where none belong, and sleep. Once for each provider that can be here.
// (The fence while a writer writes: ofi_process_test.cc; strangers: strangers_test.cc.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <map>
#include <string>
#include <thread>

#include "tests/transport/link_test.h"
#include "tests/transport/ofi_rig.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/test_memory_device.h"
#include "tests/worker/expect_error.h"
#include "transport/ofi/format.h"

namespace phub {
namespace ofi_test {

using testing::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

double cpu_seconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class OfiTest : public LinkTest, public ::testing::WithParamInterface<const char*> {
 protected:
  static constexpr uint32_t kChunkBytes = 32768, kChunks = 8;

  void SetUp() override {
    rig_ = OfiRig::over(GetParam());
    exchange_bytes_ = kChunkBytes;
  }
  void open(uint32_t ranks = 2, uint32_t cores = 2) {
    LinkTest::open(ranks, cores, uint64_t{kChunkBytes} * kChunks * cores, kChunks);
  }
};

TEST_P(OfiTest, SaysOverWhat) {
  EXPECT_EQ(rig_->transport().name(), "ofi");
  EXPECT_THAT(rig_->transport().describe(), HasSubstr(std::string("provider ") + GetParam()));
  open();
  auto worker = join(1, 1);
  EXPECT_THAT(worker->describe(), HasSubstr(GetParam()));
  EXPECT_TRUE(worker->can_reconnect() && !worker->zero_copy());
  expect_exchange(*worker, 1);
}

// A name of an endpoint that nobody has: the rank's results go nowhere, and no other rank notices.
TEST_P(OfiTest, ANameOfNobodyIsThatRanksLoss) {
  open();
  auto honest = join(1, 1);
  const Offer offer = box_->admit(0, 1);
  attach(0, 1);
  auto hello = hello_of<OfiHello>(offer, layout_, 0);
  hello.results.name_bytes = 16;
  for (size_t i = 0; i < 16; ++i) hello.results.name[i] = std::byte(0xa5 + i);
  RawTcp raw(offer.queues[0].address);
  raw.send_struct(hello);
  handle();
  EXPECT_THAT(error_of([&] { parse_ofi_answer(raw.receive()); }),
              ::testing::AnyOf("none", StartsWith("invalid: ")));
  for (int i = 0; i < 20; ++i) {
    box_->endpoint(0).post({.rank = 0}, {0, 0, kChunkBytes, 1});
    box_->endpoint(0).flush();
    std::array<Arrival, 8> some;
    const size_t taken = box_->endpoint(0).poll(some);
    for (size_t a = 0; a < taken; ++a) EXPECT_TRUE(!some[a].ok && some[a].rank == 0);
    rig_->pump();
  }
  expect_exchange(*honest, 1);
}

// Beyond the memory that the key is for, and with a key that is none: nothing lands, and only the
// writer is worse off.
TEST_P(OfiTest, AWriteToWhereNoneBelongsHurtsOnlyItsWriter) {
  open(3, 1);
  auto honest = join(1, 1);
  for (const uint64_t beyond : {layout_.slots_bytes, uint64_t{1} << 40, ~uint64_t{0} - 100}) {
    auto worker = join(0, 1);
    expect_exchange(*worker, 0);
    const std::vector<std::byte> before(box_->slots(1).begin(), box_->slots(1).end());
    worker->endpoint().post({0}, {0, beyond, kChunkBytes, 5});
    worker->endpoint().flush();
    bool arrived = false;
    std::array<Arrival, 8> some;
    for (int i = 0; i < 300; ++i) {
      worker->endpoint().poll(some);
      const size_t taken = box_->endpoint(0).poll(some);
      for (size_t a = 0; a < taken; ++a) arrived = arrived || some[a].ok;
      rig_->pump();
    }
    EXPECT_FALSE(arrived) << beyond;
    EXPECT_TRUE(std::equal(before.begin(), before.end(), box_->slots(1).begin()));
    expect_exchange(*honest, 1);
    worker.reset();
    detach(0);
    box_->revoke(0);
  }
}

// An idle box and an idle worker cost no CPU, and are awake at once when something comes.
TEST_P(OfiTest, SleepersCostNothingAndWake) {
  open(1, 1);
  auto worker = join(0, 1);
  expect_exchange(*worker, 0);
  std::atomic<bool> stop = false;
  std::atomic<uint32_t> answered = 0;
  // The box answers every arrival, and sleeps between them.
  std::thread core([&] {
    BoxEndpoint& endpoint = box_->endpoint(0);
    const Fd epoll(epoll_create1(EPOLL_CLOEXEC));
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLET;
    epoll_ctl(epoll.get(), EPOLL_CTL_ADD, endpoint.wake_fd(), &event);
    std::array<Arrival, 8> some;
    while (!stop) {
      const size_t taken = endpoint.poll(some);
      for (size_t i = 0; i < taken; ++i) {
        while (some[i].ok && !endpoint.post({}, {0, 0, kChunkBytes, some[i].imm})) {
        }
        ++answered;
      }
      endpoint.flush();
      if (taken > 0 || !endpoint.arm({})) continue;
      epoll_wait(epoll.get(), &event, 1, 200);
      endpoint.disarm();
    }
  });
  Endpoint& endpoint = worker->endpoint();
  const Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  epoll_ctl(epoll.get(), EPOLL_CTL_ADD, endpoint.wake_fd(), &event);
  std::array<Arrival, 8> some;
  double slowest = 0;
  for (uint32_t round = 0; round < 30; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto begin = Clock::now();
    ASSERT_TRUE(endpoint.post({}, {0, 0, kChunkBytes, round}));
    endpoint.flush();
    size_t taken = 0;
    while (taken == 0 && Clock::now() - begin < std::chrono::seconds(10)) {
      taken = endpoint.poll(some);
      if (taken > 0 || !endpoint.arm({})) continue;
      epoll_wait(epoll.get(), &event, 1, 2000);
      endpoint.disarm();
    }
    ASSERT_EQ(taken, 1u);
    EXPECT_TRUE(some[0].ok && some[0].imm == round);
    slowest = std::max(slowest, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  EXPECT_LT(slowest, 1.5) << "nobody slept until a limit";
  while (!endpoint.arm({})) endpoint.poll(some);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  EXPECT_LT(cpu_seconds() - before, 0.1);
  stop = true;
  core.join();
}

// The libfabric of Debian 12 is built without CUDA.
TEST_P(OfiTest, MemoryOfAGpuThatTheProviderDoesNotReachIsRefused) {
  rig_ = OfiRig::over(GetParam(), std::make_unique<TestMemoryDevice>(/*cuda_ordinal=*/0));
  if (rig_ == nullptr) return;
  open(1, 1);
  EXPECT_THAT(
      error_of([&] { join(0, 1); }),
      ::testing::AllOf(StartsWith("invalid: "), HasSubstr("memory_device"), HasSubstr(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(Every, OfiTest, ::testing::ValuesIn(providers_to_test()),
                         name_of_provider);

using Handler = void (*)(int);

std::map<int, Handler> signal_handlers() {
  std::map<int, Handler> handlers;
  for (const int number : {SIGTERM, SIGINT, SIGSEGV, SIGABRT}) {
    struct sigaction now = {};
    EXPECT_EQ(sigaction(number, nullptr, &now), 0);
    handlers[number] = now.sa_handler;
  }
  return handlers;
}

// Before libfabric is opened. (A sanitizer has a handler of its own.)
const std::map<int, Handler> kHandlersAtStart = signal_handlers();

TEST(OfiProviders, LeaveTheSignalsToTheProcess) {
  find_ofi_providers();  // opens libfabric, with all that it is linked to
  EXPECT_EQ(signal_handlers(), kHandlersAtStart);
}

TEST(OfiProviders, NoSuchProvider) {
  EXPECT_THAT(error_of([] { make_ofi_transport({.provider = "carrier_pigeon"}); }),
              StartsWith("unavailable: "));
  EXPECT_THAT(error_of([] { check_ofi_provider_name("../../x"); }), StartsWith("invalid: "));
  EXPECT_THAT(error_of([] { check_ofi_provider_name(""); }), StartsWith("invalid: "));
  EXPECT_THAT(error_of([] { check_ofi_provider_name(std::string(65, 'a')); }),
              StartsWith("invalid: "));
  EXPECT_EQ(error_of([] { check_ofi_provider_name("tcp;ofi_rxm"); }), "none");
}

TEST(OfiProviders, OnesThatOtherHostsReachComeFirst) {
  const std::vector<OfiProvider> found = find_ofi_providers();
  if (found.empty()) GTEST_SKIP() << "no libfabric, or no provider";
  for (size_t i = 0; i + 1 < found.size(); ++i) EXPECT_FALSE(found[i].this_host);
}

}  // namespace ofi_test
}  // namespace phub
