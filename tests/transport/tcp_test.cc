// Connecting over TCP: tickets, malformed hellos, limits, addresses, what is left behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/tcp_rig.h"
#include "transport/error.h"
#include "transport/tcp/dialing.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/socket.h"
#include "transport/text.h"

namespace phub {
namespace tcp_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

size_t open_fds() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}
// Takes every free descriptor below the highest one in use: the next is highest + 1.
std::vector<Fd> fill_descriptors(int& highest) {
  highest = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    highest = std::max(highest, std::stoi(entry.path().filename()));
  }
  std::vector<Fd> taken;
  while (taken.empty() || taken.back().get() <= highest) {
    taken.emplace_back(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  }
  taken.pop_back();
  return taken;
}
// Lowers the limit of open files as long as it lives.
class FileLimit {
 public:
  explicit FileLimit(rlim_t limit) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few = {limit, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FileLimit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

// The Error that `action` throws, as "code: text"; "" if none.
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::string(name_of(error.code())) + ": " + error.what();
  }
  return "";
}

class TcpTest : public ::testing::Test {
 protected:
  void start(const TcpOptions& options) { rig_ = std::make_unique<TcpRig>(options); }
  void open(uint32_t ranks = 2, uint32_t cores = 2) {
    layout_ = {};
    layout_.max_ranks = ranks;
    layout_.cores = cores;
    layout_.queue_chunks.assign(cores, 8);
    layout_.core_node.assign(cores, 0);
    layout_.slots_bytes = layout_.results_bytes = 5000;
    box_ = rig_->transport().open_job(layout_);
  }
  void handle(int times = 20) {
    for (int i = 0; i < times; ++i) {
      rig_->transport().handle_events(rig_->events());
      rig_->pump();
    }
  }
  // What the box says to `raw`: "welcome", an error as error_of() has it, "" if it just closes the
  // connection, "silence".
  std::string answer(RawTcp& raw) {
    handle();
    const std::vector<std::byte> message = raw.receive();
    if (message.empty()) return raw.ended() ? "" : "silence";
    const std::string error = error_of([&] { parse_tcp_answer(message); });
    return error.empty() ? "welcome" : error;
  }
  std::string answer_to(std::span<const std::byte> message) {
    RawTcp raw(address());
    raw.send(message);
    return answer(raw);
  }
  std::string address() {
    const std::string text = rig_->transport().describe();
    return text.substr(5, text.find_first_of(",;") - 5);
  }
  long count(TransportEvent::Kind kind) {
    return std::count_if(rig_->events().begin(), rig_->events().end(),
                         [kind](const TransportEvent& event) { return event.kind == kind; });
  }
  void TearDown() override {
    while (!attached_.empty()) detach(*attached_.begin());
  }
  void attach(uint32_t rank, uint32_t incarnation) {
    for (uint32_t c = 0; c < layout_.cores; ++c) box_->endpoint(c).attach(rank, incarnation);
    attached_.insert(rank);
  }
  void detach(uint32_t rank) {
    for (uint32_t c = 0; c < layout_.cores; ++c) box_->endpoint(c).detach(rank);
    attached_.erase(rank);
  }
  // One chunk each way on queue 0 of a connected and attached rank.
  void expect_exchange(WorkerLink& worker, uint32_t rank) {
    const auto one_way = [&](Endpoint& from, QueuePair posted, Endpoint& to, QueuePair arrived) {
      ASSERT_TRUE(from.post(posted, {16, 32, 100, 77}));
      from.flush();
      std::array<Arrival, 4> some;
      size_t taken = 0;
      for (int i = 0; i < 1000 && taken == 0; ++i) {
        taken = to.poll(some);
        rig_->pump();
      }
      ASSERT_EQ(taken, 1u);
      EXPECT_TRUE(some[0].ok && some[0].imm == 77);
      EXPECT_TRUE(some[0].queue == arrived.queue && some[0].rank == arrived.rank);
    };
    worker.gradients()[16] ^= std::byte{5};
    one_way(worker.endpoint(), {}, box_->endpoint(0), {.rank = rank});
    EXPECT_EQ(box_->slots(rank)[32], worker.gradients()[16]);
    box_->results()[16] ^= std::byte{6};
    one_way(box_->endpoint(0), {.rank = rank}, worker.endpoint(), {});
    EXPECT_EQ(worker.results()[32], box_->results()[16]);
  }

  std::unique_ptr<TcpRig> rig_ = std::make_unique<TcpRig>();
  LinkLayout layout_;
  std::unique_ptr<BoxLink> box_;
  std::set<uint32_t> attached_;
};

TEST_F(TcpTest, SaysWhereItListens) {
  EXPECT_EQ(rig_->transport().name(), "tcp");
  EXPECT_THAT(address(), StartsWith("127.0.0.1:"));
  EXPECT_THAT(rig_->transport().describe(),
              HasSubstr("congestion control " + default_congestion_control()));
  start({.nics = {{"127.0.0.1"}, {"127.0.0.2"}}});
  EXPECT_THAT(rig_->transport().describe(), HasSubstr(", 127.0.0.2:"));
}

TEST_F(TcpTest, TheSlotsOfARankAreTheSameForAllItsIncarnations) {
  open();
  EXPECT_FALSE(box_->slots_belong_to_worker());
  EXPECT_TRUE(box_->can_reconnect());
  auto link = rig_->connect(box_->admit(1, 1), layout_);
  EXPECT_FALSE(link->zero_copy());
  EXPECT_TRUE(link->needs_polling());
  EXPECT_TRUE(link->can_reconnect());
  EXPECT_THAT(link->describe(), HasSubstr("2 connections: 127.0.0.1:"));
  EXPECT_THAT(link->describe(), HasSubstr(" to " + address()));
  EXPECT_EQ(link->gradients().size(), 5000u);
  EXPECT_EQ(link->results().size(), 5000u);
  attach(1, 1);
  expect_exchange(*link, 1);
  const std::span<const std::byte> slots = box_->slots(1);
  const std::vector<std::byte> before(slots.begin(), slots.end());
  detach(1);
  box_->revoke(1);
  box_->admit(1, 2);
  EXPECT_EQ(box_->slots(1).data(), slots.data());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), slots.begin()));
}

TEST_F(TcpTest, MalformedHellosAreAnsweredAndChangeNothing) {
  open();
  const Offer offer = box_->admit(0, 1);
  const TcpHello good = tcp_hello_of(offer, layout_, 1);
  const auto with = [&](const std::function<void(TcpHello&)>& change) {
    TcpHello hello = good;
    change(hello);
    return answer_to(std::as_bytes(std::span(&hello, 1)));
  };
  EXPECT_THAT(with([](TcpHello& h) { h.header.magic = 1; }), HasSubstr("not a phub peer"));
  EXPECT_THAT(with([](TcpHello& h) { h.header.version = 9; }), HasSubstr("protocol version 9"));
  EXPECT_THAT(with([](TcpHello& h) { h.header.bytes = 65; }), HasSubstr("with 65 bytes"));
  EXPECT_THAT(with([](TcpHello& h) { h.header.type = TcpMessage{7}; }), HasSubstr("type 7"));
  EXPECT_THAT(with([](TcpHello& h) { h.header = {.type = TcpMessage::kRefusal, .bytes = 64}; }),
              HasSubstr("message type 2"));
  EXPECT_THAT(with([](TcpHello& h) { h.ticket[5] = 'x'; }), StartsWith("unauthorized: "));
  EXPECT_THAT(with([](TcpHello& h) { h.ticket.fill('0'); }), StartsWith("unauthorized: "));
  EXPECT_THAT(with([](TcpHello& h) { h.queue = 2; }), HasSubstr("queue 2 of 2"));
  EXPECT_THAT(with([](TcpHello& h) { h.queue = ~0u; }), StartsWith("invalid: "));
  EXPECT_THAT(with([](TcpHello& h) { h.queues = 3; }), HasSubstr("queues: 3"));
  EXPECT_THAT(with([](TcpHello& h) { h.queue_chunks = 9; }), HasSubstr("chunks of queue 1: 9"));
  EXPECT_THAT(with([](TcpHello& h) { h.gradient_bytes = 1; }), StartsWith("mismatch: "));
  EXPECT_THAT(with([](TcpHello& h) { h.result_bytes = 1; }), HasSubstr("bytes of results: 1"));
  const std::string http = "GET /metrics HTTP/1.1\r\nHost: box\r\n\r\n";
  EXPECT_THAT(answer_to(std::as_bytes(std::span(http))), HasSubstr("not a phub peer"));
  EXPECT_EQ(rig_->events().back().kind, TransportEvent::kRefused);  // for the server's log
  EXPECT_THAT(rig_->events().back().reason, HasSubstr("tcp: a connection from 127.0.0.1:"));
  EXPECT_THAT(rig_->events().back().reason, HasSubstr("was refused: invalid: hello: magic"));
  const std::vector<std::byte> zeros(1'000'000);
  EXPECT_THAT(answer_to(zeros), StartsWith("invalid: "));

  const auto bytes = std::as_bytes(std::span(&good, 1));
  for (const size_t size : {0u, 1u, 15u, 16u, 79u}) {
    RawTcp raw(address());
    raw.send(bytes.first(size));
    EXPECT_EQ(answer(raw), "silence") << size;
    shutdown(raw.socket(), SHUT_WR);
    EXPECT_EQ(answer(raw), "") << size;
  }

  // After all this the ticket is as good as new; a hello may come in pieces.
  RawTcp raw(address());
  raw.send(bytes.first(7));
  EXPECT_EQ(answer(raw), "silence");
  raw.send(bytes.subspan(7));
  EXPECT_EQ(answer(raw), "welcome");
}

TEST_F(TcpTest, ATicketOpensEachQueueOnce) {
  open();
  const Offer offer = box_->admit(0, 1);
  const auto knock = [&](RawTcp& raw, uint32_t queue) {
    raw.send_struct(tcp_hello_of(offer, layout_, queue));
    return answer(raw);
  };
  RawTcp first(address()), again(address()), second(address()), third(address());
  EXPECT_EQ(knock(first, 0), "welcome");
  EXPECT_THAT(knock(again, 0), HasSubstr("used already for queue 0"));
  EXPECT_EQ(knock(second, 1), "welcome");
  EXPECT_THAT(knock(third, 1), StartsWith("unauthorized: "));
  EXPECT_EQ(count(TransportEvent::kDisconnected), 0);
  first.close();
  second.close();
  handle();
  EXPECT_EQ(count(TransportEvent::kDisconnected), 1) << "once, whichever ends";
}

TEST_F(TcpTest, HalfOpenConnectionsEndAndAJobGoesOn) {
  start({.half_open_ms = 500, .max_half_open = 8});
  open();
  auto worker = rig_->connect(box_->admit(0, 1), layout_);
  attach(0, 1);
  const size_t before = open_fds();
  std::vector<std::unique_ptr<RawTcp>> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(std::make_unique<RawTcp>(address()));
    if (i % 2) silent.back()->send_struct(TcpHeader{.bytes = 64});  // and no more
    if (i % 10 == 0) handle(1);
  }
  handle(1);
  EXPECT_LE(open_fds(), before + 108) << "100 of ours, at most 8 of the box";
  expect_exchange(*worker, 0);
  auto other = rig_->connect(box_->admit(1, 1), layout_);
  EXPECT_TRUE(other->connected()) << "room for the honest";

  const auto ended = [](const auto& raw) {
    while (!raw->receive().empty()) {
    }
    return raw->ended();
  };
  EXPECT_THAT(error_of([&] { parse_tcp_answer(silent[0]->receive()); }), HasSubstr("too many"));
  for (int i = 0; i < 50 && !ended(silent.back()); ++i) {
    pollfd events = {rig_->transport().event_fd(), POLLIN, 0};
    if (::poll(&events, 1, 5000) == 0) break;  // it asks to be called when their time is over
    handle(1);
  }
  EXPECT_TRUE(ended(silent.back()));
  EXPECT_EQ(open_fds(), before + 105) << "ours, rank 1's two connections and its epoll";
  expect_exchange(*worker, 0);
}

TEST_F(TcpTest, ABurstOfHonestWorkersIsNotAFlood) {
  start({.max_half_open = 1});
  open(1, 64);
  auto worker = rig_->connect(box_->admit(0, 1), layout_);
  attach(0, 1);
  expect_exchange(*worker, 0);
}

// Its hello is read to make room for another one; the event that tells of the hello comes behind.
TEST_F(TcpTest, ASlowHelloIsNoEnd) {
  start({.max_half_open = 1});
  open(1, 1);
  const Offer offer = box_->admit(0, 1);
  RawTcp slow(address());
  handle(1);
  RawTcp other(address());
  slow.send_struct(tcp_hello_of(offer, layout_, 0));
  handle(1);
  EXPECT_EQ(error_of([&] { parse_tcp_answer(slow.receive()); }), "");
  EXPECT_EQ(count(TransportEvent::kDisconnected), 0);
  slow.close();
  handle(2);
  EXPECT_EQ(count(TransportEvent::kDisconnected), 1);
}

TEST_F(TcpTest, RunningOutOfDescriptors) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's own checks need descriptors";
#endif
  open(3, 3);
  auto running = rig_->connect(box_->admit(0, 1), layout_);
  attach(0, 1);
  int highest = 0;
  const std::vector<Fd> filled = fill_descriptors(highest);
  const size_t fds = open_fds();
  for (rlim_t spare = 0; spare < 3; ++spare) {
    std::string text;
    {
      const FileLimit few(static_cast<rlim_t>(highest) + 1 + spare);
      text = error_of([&] { box_->admit(1, 1); });
    }
    EXPECT_THAT(text, StartsWith("full: 3 connections of rank 1"));
    EXPECT_THAT(text, HasSubstr("ulimit -n"));
    EXPECT_EQ(open_fds(), fds) << "with " << spare << " to spare";
  }
  // Out of descriptors when a worker knocks: it is told, and the NIC does not spin on it.
  const Offer offer = box_->admit(1, 1);
  RawTcp raw(address());
  raw.send_struct(tcp_hello_of(offer, layout_, 0));
  {
    const FileLimit none(static_cast<rlim_t>(highest) + 1);
    handle();
    pollfd events = {rig_->transport().event_fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&events, 1, 0), 0);
    EXPECT_THAT(error_of([&] { parse_tcp_answer(raw.receive()); }), StartsWith("full: "));
    expect_exchange(*running, 0);
  }
  {
    const FileLimit few(static_cast<rlim_t>(highest) + 3);
    EXPECT_THAT(error_of([&] { connect_tcp(offer, layout_, 100); }), StartsWith("full: "));
  }
  handle();
  EXPECT_TRUE(rig_->connect(box_->admit(2, 1), layout_)->connected());
}

TEST_F(TcpTest, NothingIsLeftBehind) {
  open();
  const auto every_way_to_end = [&] {
    {  // a whole life
      auto link = rig_->connect(box_->admit(0, 1), layout_);
      attach(0, 1);
      link.reset();
      detach(0);
      box_->revoke(0);
    }
    {  // revoked before the worker comes; the worker's ticket is refused
      const Offer offer = box_->admit(0, 2);
      box_->revoke(0);
      EXPECT_THAT(error_of([&] { rig_->connect(offer, layout_); }), HasSubstr("join again"));
    }
    {  // the worker expects other sizes
      LinkLayout other = layout_;
      other.slots_bytes = 1;
      const Offer offer = box_->admit(0, 3);
      EXPECT_THAT(error_of([&] { rig_->connect(offer, other); }), StartsWith("mismatch: "));
      box_->revoke(0);
    }
    {  // one queue of two, then gone
      RawTcp dies(address());
      dies.send_struct(tcp_hello_of(box_->admit(0, 4), layout_, 1));
      handle(2);
      dies.close();
      box_->revoke(0);
    }
    {  // a reconnection
      auto link = rig_->connect(box_->admit(0, 5), layout_);
      link->endpoint().post({0}, {0, 0, 100, 1});
      link->endpoint().flush();
      const Offer again = box_->reconnect(0);
      rig_->reconnect(*link, again);
      box_->revoke(0);
    }
    {  // a job ends with its ranks
      const std::unique_ptr<BoxLink> other = rig_->transport().open_job(layout_);
      const auto link = rig_->connect(other->admit(1, 1), layout_);
    }
    RawTcp garbage(address());
    garbage.send_struct(std::array<char, 100>{});
    handle(2);
  };
  every_way_to_end();
  const size_t fds = open_fds();
  for (int i = 0; i < 50; ++i) every_way_to_end();
  EXPECT_EQ(open_fds(), fds);
}

TEST_F(TcpTest, NoServerOrOneThatDoesNotAnswer) {
  open();
  const Offer good = box_->admit(0, 1);
  const auto with = [&](const std::function<void(Offer&)>& change) {
    Offer offer = good;
    change(offer);
    return error_of([&] { connect_tcp(offer, layout_, 50); });
  };
  EXPECT_THAT(with([](Offer&) {}), StartsWith("timeout: 127.0.0.1:"));
  EXPECT_THAT(with([](Offer& o) { o.queues[1].address = "127.0.0.1:1"; }),
              StartsWith("unavailable: no server at 127.0.0.1:1"));
  EXPECT_THAT(with([](Offer& o) { o.queues[1].address = "box:7"; }),
              HasSubstr("not an IP address"));
  EXPECT_THAT(with([](Offer& o) { o.queues[0].address = "nowhere"; }), StartsWith("invalid: "));
  EXPECT_THAT(with([](Offer& o) { o.queues.pop_back(); }),
              StartsWith("mismatch: 1 queues are offered, the plan has 2"));
  EXPECT_THAT(with([](Offer& o) { o.ticket = "short"; }), HasSubstr("5 characters"));
  EXPECT_THAT(with([](Offer& o) { o.transport = "shm"; }), HasSubstr("'shm'"));
}

TEST_F(TcpTest, AddressesThatCannotBe) {
  const auto refused = [](const TcpOptions& options) {
    return error_of([&] { make_tcp_transport(options); });
  };
  EXPECT_THAT(refused({.nics = {}}), HasSubstr("needs an address"));
  EXPECT_THAT(refused({.nics = {{"box"}}}), HasSubstr("'box' is not an IP address"));
  EXPECT_THAT(refused({.nics = {{"192.0.2.1"}}}), HasSubstr("192.0.2.1"));  // nobody's
  const HostPort taken = parse_host_port(address());
  EXPECT_THAT(refused({.nics = {{"127.0.0.1"}}, .port = taken.port}),
              HasSubstr("another server is there"));
}

TEST_F(TcpTest, EveryAddressGetsAnEqualShare) {
  start({.nics = {{"127.0.0.1"}, {"127.0.0.2"}}});
  open(6, 3);
  std::map<std::string, int> shares;
  for (uint32_t rank = 0; rank < 6; ++rank) {
    const Offer offer = box_->admit(rank, 1);
    for (const QueueOffer& queue : offer.queues) ++shares[queue.address];
    EXPECT_NE(offer.queues[0].address, offer.queues[1].address);
    auto worker = rig_->connect(offer, layout_);
    attach(rank, 1);
    expect_exchange(*worker, rank);
    detach(rank);
  }
  ASSERT_EQ(shares.size(), 2u);
  for (const auto& [where, connections] : shares) EXPECT_EQ(connections, 9) << where;
}

// As NICs in the plan, which then says where each queue is.
TEST_F(TcpTest, AQueueIsAtTheAddressThatIsItsNic) {
  start({.nics = {{"127.0.0.1"}, {"127.0.0.2"}, {"127.0.0.3"}}});
  const std::vector<NicPort> ports = rig_->transport().ports();
  ASSERT_EQ(ports.size(), 3u);
  for (const NicPort& port : ports) EXPECT_EQ(port.os_node, NicPort::kEveryNode);
  layout_ = {};
  layout_.max_ranks = 2;
  layout_.cores = 1;
  layout_.queue_chunks = {8, 8, 8};
  layout_.queue_core = {0, 0, 0};
  layout_.queue_nic = {ports[2].name, ports[0].name, ports[2].name};
  layout_.core_node = {0};
  layout_.slots_bytes = layout_.results_bytes = 5000;
  box_ = rig_->transport().open_job(layout_);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const Offer offer = box_->admit(rank, 1);
    ASSERT_EQ(offer.queues.size(), 3u);
    for (uint32_t q = 0; q < 3; ++q) EXPECT_EQ(offer.queues[q].address, layout_.queue_nic[q]);
  }
  box_.reset();
  start({.nics = {{"127.0.0.1"}}});
  EXPECT_TRUE(rig_->transport().ports().empty()) << "there is nothing to choose from";
}

TEST_F(TcpTest, AnOfferNamesTheOtherAddressesToo) {
  start({.nics = {{"127.0.0.1", "127.0.0.2"}, {}, {"127.0.0.3"}}});
  EXPECT_EQ(rig_->transport().ports().size(), 2u);
  EXPECT_THAT(rig_->transport().describe(),
              ::testing::ContainsRegex("127.0.0.1:[0-9]+ or 127.0.0.2:[0-9]+, 127.0.0.3:[0-9]+;"));
  open();
  const Offer offer = box_->admit(0, 1);
  EXPECT_THAT(offer.queues[0].address, StartsWith("127.0.0.1:"));
  EXPECT_THAT(offer.queues[0].same_nic, ElementsAre(StartsWith("127.0.0.2:")));
  EXPECT_THAT(offer.queues[0].other_nics, ElementsAre(StartsWith("127.0.0.3:")));
  EXPECT_THAT(offer.queues[1].address, StartsWith("127.0.0.3:"));
  EXPECT_THAT(offer.queues[1].same_nic, ElementsAre());
  EXPECT_THAT(offer.queues[1].other_nics,
              ElementsAre(StartsWith("127.0.0.1:"), StartsWith("127.0.0.2:")));
}

TEST_F(TcpTest, AWorkerBeginsWithTheAddressThatItKnows) {
  const std::string a4 = "10.0.0.1:1", a6 = "[fd00::1]:2", b4 = "10.7.0.1:3", c4 = "10.1.0.1:4",
                    c6 = "[fd01::1]:5";
  const QueueOffer offer = {.address = a4, .same_nic = {a6, b4}, .other_nics = {c4, c6}};
  const auto order = [&](const std::string& reached, std::set<std::string> unreached = {}) {
    return in_order(offer, {.deadline = {}, .reached = reached, .unreached = &unreached});
  };
  EXPECT_THAT(order(""), ElementsAre(a4, a6, b4, c4, c6));
  EXPECT_THAT(order("10.7.0.1"), ElementsAre(b4, a4, a6, c4, c6));
  EXPECT_THAT(order("192.168.0.1"), ElementsAre(a4, b4, a6, c4, c6));
  EXPECT_THAT(order("fd00::1"), ElementsAre(a6, a4, b4, c6, c4));
  EXPECT_THAT(order("10.1.0.1"), ElementsAre(a4, b4, a6, c4, c6)) << "each NIC has its share";
  EXPECT_THAT(order("fd00::1", {a6, c6}), ElementsAre(a4, b4, c4, a6, c6));
  EXPECT_THAT(order("", {a4, a6, b4, c4, c6}), ElementsAre(a4, a6, b4, c4, c6));
  EXPECT_THAT(in_order({.address = "", .near = "near"}, {.deadline = {}}), ElementsAre());
}

TEST_F(TcpTest, AWorkerGoesOnToTheNextAddress) {
  start({.nics = {{"127.0.0.1"}, {"127.0.0.2"}}});
  open();
  const std::string nobody = "127.0.0.1:1";
  Offer offer = box_->admit(0, 1);
  offer.queues[0].same_nic = {offer.queues[0].address};
  offer.queues[0].address = nobody;
  offer.queues[0].other_nics = {};
  // Somebody else, who says nothing that is known here.
  const Fd other = listen_on(tcp_address("127.0.0.3", 0));
  std::thread rude([&] {
    pollfd there = {other.get(), POLLIN, 0};
    ::poll(&there, 1, -1);
    const Fd guest(accept(other.get(), nullptr, nullptr));
  });
  offer.queues[1].other_nics = {nobody, offer.queues[1].address};
  offer.queues[1].address = to_string(local_address(other.get()));
  auto worker = rig_->connect(offer, layout_);
  rude.join();
  attach(0, 1);
  expect_exchange(*worker, 0);
  detach(0);

  for (QueueOffer& queue : offer.queues) {
    queue = {.address = nobody, .same_nic = {"127.0.0.2:1"}, .other_nics = {"[::1]:1"}};
  }
  EXPECT_THAT(error_of([&] { connect_tcp(offer, layout_, 10000); }),
              AllOf(StartsWith("unavailable: "), HasSubstr(nobody), HasSubstr("127.0.0.2:1"),
                    HasSubstr("[::1]:1")));
}

TEST_F(TcpTest, DataAddresses) {
  EXPECT_EQ(tcp_data_addresses({"127.0.0.3", "127.0.0.3"}), std::vector<std::string>{"127.0.0.3"});
  EXPECT_THAT(tcp_data_addresses({"localhost"}),
              ::testing::ElementsAre(::testing::AnyOf("127.0.0.1", "::1")));
  EXPECT_THAT(error_of([] { tcp_data_addresses({"no.such.host.invalid"}); }),
              HasSubstr("no.such.host.invalid"));
  for (const char* local : {"fe80::1", "fe80::1%lo", "febf::1%1"}) {
    EXPECT_THAT(error_of([&] {
                  tcp_data_addresses({"127.0.0.1", local});
                }),
                AllOf(HasSubstr(local), HasSubstr("link-local"), HasSubstr("--listen")));
  }
  EXPECT_EQ(tcp_nics({"127.0.0.1", "::1"}).size(), tcp_nics({"127.0.0.1"}).size())
      << "addresses of one interface are one NIC";
  EXPECT_EQ(tcp_nics({"127.0.0.1", "127.0.0.2"}).size(), 2u) << "unless both are of one family";
  for (const char* any : {"0.0.0.0", "*", "::", "", "0", "::0"}) {
    const std::vector<std::string> all = tcp_data_addresses({any});
    ASSERT_FALSE(all.empty()) << any;
    start({.nics = tcp_nics({any})});  // each can be listened at
    for (const std::string& one : all) {
      EXPECT_EQ(tcp_address(one, 0).is_loopback(), all.size() == 1 && one.starts_with("127."));
    }
  }
}

TEST_F(TcpTest, OverIPv6) {
  if (!error_of([] { make_tcp_transport({.nics = {{"::1"}}}); }).empty()) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  start({.nics = {{"::1"}}});
  open();
  const Offer offer = box_->admit(0, 1);
  EXPECT_THAT(offer.queues[0].address, StartsWith("[::1]:"));
  auto worker = rig_->connect(offer, layout_);
  attach(0, 1);
  expect_exchange(*worker, 0);
}

TEST_F(TcpTest, NothingIsPacedWithinAMachine) {
  const auto control_of = [](int socket) {
    std::array<char, 16> name = {};
    socklen_t size = name.size();
    getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size);
    return std::string(name.data());
  };
  const Fd listener = listen_on(tcp_address("127.0.0.1", 0));
  int error = 0;
  const Fd worker = begin_connect(local_address(listener.get()), error);
  const Fd box(accept(listener.get(), nullptr, nullptr));
  EXPECT_EQ(error, 0);
  EXPECT_THAT(control_of(worker.get()), ::testing::AnyOf("cubic", "reno"));
  EXPECT_THAT(control_of(box.get()), ::testing::AnyOf("cubic", "reno"));
  EXPECT_TRUE(same_host(local_address(box.get()), peer_address(box.get())));
  EXPECT_FALSE(is_own(tcp_address("192.0.2.1", 7)));
}

}  // namespace tcp_test
}  // namespace phub
