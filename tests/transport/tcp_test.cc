// Connecting over TCP: queues and their addresses. (Strangers: strangers_test.cc.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "tests/transport/link_test.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/tcp_rig.h"
#include "tests/worker/expect_error.h"
#include "transport/tcp/dialing.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/socket.h"
#include "transport/text.h"

namespace phub {
namespace tcp_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class TcpTest : public LinkTest {
 protected:
  TcpTest() { start({}); }
  void start(const TcpOptions& options) { rig_ = std::make_unique<TcpRig>(options); }
  std::string address() {
    const std::string text = rig_->transport().describe();
    return text.substr(5, text.find_first_of(",;") - 5);
  }
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
  const auto link = join(1, 1);
  EXPECT_FALSE(link->zero_copy());
  EXPECT_TRUE(link->needs_polling());
  EXPECT_TRUE(link->can_reconnect());
  EXPECT_THAT(link->describe(), HasSubstr("2 connections: 127.0.0.1:"));
  EXPECT_THAT(link->describe(), HasSubstr(" to " + address()));
  EXPECT_EQ(link->gradients().size(), 5000u);
  EXPECT_EQ(link->results().size(), 5000u);
  expect_exchange(*link, 1);
  const std::span<const std::byte> slots = box_->slots(1);
  const std::vector<std::byte> before(slots.begin(), slots.end());
  detach(1);
  box_->revoke(1);
  box_->admit(1, 2);
  EXPECT_EQ(box_->slots(1).data(), slots.data());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), slots.begin()));
}

TEST_F(TcpTest, ATicketOpensEachQueueOnce) {
  open();
  const Offer offer = box_->admit(0, 1);
  std::vector<RawTcp> all;
  const auto knock = [&](uint32_t queue) {
    all.emplace_back(address());
    all.back().send_struct(tcp_hello_of(offer, layout_, queue));
    handle();
    return error_of([&] { parse_tcp_answer(all.back().receive()); });
  };
  const auto ends = [&] {
    return std::ranges::count(rig_->events(), TransportEvent::kDisconnected, &TransportEvent::kind);
  };
  EXPECT_EQ(knock(0), "none");
  EXPECT_THAT(knock(0), HasSubstr("used already for queue 0"));
  EXPECT_EQ(knock(1), "none");
  EXPECT_THAT(knock(1), StartsWith("unauthorized: "));
  EXPECT_EQ(ends(), 0);
  all.clear();
  handle();
  EXPECT_EQ(ends(), 1) << "once, whichever ends";
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
