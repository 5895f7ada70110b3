// Data connections over TLS: who gets in, what is told to those who do not, and what comes of a
// network that cuts, changes or floods them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/transport/link_test.h"
#include "tests/transport/tcp_raw_worker.h"
#include "tests/transport/tcp_tls_rig.h"
#include "tests/worker/expect_error.h"
#include "transport/tcp/socket.h"
#include "transport/text.h"
#include "transport/tls/client.h"

namespace phub {
namespace tcp_tls_test {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint32_t kBytes = 100'000;  // of a chunk: several records

// Forwards a connection to a box, until it is told to do something else with what the worker sends.
class Wire {
 public:
  explicit Wire(const std::string& box) : listener_(listen_on(tcp_address("127.0.0.1", 0))) {
    address = to_string(local_address(listener_.get()));
    thread_ = std::jthread([this, box](const std::stop_token& stop) { run(stop, box); });
  }

  std::string address;
  static constexpr size_t kNever = ~size_t{0} / 2;
  std::atomic<size_t> cut_in = kNever;   // bytes of the worker: then the end
  std::atomic<size_t> flip_in = kNever;  // bytes: then one that is changed

 private:
  static bool wait(const std::stop_token& stop, pollfd* on, nfds_t count) {
    while (!stop.stop_requested()) {
      if (::poll(on, count, 20) > 0) return true;
    }
    return false;
  }
  void run(const std::stop_token& stop, const std::string& box) {
    pollfd knock = {listener_.get(), POLLIN, 0};
    if (!wait(stop, &knock, 1)) return;
    const Fd worker(accept(listener_.get(), nullptr, nullptr));
    const HostPort to = parse_host_port(box);
    int error = 0;
    const Fd server = begin_connect(tcp_address(to.host, to.port), error);
    std::vector<std::byte> block(16 << 10);
    for (;;) {
      std::array<pollfd, 2> ends = {pollfd{worker.get(), POLLIN, 0}, {server.get(), POLLIN, 0}};
      if (!wait(stop, ends.data(), ends.size())) return;
      for (size_t i = 0; i < 2; ++i) {
        if (ends[i].revents == 0) continue;
        size_t most = block.size();
        if (i == 0) most = std::min({most, cut_in.load(), flip_in.load() + 1});
        if (most == 0) return;  // closes both, without a word of TLS
        const ssize_t got = recv(ends[i].fd, block.data(), most, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN)) return;
        if (got < 0) continue;
        const auto bytes = static_cast<size_t>(got);
        if (i == 0 && cut_in != kNever) cut_in -= bytes;
        if (i == 0 && flip_in != kNever) {
          if (bytes == flip_in + 1) {
            block[bytes - 1] ^= std::byte{1};
            flip_in = kNever;
          } else {
            flip_in -= bytes;
          }
        }
        for (size_t sent = 0; sent < bytes;) {
          pollfd room = {ends[1 - i].fd, POLLOUT, 0};
          if (!wait(stop, &room, 1)) return;
          const ssize_t n =
              send(room.fd, block.data() + sent, bytes - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
          if (n < 0 && errno != EAGAIN) return;
          sent += n > 0 ? static_cast<size_t>(n) : 0;
        }
      }
    }
  }

  Fd listener_;
  std::jthread thread_;
};

class TcpTlsTest : public LinkTest {
 protected:
  void start(TcpOptions options = {}, bool tls = true) {
    context_.emplace(files_.server_, TlsServerContext::Use::kData);
    if (tls) options.tls = &*context_;
    rig_ = std::make_unique<TcpRig>(options, files_.trust());
    exchange_bytes_ = kBytes - 64;
    open(2, 1, kBytes);
  }
  Offer admit() {
    if (attached_.contains(0)) drop(0);
    const Offer offer = box_->admit(0, ++incarnation_);
    attach(0, incarnation_);
    return offer;
  }
  // "none", or the error.
  std::string connect(const Offer& offer, const TcpTrust& trust) {
    return testing::error_of([&] {
      worker_ = rig_->meanwhile([&] { return connect_tcp(offer, layout_, 10'000, trust); });
    });
  }
  std::string connect() { return connect(admit(), files_.trust()); }
  bool eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 12'000; ++i) {
      rig_->transport().handle_events(rig_->events());
      if (condition()) return true;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }
  std::string reasons() const {
    std::string all;
    for (const TransportEvent& event : rig_->events()) all += event.reason + "\n";
    return all;
  }
  bool refused(const std::string& why) {
    return eventually([&] { return reasons().find(why) != std::string::npos; });
  }
  // What becomes at the box of a chunk of the worker's, whose connection is led over `wire`.
  Arrival send_over(Offer offer, const std::function<void(Wire&)>& spoil) {
    Wire wire(offer.queues[0].address);
    offer.queues[0].address = wire.address;
    EXPECT_EQ(connect(offer, files_.trust()), "none");
    std::ranges::fill(worker_->gradients(), std::byte{0x5a});
    spoil(wire);
    EXPECT_TRUE(worker_->endpoint().post({0}, {0, 0, kBytes, 1}));
    worker_->endpoint().flush();
    const std::vector<Arrival> come = poll(box_->endpoint(0), 1, &worker_->endpoint());
    EXPECT_EQ(come.size(), 1u);
    return come.empty() ? Arrival{} : come[0];
  }
  void expect_exchange() { LinkTest::expect_exchange(*worker_, 0); }

  TcpTlsFiles files_;
  std::optional<TlsServerContext> context_;
  std::unique_ptr<WorkerLink> worker_;
  uint32_t incarnation_ = 0;
};

TEST_F(TcpTlsTest, TheServerMustBeTrustedAndOfThatName) {
  start();
  ASSERT_TRUE(admit().tls);
  EXPECT_EQ(connect(), "none");
  EXPECT_THAT(worker_->describe(), HasSubstr("with TLS"));
  EXPECT_THAT(rig_->transport().describe(), HasSubstr("with TLS"));
  expect_exchange();

  TcpTrust other = files_.trust();
  other.tls.authorities = files_.files_.write("other.pem", files_.other_.pem());
  EXPECT_THAT(connect(admit(), other), AllOf(HasSubstr("unauthorized"), HasSubstr("not trusted")));
  EXPECT_TRUE(refused("unknown ca")) << reasons();
  TcpTrust elsewhere = files_.trust();
  elsewhere.host = "elsewhere";
  EXPECT_THAT(connect(admit(), elsewhere),
              AllOf(HasSubstr("unauthorized"), HasSubstr("not for 'elsewhere'")));
  EXPECT_THAT(connect(admit(), {}), HasSubstr("no name of a server"));
  // Its address is not its name: data goes to addresses that nobody wrote into a certificate.
  files_.use(files_.ca_.issue({.names = "DNS:localhost"}));
  context_->reload();
  EXPECT_EQ(connect(), "none");
  expect_exchange();
}

TEST_F(TcpTlsTest, ReadAgainTheFilesHoldForNewConnections) {
  start();
  ASSERT_EQ(connect(), "none");
  files_.use(files_.other_.issue());
  context_->reload();
  expect_exchange();
  EXPECT_THAT(connect(), HasSubstr("not trusted"));
  files_.files_.write("key.pem", files_.ca_.issue().key);
  EXPECT_THROW(context_->reload(), Error);
  TcpTrust other = files_.trust();
  other.tls.authorities = files_.files_.write("other.pem", files_.other_.pem());
  EXPECT_EQ(connect(admit(), other), "none");
  expect_exchange();
}

TEST_F(TcpTlsTest, ACertificateThatHasExpiredIsNotTaken) {
  files_.use(files_.ca_.issue({.until_s = 3}));
  start();
  std::string last = "none";
  for (int i = 0; i < 600 && last == "none"; ++i) {
    last = connect();
    std::this_thread::sleep_for(milliseconds(100));
  }
  EXPECT_THAT(last, AllOf(HasSubstr("unauthorized"), HasSubstr("has expired")));
}

TEST_F(TcpTlsTest, WorkersNeedACertificateWhereTheServerAsksForOne) {
  files_.server_.client_authorities = files_.files_.write("clients.pem", files_.other_.pem());
  start();
  EXPECT_THAT(connect(), AllOf(HasSubstr("unauthorized"), HasSubstr("PHUB_CLIENT_CERT")));
  EXPECT_TRUE(refused("peer did not return a certificate")) << reasons();
  const testing::Certificate mine = files_.other_.issue();
  TcpTrust trust = files_.trust();
  trust.tls.certificate = files_.files_.write("mine.pem", mine.pem);
  trust.tls.key = files_.files_.write("mine.key", mine.key);
  EXPECT_EQ(connect(admit(), trust), "none");
  expect_exchange();
}

// Neither side is talked into plain text.
TEST_F(TcpTlsTest, PlainWorkersAreRefused) {
  start();
  Offer offer = admit();
  offer.tls = false;
  EXPECT_THAT(connect(offer, files_.trust()), AllOf(HasSubstr("invalid"), HasSubstr("speak TLS")));
  EXPECT_TRUE(refused("it does not speak TLS")) << reasons();
  ASSERT_EQ(connect(), "none");
  offer = admit();
  offer.tls = false;
  EXPECT_THAT(testing::error_of([&] { worker_->reconnect(offer); }), HasSubstr("had TLS before"));
}

TEST_F(TcpTlsTest, APlainServerIsNotTaken) {
  start({}, false);
  Offer offer = admit();
  EXPECT_FALSE(offer.tls);
  offer.tls = true;
  EXPECT_THAT(connect(offer, files_.trust()),
              AllOf(HasSubstr("unavailable"), HasSubstr("does not speak TLS")));
}

TEST_F(TcpTlsTest, AWrongTicketIsRefusedOverTls) {
  start();
  Offer offer = admit();
  offer.ticket = std::string(kTicketDigits, '0');
  EXPECT_THAT(connect(offer, files_.trust()),
              AllOf(HasSubstr("unauthorized"), HasSubstr("ticket")));
  layout_.queue_chunks = {9};
  EXPECT_THAT(connect(), HasSubstr("mismatch"));
}

// The end of a connection without TLS's own word for it may be anybody's doing.
TEST_F(TcpTlsTest, WhatIsCutOffIsNoData) {
  start();
  for (const size_t cut : {size_t{1}, size_t{20'000}, size_t{99'000}, size_t{100'000}}) {
    const Arrival arrived = send_over(admit(), [&](Wire& wire) { wire.cut_in = cut; });
    EXPECT_FALSE(arrived.ok) << cut;
    EXPECT_FALSE(arrived.violation) << "the worker may connect again";
    EXPECT_TRUE(eventually([&] { return !worker_->connected(); }));
  }
}

TEST_F(TcpTlsTest, WhatWasChangedOnItsWayIsNoData) {
  start();
  for (const size_t at : {size_t{0}, size_t{30}, size_t{600}, size_t{50'000}, size_t{99'999}}) {
    EXPECT_FALSE(send_over(admit(), [&](Wire& wire) { wire.flip_in = at; }).ok) << at;
    for (const std::byte byte : box_->slots(0)) {
      ASSERT_TRUE(byte == std::byte{0} || byte == std::byte{0x5a}) << "a byte that nobody sent";
    }
  }
}

// Strangers with and without a first byte: they have their time, and a worker gets in meanwhile.
TEST_F(TcpTlsTest, StrangersHoldUpNobodyAndHaveTheirTime) {
  start({.half_open_ms = 3000, .max_half_open = 64});
  const Offer offer = admit();
  std::vector<std::unique_ptr<RawTcp>> strangers;
  const std::string begun("\x16\x03\x01\x02", 4);
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(std::make_unique<RawTcp>(offer.queues[0].address));
    if (i % 2 == 0) strangers.back()->send(std::as_bytes(std::span(begun)));
  }
  EXPECT_EQ(connect(offer, files_.trust()), "none");
  expect_exchange();
  EXPECT_TRUE(refused("this was the oldest")) << reasons();
  EXPECT_TRUE(refused("no ticket within 3000 ms")) << reasons();
  for (auto& stranger : strangers) {
    EXPECT_TRUE(eventually([&] { return stranger->receive().empty() && stranger->ended(); }));
  }
}

TEST_F(TcpTlsTest, GarbageEndsItsOwnConnectionOnly) {
  start();
  ASSERT_EQ(connect(), "none");
  const std::string address = box_->admit(1, 1).queues[0].address;
  for (const std::string& garbage :
       {std::string("\x16\x03\x01\xff\xff", 5), std::string("\x16") + std::string(70'000, '\x7f'),
        std::string("GET / HTTP/1.1\r\n\r\n"), std::string(300'000, '\0')}) {
    RawTcp raw(address);
    raw.send(std::as_bytes(std::span(garbage).first(std::min<size_t>(garbage.size(), 100'000))));
    EXPECT_TRUE(eventually([&] {
      raw.receive();
      return raw.ended();
    }));
  }
  expect_exchange();
  box_->revoke(1);
}

}  // namespace tcp_tls_test
}  // namespace phub
