// What is given wrongly over RDMA ends in one clear error and leaves nothing behind. Needs root and
// a machine of its own with a device (scripts/rdma-vm); WithoutDevices.*, one that has none:
//   scripts/rdma-vm bash -c 'verbs_bad_input && rdma link delete rxe0 &&
//                            verbs_bad_input --gtest_filter=WithoutDevices.*'
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/transport/verbs_raw_worker.h"
#include "tests/transport/verbs_rig.h"
#include "tests/transport/verbs_server.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "transport/greeting.h"

namespace phub {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr uint32_t kTimeoutMs = 5000;

using Message = ::testing::Matcher<std::string>;
template <typename Call>
void expect_error(const Call& call, ErrorCode code, const Message& message) {
  EXPECT_THAT(phub::testing::error_of(code, call), message);
}

LinkLayout small_layout(uint64_t bytes = 4096) {
  LinkLayout layout = {.max_ranks = 2, .cores = 1, .queue_chunks = {4}};
  layout.core_node = {0};
  layout.slots_bytes = layout.results_bytes = bytes;
  return layout;
}

// A server with these options ends at once, and says so in a line or two.
void expect_no_server(const std::vector<std::string>& options, const std::string& message) {
  std::vector<std::string> line = {PHUB_BINARY, "serve", "--listen", "127.0.0.1:0"};
  line.insert(line.end(), options.begin(), options.end());
  phub::testing::Process server(line, "/tmp/verbs_bad_input.log");
  const auto status = server.wait(seconds(20));
  ASSERT_TRUE(status) << "it runs: " << server.output();
  EXPECT_GT(*status, 0) << server.output();
  EXPECT_THAT(server.output(), HasSubstr(message));
  EXPECT_LE(std::ranges::count(server.output(), '\n'), 2) << server.output();
}

VerbsPort the_port() { return verbs_ports().front(); }

std::vector<VerbsPort> choose(const std::string& text) {
  std::vector<VerbsFinding> passed_over;
  const VerbsChoice choice = parse_verbs_choice(text);
  return choose_verbs_ports(std::span(&choice, 1), {}, passed_over);
}

bool command(const std::string& line) { return std::system(line.c_str()) == 0; }

// A box of one queue, and what both sides hold of the kernel before and after.
class VerbsBadInputTest : public ::testing::Test {
 protected:
  void SetUp() override {
    {
      // What the libraries make once and keep.
      open();
      const Offer offer = box_->admit(0, 1);
      box_->endpoint(0).attach(0, 1);
      const auto link = connect(offer, layout_);
      box_->endpoint(0).detach(0);
      close();
    }
    resources_ = settled("");
    open();
  }
  void TearDown() override {
    close();
    EXPECT_EQ(settled(resources_), resources_);
  }
  void open() {
    rig_ = std::make_unique<VerbsRig>();
    box_ = rig_->transport().open_job(layout_);
  }
  void close() {
    box_.reset();
    rig_.reset();
  }

  // Whatever is called on the worker's side, while the box handles its events.
  template <typename Call>
  auto pumping(const Call& call) {
    return rig_->meanwhile(call);
  }
  void pump(milliseconds time) {
    pumping([time] { std::this_thread::sleep_for(time); });
  }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout,
                                      uint32_t timeout_ms = kTimeoutMs) {
    return pumping([&] { return connect_verbs(offer, layout, timeout_ms); });
  }
  Error refused(const Offer& offer, std::span<const std::byte> private_data) {
    return pumping([&]() -> Error {
      RawVerbs raw(offer.queues.front().address);
      if (raw.connect(private_data)) return {ErrorCode::kInternal, "it was accepted"};
      return parse_refusal(raw.refusal());
    });
  }
  // Afterwards as before: a worker that does everything right gets through.
  void expect_to_work(uint32_t rank, const Offer& offer) {
    std::unique_ptr<WorkerLink> link;
    box_->endpoint(0).attach(rank, 1);
    ASSERT_NO_THROW(link = connect(offer, layout_));
    link->gradients()[5] = std::byte{77};
    ASSERT_TRUE(link->endpoint().post({0}, {0, 0, 64, 9}));
    link->endpoint().flush();
    std::vector<Arrival> arrivals(4);
    size_t taken = 0;
    for (int i = 0; i < 5000 && taken == 0; ++i) {
      taken = box_->endpoint(0).poll(arrivals);
      pump(milliseconds(1));
    }
    ASSERT_EQ(taken, 1u);
    EXPECT_TRUE(arrivals[0].ok);
    EXPECT_EQ(arrivals[0].imm, 9u);
    EXPECT_EQ(box_->slots(rank)[5], std::byte{77});
    box_->endpoint(0).detach(rank);
  }

  // Objects of the kernel and descriptors, once they are as `expected` or change no more: the
  // kernel lets go of ended connections a little later.
  static std::string settled(const std::string& expected) {
    std::string now, before;
    for (int i = 0, same = 0; i < 40 && same < 5; ++i) {
      now = phub::testing::rdma_resources() + std::to_string(phub::testing::open_descriptors()) +
            " descriptors";
      if (now == expected) return now;
      same = expected.empty() && now == before ? same + 1 : 0;
      before = now;
      std::this_thread::sleep_for(milliseconds(100));
    }
    return now;
  }

  LinkLayout layout_ = small_layout();
  std::unique_ptr<VerbsRig> rig_;
  std::unique_ptr<BoxLink> box_;
  std::string resources_;
};

TEST_F(VerbsBadInputTest, NamesOfDevicesPortsAndGids) {
  const std::string device = the_port().device;
  const auto expect = [&](const std::string& choice, const Message& message) {
    expect_error([&] { choose(choice); }, ErrorCode::kInvalid, message);
  };
  expect("nope", HasSubstr("there is no RDMA device 'nope'; there is " + device));
  expect(device.substr(0, device.size() - 1), HasSubstr("there is no RDMA device"));
  expect(device + "x", HasSubstr("there is no RDMA device"));
  expect(device + ":7", HasSubstr("RDMA device " + device + " has no port 7: it has 1"));
  expect(device + ":0", HasSubstr("has no port 0: it has 1"));
  expect(device + ":1:99999", HasSubstr("port 1 has no GID 99999: its table has "));
  expect(device + ":1:-1", HasSubstr("port 1 has no GID -1: its table has "));
  expect(device + ":1:500", HasSubstr("port 1 GID 500 is empty"));
  expect(device + ":1:0", HasSubstr("GID 0 is link-local; give " + the_port().netdev));
  EXPECT_EQ(choose(device + ":1:1").front().address, the_port().address);
}

TEST_F(VerbsBadInputTest, TheServersOptions) {
  expect_no_server({"--transports", "verbs", "--devices", "nope"},
                   "there is no RDMA device 'nope'");
  expect_no_server({"--transports", "verbs", "--devices", "rxe0:9"},
                   "RDMA device rxe0 has no port 9");
  expect_no_server({"--transports", "verbs", "--devices", "rxe0:1:777777"}, "has no GID 777777");
  expect_no_server({"--transports", "tcp", "--devices", "rxe0"},
                   "--devices needs verbs among --transports");
}

TEST_F(VerbsBadInputTest, APortOfTheServersThatIsTaken) {
  const std::string address = box_->admit(0, 1).queues.front().address;
  const auto number = static_cast<uint16_t>(std::stoul(address.substr(address.rfind(':') + 1)));
  const size_t before = phub::testing::open_descriptors();
  expect_error([&] { make_verbs_transport({.ports = verbs_ports(), .port = number}); },
               ErrorCode::kUnavailable,
               AllOf(HasSubstr(the_port().name()), HasSubstr("port " + std::to_string(number)),
                     HasSubstr("Address already in use")));
  EXPECT_EQ(phub::testing::open_descriptors(), before);
}

// Private data as a stranger, another version or a confused worker would send it.
TEST_F(VerbsBadInputTest, HellosThatAreRefused) {
  const Offer offer = box_->admit(0, 1);
  VerbsHello good;
  good.ticket = ticket_bytes(offer.ticket);
  good.results_bytes = layout_.results_bytes;
  const auto expect = [&](const std::vector<std::byte>& bytes, ErrorCode code,
                          const std::string& message) {
    const Error error = refused(offer, bytes);
    EXPECT_EQ(name_of(error.code()), name_of(code)) << error.what();
    EXPECT_THAT(std::string(error.what()), HasSubstr(message));
  };
  expect({}, ErrorCode::kInvalid, "not a phub peer");
  expect(std::vector<std::byte>(48, std::byte{0xff}), ErrorCode::kInvalid, "not a phub peer");
  const auto with = [&good](auto change) {
    VerbsHello hello = good;
    change(hello);
    return bytes_of(hello);
  };
  expect(with([](VerbsHello& h) { h.magic ^= 1; }), ErrorCode::kInvalid, "not a phub peer");
  expect(with([](VerbsHello& h) { h.version = 2; }), ErrorCode::kInvalid,
         "protocol version 2, this side speaks 1");
  // Cut short: librdmacm fills it with zeros, and half a ticket is none.
  for (const size_t length : {size_t{4}, size_t{8}, size_t{16}}) {
    std::vector<std::byte> part = bytes_of(good);
    part.resize(length);
    if (length < 6) {
      expect(part, ErrorCode::kInvalid, "protocol version 0");
    } else {
      expect(part, ErrorCode::kUnauthorized, "no incarnation has this ticket");
    }
  }
  const std::string nobodys = "no incarnation has this ticket";
  expect(with([](VerbsHello& h) { h.ticket[15] ^= 1; }), ErrorCode::kUnauthorized, nobodys);
  expect(with([](VerbsHello& h) { h.ticket = {}; }), ErrorCode::kUnauthorized, nobodys);
  for (const uint16_t queue : {1, 2, 65535}) {
    expect(with([queue](VerbsHello& h) { h.queue = queue; }), ErrorCode::kInvalid,
           "queue " + std::to_string(queue) + ": this box has 1 of the job's 1, from queue 0 on");
  }
  for (const TransportEvent& event : rig_->events()) {  // for the server's log
    EXPECT_EQ(event.kind, TransportEvent::kRefused);
    EXPECT_THAT(event.reason, HasSubstr("verbs: a connection from "));
  }
  expect_to_work(0, offer);
  expect(bytes_of(good), ErrorCode::kUnauthorized, "this ticket was used already");
  box_->revoke(0);
  expect(bytes_of(good), ErrorCode::kUnauthorized, "no incarnation has this ticket");
}

// The library says it as clearly as the box does.
TEST_F(VerbsBadInputTest, OffersThatAreNoGood) {
  const Offer good = box_->admit(0, 1);
  const auto expect = [&](const Offer& offer, ErrorCode code, const Message& message) {
    expect_error([&] { connect(offer, layout_, 3000); }, code, message);
  };
  Offer offer = good;
  offer.transport = "tcp";
  expect(offer, ErrorCode::kInvalid, HasSubstr("an offer for transport 'tcp'"));
  offer = good, offer.queues.clear();
  expect(offer, ErrorCode::kMismatch, HasSubstr("0 queues"));
  offer = good, offer.queues.push_back(offer.queues.front());
  expect(offer, ErrorCode::kMismatch, HasSubstr("2 queues are offered, the plan has 1"));
  offer = good, offer.ticket = "xyz";
  expect(offer, ErrorCode::kInvalid, HasSubstr("a ticket of 3 characters"));
  offer = good, offer.ticket[0] = offer.ticket[0] == '0' ? '1' : '0';
  expect(offer, ErrorCode::kUnauthorized, HasSubstr("no incarnation has this ticket"));
  for (const char* address : {"banana:7718", "10.77.0.1", "10.77.0.1:99999", ""}) {
    offer = good, offer.queues[0].address = address;
    expect(offer, ErrorCode::kInvalid, HasSubstr(address));
  }
  const std::string host = the_port().address;
  offer = good, offer.queues[0].address = host + ":1";
  expect(offer, ErrorCode::kUnavailable,
         HasSubstr("nobody listens for RDMA connections at " + host + ":1"));
  offer = good, offer.queues[0].address = "203.0.113.9:7718";  // of no network here
  expect(offer, ErrorCode::kUnavailable,
         HasSubstr("no RDMA device of this host has a route to 203.0.113.9:7718"));
  offer = good, offer.queues[0].address = host.substr(0, host.rfind('.')) + ".99:7718";
  // Of the network here, and nobody's: no answer is all there is to know.
  expect_error([&] { connect(offer, layout_, 1500); }, ErrorCode::kTimeout,
               HasSubstr(offer.queues[0].address + " does not answer over RDMA"));
  expect_to_work(0, good);
}

// A worker that announces less memory for results than the job has, or none that is its own.
TEST_F(VerbsBadInputTest, ResultsThatDoNotFit) {
  struct Wrong {
    uint64_t base, bytes;
  };
  for (const Wrong& wrong : {Wrong{0, 0}, Wrong{0x10000, 63}, Wrong{0x10000, 4096},
                             Wrong{~uint64_t{0} - 10, ~uint64_t{0}}}) {
    const Offer offer = box_->admit(0, 1);
    box_->endpoint(0).attach(0, 1);
    VerbsHello hello;
    hello.ticket = ticket_bytes(offer.ticket);
    hello.results_base = wrong.base, hello.results_bytes = wrong.bytes;
    hello.results_key = 0x1234567;
    const auto raw = pumping([&] { return std::make_unique<RawVerbs>(offer.queues[0].address); });
    ASSERT_TRUE(pumping([&] { return raw->connect(hello); }));
    pump(milliseconds(20));
    std::vector<Arrival> arrivals(4);
    size_t taken = 0;
    BoxEndpoint& core = box_->endpoint(0);
    core.poll(arrivals);
    core.post({.rank = 0}, {0, 0, 64, 1});
    core.flush();
    for (int i = 0; i < 5000 && taken == 0; ++i) {
      taken = core.poll(arrivals);
      pump(milliseconds(1));
    }
    ASSERT_EQ(taken, 1u) << wrong.base << ", " << wrong.bytes;
    EXPECT_FALSE(arrivals[0].ok);
    EXPECT_FALSE(core.post({.rank = 0}, {0, 0, 64, 1}));
    core.detach(0);
    box_->revoke(0);
  }
}

// Workers that go away on the way: before they ask, having asked, having been accepted.
TEST_F(VerbsBadInputTest, ConnectionsThatStopHalfWay) {
  Offer offer = box_->admit(0, 1);
  const std::string address = offer.queues[0].address;
  VerbsHello hello;
  for (int i = 0; i < 5; ++i) {
    pumping([&] { RawVerbs raw(address); });
    pumping([&] {
      RawVerbs raw(address);
      raw.request(bytes_of(hello));  // a wrong ticket
    });
    hello.ticket = ticket_bytes(offer.ticket);
    pumping([&] {
      RawVerbs raw(address);
      raw.request(bytes_of(hello));
    });
    pump(milliseconds(20));
    offer = box_->reconnect(0);
    hello.ticket = ticket_bytes(offer.ticket);
    box_->endpoint(0).attach(0, 1);
    pumping([&] {
      RawVerbs raw(address);
      if (!raw.connect(hello)) throw parse_refusal(raw.refusal());
    });
    pump(milliseconds(20));
    box_->endpoint(0).detach(0);
    offer = box_->reconnect(0);
    hello = {};
  }
  // A worker that nobody took on, and that goes while the box is not looking.
  hello.ticket = ticket_bytes(offer.ticket);
  auto unseen = std::make_unique<RawVerbs>(address);
  unseen->request(bytes_of(hello));
  unseen.reset();
  pump(milliseconds(100));
  expect_to_work(0, box_->reconnect(0));
}

// --- Servers that are not phub.

class Impostor {
 public:
  Impostor() {
    channel_.reset(rdma_create_event_channel());
    rdma_cm_id* id = nullptr;
    PHUB_CHECK(channel_ && rdma_create_id(channel_.get(), &id, nullptr, RDMA_PS_TCP) == 0);
    id_.reset(id);
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    PHUB_CHECK(inet_pton(AF_INET, the_port().address.c_str(), &at.sin_addr) == 1);
    PHUB_CHECK(rdma_bind_addr(id, reinterpret_cast<sockaddr*>(&at)) == 0);
    PHUB_CHECK(rdma_listen(id, 8) == 0);
  }
  std::string address() const {
    return the_port().address + ":" + std::to_string(ntohs(rdma_get_src_port(id_.get())));
  }
  // Answers the next request with a refusal of these bytes.
  void refuse(const std::string& text) {
    rdma_cm_event* event = nullptr;
    PHUB_CHECK(rdma_get_cm_event(channel_.get(), &event) == 0);
    const VerbsId request(event->id);
    rdma_ack_cm_event(event);
    rdma_reject(request.get(), text.data(), static_cast<uint8_t>(text.size()));
  }

 private:
  VerbsEventChannel channel_;
  VerbsId id_;
};

TEST_F(VerbsBadInputTest, ServersThatAreNone) {
  Offer offer = box_->admit(0, 1);
  Impostor impostor;
  offer.queues[0].address = impostor.address();
  const auto expect = [&](const std::string& answer, ErrorCode code, const Message& message) {
    std::thread other([&] { impostor.refuse(answer); });
    expect_error([&] { connect(offer, layout_, 5000); }, code, message);
    other.join();
  };
  expect("", ErrorCode::kUnavailable, HasSubstr("did not say why"));
  expect("\xff\xfe\x01garbage", ErrorCode::kUnavailable, HasSubstr("did not say why"));
  expect(std::string(148, 'x'), ErrorCode::kUnavailable, HasSubstr("did not say why"));
  expect("invalid: protocol version 1, this side speaks 9", ErrorCode::kInvalid,
         HasSubstr("this side speaks 9"));
  // One that says nothing at all.
  const auto begin = steady_clock::now();
  expect_error([&] { connect(offer, layout_, 1500); }, ErrorCode::kTimeout,
               HasSubstr(offer.queues[0].address + " does not answer over RDMA (queue 0)"));
  const duration<double> took = steady_clock::now() - begin;
  EXPECT_GT(took.count(), 1.4);
  EXPECT_LT(took.count(), 4.0);
}

// --- Limits, in processes of their own.

void run_child(const std::string& test) {
  phub::testing::Process child(
      {"/proc/self/exe", "--gtest_filter=VerbsBadInputChild.DISABLED_" + test,
       "--gtest_also_run_disabled_tests"},
      "/tmp/verbs_bad_input_child.log");
  const auto status = child.wait(seconds(60));
  ASSERT_TRUE(status) << child.output();
  EXPECT_EQ(*status, 0) << child.output();
  EXPECT_THAT(child.output(), HasSubstr("[  PASSED  ] 1 test."));
}

void limit_locked_memory(uint64_t bytes) {
  const rlimit limit = {bytes, bytes};
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, 2> data = {};
  ASSERT_EQ(syscall(SYS_capget, &header, data.data()), 0);
  data[0].effective &= ~(1u << CAP_IPC_LOCK);
  data[0].permitted &= ~(1u << CAP_IPC_LOCK);
  data[0].inheritable &= ~(1u << CAP_IPC_LOCK);
  ASSERT_EQ(syscall(SYS_capset, &header, data.data()), 0);
}

TEST_F(VerbsBadInputTest, TooLittleLockedMemory) { run_child("LockedMemory"); }
TEST(VerbsBadInputChild, DISABLED_LockedMemory) {
  limit_locked_memory(1 << 20);
  VerbsRig rig;
  const LinkLayout layout = small_layout(4 << 20), small = small_layout(64 << 10);
  const auto message = [](const char* whom, const char* need) {
    return AllOf(HasSubstr(whom), HasSubstr(need), HasSubstr("the limit is 1.0 MiB"),
                 HasSubstr("ulimit -l"));
  };
  expect_error([&] { rig.transport().open_job(layout); }, ErrorCode::kFull,
               message("a job of 2 ranks over 1 NICs", "needs 12.0 MiB of locked memory"));
  const auto box = rig.transport().open_job(small);
  const Offer offer = box->admit(0, 1);
  box->endpoint(0).attach(0, 1);
  expect_error([&] { rig.connect(offer, layout); }, ErrorCode::kFull,
               message("a worker over 1 NICs", "needs 8.0 MiB of locked memory"));
  EXPECT_NE(rig.connect(offer, small), nullptr);
  box->endpoint(0).detach(0);
}

TEST_F(VerbsBadInputTest, TooFewDescriptors) { run_child("Descriptors"); }
TEST(VerbsBadInputChild, DISABLED_Descriptors) {
  VerbsRig rig;
  const LinkLayout layout = small_layout();
  const auto box = rig.transport().open_job(layout);
  const size_t before = phub::testing::open_descriptors();
  // One by one: somewhere it suffices.
  bool enough = false;
  for (uint64_t more = 0; more < 12 && !enough; ++more) {
    const rlimit limit = {before + more, 4096};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    try {
      rig.transport().open_job(layout);
      enough = true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFull) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("Too many open files"));
    }
    const rlimit plenty = {4096, 4096};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &plenty), 0);
    EXPECT_EQ(phub::testing::open_descriptors(), before);
  }
  EXPECT_TRUE(enough);
}

// The last of those with a device: what a port that was down is good for afterwards is the kernel's
// business.
TEST(VerbsPortDown, IsSaidSo) {
  const VerbsPort port = the_port();
  VerbsRig rig;
  const LinkLayout layout = small_layout();
  const auto box = rig.transport().open_job(layout);
  const Offer offer = box->admit(0, 1);
  ASSERT_TRUE(command("ip link set " + port.netdev + " down"));
  std::vector<VerbsFinding> passed_over;
  EXPECT_TRUE(choose_verbs_ports({}, {}, passed_over).empty());
  ASSERT_EQ(passed_over.size(), 1u);
  EXPECT_EQ(passed_over[0].problem, "is down");
  expect_error([&] { choose(port.device); }, ErrorCode::kInvalid,
               HasSubstr("RDMA device " + port.device + ": port 1 is down"));
  // A route may or may not be left.
  expect_error(
      [&] { rig.connect(offer, layout); }, ErrorCode::kUnavailable,
      AnyOf(HasSubstr("no RDMA device of this host has a route to " + port.address),
            AllOf(HasSubstr(port.address), HasSubstr("cannot be connected to over RDMA"))));
  expect_no_server({"--transports", "verbs"},
                   "no usable RDMA device: " + port.device + " port 1 is down");
  ASSERT_TRUE(command("ip link set " + port.netdev + " up"));
  for (int i = 0; i < 100 && !passed_over.empty(); ++i) {
    passed_over.clear();
    choose_verbs_ports({}, {}, passed_over);
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_EQ(the_port().address, port.address);
}

// --- No device.

class WithoutDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<VerbsFinding> passed_over;
    if (!choose_verbs_ports({}, {}, passed_over).empty() || !passed_over.empty()) {
      GTEST_SKIP() << "this machine has an RDMA device: rdma link delete rxe0, and run it again";
    }
  }
};

TEST_F(WithoutDevices, NothingIsFound) {
  std::vector<VerbsFinding> passed_over;
  EXPECT_TRUE(choose_verbs_ports({}, {}, passed_over).empty());
  EXPECT_TRUE(passed_over.empty());
  expect_error([] { choose("rxe0"); }, ErrorCode::kInvalid,
               HasSubstr("there is no RDMA device 'rxe0'; there are none"));
}

TEST_F(WithoutDevices, AWorkerSaysWhatIsMissing) {
  const size_t before = phub::testing::open_descriptors();
  const Offer offer = {.transport = "verbs",
                       .ticket = std::string(32, '0'),
                       .queues = {{.address = "10.77.0.1:7718"}}};
  expect_error([&] { connect_verbs(offer, small_layout(), 2000); }, ErrorCode::kUnavailable,
               AnyOf(HasSubstr("no RDMA on this host"),
                     HasSubstr("no RDMA device of this host has a route to 10.77.0.1:7718")));
  EXPECT_EQ(phub::testing::open_descriptors(), before);
}

TEST_F(WithoutDevices, AServerSaysWhatIsMissing) {
  expect_no_server({"--transports", "verbs"},
                   "transport verbs: no usable RDMA device: this host has none");
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
