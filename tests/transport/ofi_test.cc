// Over libfabric: malformed hellos, the fence while a writer writes, writes to where none belong,
// what is left behind, and sleep. Once for each provider that can be here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "tests/transport/ofi_rig.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/test_memory_device.h"
#include "transport/error.h"
#include "transport/ofi/format.h"
#include "transport/text.h"

namespace phub {
namespace ofi_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

size_t open_fds() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// The Error that `action` throws, as "code: text"; "" if none.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::string(name_of(error.code())) + ": " + error.what();
  }
  return "";
}

double cpu_seconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class OfiTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr uint32_t kChunkBytes = 32768, kChunks = 8;

  void SetUp() override { rig_ = OfiRig::over(GetParam()); }
  void TearDown() override {
    while (!attached_.empty()) detach(*attached_.begin());
  }
  void open(uint32_t ranks = 2, uint32_t cores = 2) {
    layout_ = {};
    layout_.max_ranks = ranks;
    layout_.cores = cores;
    layout_.queue_chunks.assign(cores, kChunks);
    layout_.core_node.assign(cores, 0);
    layout_.slots_bytes = layout_.results_bytes = uint64_t{kChunkBytes} * kChunks * cores;
    box_ = rig_->transport().open_job(layout_);
  }
  void attach(uint32_t rank, uint32_t incarnation) {
    for (uint32_t c = 0; c < layout_.cores; ++c) box_->endpoint(c).attach(rank, incarnation);
    attached_.insert(rank);
  }
  void detach(uint32_t rank) {
    for (uint32_t c = 0; c < layout_.cores; ++c) box_->endpoint(c).detach(rank);
    attached_.erase(rank);
  }
  std::unique_ptr<WorkerLink> join(uint32_t rank, uint32_t incarnation) {
    const Offer offer = box_->admit(rank, incarnation);
    attach(rank, incarnation);
    return rig_->connect(offer, layout_);
  }
  void handle(int times = 20) {
    for (int i = 0; i < times; ++i) {
      rig_->transport().handle_events(rig_->events());
      rig_->pump();
    }
  }
  std::string address() {
    const std::string text = rig_->transport().describe();
    return text.substr(text.rfind(' ') + 1);
  }
  std::string host() { return parse_host_port(address()).host; }
  // What the box says to `raw`: "welcome", an error as error_of() has it, "" if it just closes the
  // connection, "silence".
  std::string answer(RawTcp& raw) {
    handle();
    const std::vector<std::byte> message = raw.receive();
    if (message.empty()) return raw.ended() ? "" : "silence";
    const std::string error = error_of([&] { parse_ofi_answer(message); });
    return error.empty() ? "welcome" : error;
  }
  std::string answer_to(std::span<const std::byte> message) {
    RawTcp raw(address());
    raw.send(message);
    return answer(raw);
  }
  OfiHello hello_of(const Offer& offer, uint32_t queue) const {
    OfiHello hello;
    std::memcpy(hello.ticket.data(), offer.ticket.data(), hello.ticket.size());
    hello.queue = queue;
    hello.queues = static_cast<uint32_t>(layout_.queue_chunks.size());
    hello.queue_chunks = layout_.queue_chunks[queue];
    hello.gradient_bytes = layout_.slots_bytes;
    hello.result_bytes = layout_.results_bytes;
    hello.results.name_bytes = 16;
    return hello;
  }
  // Polls both sides until `to` has `count` arrivals more, or ten seconds have passed.
  size_t poll_for(Endpoint& from, Endpoint& to, size_t count) {
    const auto until = Clock::now() + std::chrono::seconds(10);
    size_t taken = 0;
    std::array<Arrival, 64> some;
    while (taken < count && Clock::now() < until) {
      const size_t now = to.poll(some);
      for (size_t i = 0; i < now; ++i) EXPECT_TRUE(some[i].ok);
      taken += now;
      rig_->drive(from);
      std::this_thread::yield();
    }
    return taken;
  }
  void expect_exchange(WorkerLink& worker, uint32_t rank) {
    worker.gradients()[100] ^= std::byte{5};
    ASSERT_TRUE(worker.endpoint().post({0}, {0, 64, kChunkBytes, 77}));
    worker.endpoint().flush();
    ASSERT_EQ(poll_for(worker.endpoint(), box_->endpoint(0), 1), 1u);
    EXPECT_EQ(box_->slots(rank)[164], worker.gradients()[100]);
    box_->results()[200] ^= std::byte{6};
    ASSERT_TRUE(box_->endpoint(0).post({.rank = rank}, {0, 32, kChunkBytes, 78}));
    box_->endpoint(0).flush();
    ASSERT_EQ(poll_for(box_->endpoint(0), worker.endpoint(), 1), 1u);
    EXPECT_EQ(worker.results()[232], box_->results()[200]);
  }

  void expect_nothing_left_behind();

  std::unique_ptr<OfiRig> rig_;
  LinkLayout layout_;
  std::unique_ptr<BoxLink> box_;
  std::set<uint32_t> attached_;
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

TEST_P(OfiTest, MalformedHellosAreAnsweredAndChangeNothing) {
  open();
  const Offer offer = box_->admit(0, 1);
  attach(0, 1);
  const OfiHello good = hello_of(offer, 1);
  const auto with = [&](const std::function<void(OfiHello&)>& change) {
    OfiHello hello = good;
    change(hello);
    return answer_to(std::as_bytes(std::span(&hello, 1)));
  };
  EXPECT_THAT(with([](OfiHello& h) { h.header.magic = 1; }), HasSubstr("not a phub peer"));
  EXPECT_THAT(with([](OfiHello& h) { h.header.version = 9; }), HasSubstr("protocol version 9"));
  EXPECT_THAT(with([](OfiHello& h) { h.header.bytes = 65; }), HasSubstr("with 65 bytes"));
  EXPECT_THAT(with([](OfiHello& h) { h.header.type = OfiMessage{7}; }), HasSubstr("type 7"));
  EXPECT_THAT(with([](OfiHello& h) { h.ticket[5] = 'x'; }), StartsWith("unauthorized: "));
  EXPECT_THAT(with([](OfiHello& h) { h.ticket.fill('0'); }), StartsWith("unauthorized: "));
  EXPECT_THAT(with([](OfiHello& h) { h.queue = 2; }), HasSubstr("queue 2 of 2"));
  EXPECT_THAT(with([](OfiHello& h) { h.queue = ~0u; }), StartsWith("invalid: "));
  EXPECT_THAT(with([](OfiHello& h) { h.queues = 3; }), HasSubstr("queues: 3"));
  EXPECT_THAT(with([](OfiHello& h) { h.queue_chunks = 9; }), HasSubstr("chunks of queue 1: 9"));
  EXPECT_THAT(with([](OfiHello& h) { h.gradient_bytes = 1; }), StartsWith("mismatch: "));
  EXPECT_THAT(with([](OfiHello& h) { h.result_bytes = 1; }), HasSubstr("bytes of results: 1"));
  EXPECT_THAT(with([](OfiHello& h) { h.results.name_bytes = 0; }), HasSubstr("name of 0 bytes"));
  EXPECT_THAT(with([](OfiHello& h) { h.results.name_bytes = 129; }), StartsWith("invalid: "));
  EXPECT_THAT(with([](OfiHello& h) { h.results.name_bytes = ~0u; }), StartsWith("invalid: "));
  const std::string http = "GET /metrics HTTP/1.1\r\nHost: box\r\n\r\n";
  EXPECT_THAT(answer_to(std::as_bytes(std::span(http))), HasSubstr("not a phub peer"));
  EXPECT_THAT(rig_->events().back().reason, HasSubstr("ofi: a connection from " + host() + ":"));
  const auto bytes = std::as_bytes(std::span(&good, 1));
  for (const size_t size : {size_t{0}, size_t{1}, size_t{16}, sizeof(good) - 1}) {
    RawTcp raw(address());
    raw.send(bytes.first(size));
    EXPECT_EQ(answer(raw), "silence") << size;
  }
  // The ticket is as good as new.
  auto worker = rig_->connect(offer, layout_);
  expect_exchange(*worker, 0);
}

// A name of an endpoint that nobody has: the rank's results go nowhere, and no other rank notices.
TEST_P(OfiTest, ANameOfNobodyIsThatRanksLoss) {
  open();
  auto honest = join(1, 1);
  const Offer offer = box_->admit(0, 1);
  attach(0, 1);
  OfiHello hello = hello_of(offer, 0);
  for (size_t i = 0; i < 16; ++i) hello.results.name[i] = std::byte(0xa5 + i);
  RawTcp raw(address());
  raw.send_struct(hello);
  const std::string said = answer(raw);
  EXPECT_THAT(said, ::testing::AnyOf("welcome", StartsWith("invalid: ")));
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

// After detach() returns, no byte of the incarnation lands, whatever it is in the middle of.
TEST_P(OfiTest, TheFenceHoldsWhileTheWorkerWrites) {
  if (std::string(GetParam()) == "shm") {
    GTEST_SKIP() << "libfabric's shm unmaps the endpoint under a writer of the same process";
  }
  open(2, 1);
  auto bystander = join(1, 1);
  for (uint32_t incarnation = 1; incarnation <= 12; ++incarnation) {
    auto worker = join(0, incarnation);
    std::atomic<bool> stop = false;
    std::memset(worker->gradients().data(), 0x77, layout_.slots_bytes);
    std::thread writer([&] {
      std::array<Arrival, 8> some;
      for (uint32_t i = 0; !stop; ++i) {
        const uint64_t offset = uint64_t{i % kChunks} * kChunkBytes;
        worker->endpoint().post({0}, {offset, offset, kChunkBytes, i});
        worker->endpoint().flush();
        worker->endpoint().poll(some);
      }
    });
    size_t taken = 0;
    std::array<Arrival, 64> some;
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (taken < 50 * incarnation && Clock::now() < until) {
      taken += box_->endpoint(0).poll(some);
    }
    EXPECT_GE(taken, 50 * incarnation);
    detach(0);
    auto* const slots = const_cast<std::byte*>(box_->slots(0).data());
    std::memset(slots, 0, layout_.slots_bytes);
    for (int i = 0; i < 200; ++i) {
      const size_t arrived = box_->endpoint(0).poll(some);
      for (size_t a = 0; a < arrived; ++a) EXPECT_NE(some[a].rank, 0u);
      rig_->pump();
    }
    const auto written = [](std::byte byte) { return byte != std::byte{0}; };
    EXPECT_EQ(std::count_if(slots, slots + layout_.slots_bytes, written), 0) << incarnation;
    box_->revoke(0);
    stop = true;
    writer.join();
    expect_exchange(*bystander, 1);
  }
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

void OfiTest::expect_nothing_left_behind() {
  open();
  uint32_t incarnation = 0;
  const auto every_way_to_end = [&] {
    {  // a whole life
      auto link = join(0, ++incarnation);
      expect_exchange(*link, 0);
      link.reset();
      detach(0);
      box_->revoke(0);
    }
    {  // revoked before the worker comes
      const Offer offer = box_->admit(0, ++incarnation);
      box_->revoke(0);
      EXPECT_THAT(error_of([&] { rig_->connect(offer, layout_); }), HasSubstr("join again"));
    }
    {  // the worker expects other sizes
      LinkLayout other = layout_;
      other.slots_bytes = 1;
      const Offer offer = box_->admit(0, ++incarnation);
      EXPECT_THAT(error_of([&] { rig_->connect(offer, other); }), StartsWith("mismatch: "));
      box_->revoke(0);
    }
    {  // a reconnection
      auto link = join(0, ++incarnation);
      expect_exchange(*link, 0);
      detach(0);
      const Offer again = box_->reconnect(0);
      attach(0, incarnation);
      rig_->reconnect(*link, again);
      expect_exchange(*link, 0);
      detach(0);
      box_->revoke(0);
    }
    {  // a job ends with its ranks
      const std::unique_ptr<BoxLink> other = rig_->transport().open_job(layout_);
      const auto link = rig_->connect(other->admit(1, 1), layout_);
    }
  };
  every_way_to_end();
  every_way_to_end();
  handle();
  const size_t fds = open_fds();
  for (int i = 0; i < 5; ++i) every_way_to_end();
  handle();
  EXPECT_EQ(open_fds(), fds);
}

TEST_P(OfiTest, NothingIsLeftBehind) { expect_nothing_left_behind(); }

// Nor of queues that go over memory beside it: of all of a worker's, or of some.
TEST_P(OfiTest, NothingIsLeftBehindBesideMemory) {
  for (const Near near : {Near::kAll, Near::kOdd}) {
    SCOPED_TRACE(near == Near::kAll ? "all" : "some");
    rig_ = OfiRig::over(GetParam(), nullptr, near);
    if (rig_ == nullptr) return;
    expect_nothing_left_behind();
    box_.reset();
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
  EXPECT_EQ(error_of([] { check_ofi_provider_name("tcp;ofi_rxm"); }), "");
}

TEST(OfiProviders, OnesThatOtherHostsReachComeFirst) {
  const std::vector<OfiProvider> found = find_ofi_providers();
  if (found.empty()) GTEST_SKIP() << "no libfabric, or no provider";
  for (size_t i = 0; i + 1 < found.size(); ++i) EXPECT_FALSE(found[i].this_host);
}

}  // namespace ofi_test
}  // namespace phub
