// The control port over TLS, whatever clients and servers do: bounds, deadlines, ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/phub/tls_rig.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub::testing {
namespace tls_attack_test {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Tls, PlainHttpIsToldWhatThisPortSpeaks) {
  start();
  EXPECT_THAT(ask(rig_->address()), HasSubstr("https://"));
  RawClient browser(rig_->address());
  browser.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(browser.rest(), AllOf(HasSubstr("400 Bad Request"), HasSubstr("https://"),
                                    Not(HasSubstr("still open"))));
  RawClient joins(rig_->address());  // a body that is longer than what is read of it
  joins.send("POST /v1/jobs/x/join HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n");
  joins.send(std::string(3'000'000, 'x'));
  joins.shut();
  EXPECT_THAT(joins.rest(), HasSubstr("400 Bad Request"));
  EXPECT_TRUE(noted("does not speak TLS"));
  EXPECT_TRUE(rig_->has_connections(0));
}

TEST_F(Tls, GarbageEndsItsOwnConnectionOnly) {
  start({.request_timeout_ms = 3000});
  HttpClient kept(url());
  const std::string good = hello();
  std::string flipped = good;
  flipped[9] = static_cast<char>(flipped[9] ^ 0x55);
  std::vector<std::string> inputs = {std::string("\x00\x01\x02\x03", 4),
                                     "\x16",
                                     std::string("\x16\x03\x01\xff\xff", 5),
                                     "\x16\x03\x01" + std::string(70'000, '\x7f'),
                                     good.substr(0, good.size() / 2),
                                     flipped,
                                     good + good,
                                     good + std::string(100'000, 'x')};
  std::vector<std::unique_ptr<RawClient>> clients;
  for (const std::string& input : inputs) {
    clients.push_back(std::make_unique<RawClient>(rig_->address()));
    clients.back()->send(input);
    EXPECT_EQ(kept.request("GET", "/healthz", "", "", kMs).status, 200u);
  }
  for (size_t i = 0; i < clients.size(); ++i) {
    EXPECT_THAT(clients[i]->rest(), Not(HasSubstr("still open"))) << i;
  }
  EXPECT_TRUE(rig_->eventually([&] { return rig_->handler.calls.empty(); }));
  EXPECT_TRUE(eventually([&] { return handshakes() == 0; }));
}

TEST_F(Tls, AHandshakeByteByByteHasTheTimeOfARequest) {
  start({.request_timeout_ms = 1000});
  RawClient slow(rig_->address());
  const auto begin = steady_clock::now();
  bool closed = false;
  for (const char byte : hello()) {
    slow.send(std::string(1, byte));
    closed = slow.rest(20).find("still open") == std::string::npos;
    if (closed) break;
  }
  EXPECT_TRUE(closed);
  EXPECT_GT(steady_clock::now() - begin, milliseconds(800));
  EXPECT_LT(steady_clock::now() - begin, milliseconds(15'000));
  EXPECT_EQ(ask(url()), "ok");
  EXPECT_TRUE(noted("its handshake did not end in time")) << notes();
  EXPECT_EQ(front_->counters().failed, 1u);
}

TEST_F(Tls, SilentConnectionsTakeNoHandshake) {
  start({.request_timeout_ms = 4000});
  const auto silent = raw_clients(rig_->address(), 100);
  EXPECT_TRUE(rig_->has_connections(100));
  EXPECT_EQ(ask(url()), "ok");
  EXPECT_EQ(handshakes(), 0u);
  EXPECT_EQ(front_->counters().completed, 1u);
  EXPECT_TRUE(rig_->has_connections(0));  // after their time
}

// Many more than may be under way: they are bounded, those who are in go on, others get in.
TEST_F(Tls, HalfOpenHandshakesHoldUpNobody) {
  tls_.evict_after_ms = 2000;  // much more than an honest one takes
  start({.request_timeout_ms = 60'000});
  HttpClient kept(url());
  EXPECT_EQ(kept.request("GET", "/healthz", "", "", kMs).status, 200u);
  const std::string first = hello();
  std::vector<std::unique_ptr<RawClient>> half;
  uint64_t most = 0;
  for (int i = 0; i < 600; ++i) {
    half.push_back(std::make_unique<RawClient>(rig_->address()));
    half.back()->send(i % 2 == 0 ? first : first.substr(0, 50));
    most = std::max(most, handshakes());
  }
  ASSERT_TRUE(eventually([&] { return handshakes() == 256; })) << handshakes();
  for (int i = 0; i < 20; ++i) {
    const auto begin = steady_clock::now();
    EXPECT_EQ(kept.request("GET", "/healthz", "", "", kMs).status, 200u);
    EXPECT_LT(steady_clock::now() - begin, milliseconds(8000));
    most = std::max(most, handshakes());
  }
  EXPECT_EQ(ask(url()), "ok");
  EXPECT_LE(most, 256u);
  EXPECT_GT(front_->counters().evicted, 0u);
}

// Strangers who came first wait behind those who come after them: else this would take a minute.
TEST_F(Tls, TheNewestOfThoseWhoWaitIsNext) {
  tls_.max_handshakes = 1;
  tls_.evict_after_ms = 1000;
  start({.request_timeout_ms = 300'000});
  const auto half = raw_clients(rig_->address(), 60, hello());
  ASSERT_TRUE(rig_->has_connections(60));
  ASSERT_TRUE(eventually([&] { return handshakes() == 1; }));
  EXPECT_EQ(ask(url()), "ok");
}

TEST_F(Tls, TheBoundIsExact) {
  tls_.max_handshakes = 4;
  tls_.evict_after_ms = 60'000;
  start({.request_timeout_ms = 60'000});
  auto half = raw_clients(rig_->address(), 4, hello());
  ASSERT_TRUE(eventually([&] { return handshakes() == 4; }));
  EXPECT_THAT(ask(url(), 500), HasSubstr("timeout"));
  EXPECT_EQ(handshakes(), 4u);
  half.pop_back();  // whose place is taken by the next
  EXPECT_EQ(ask(url()), "ok");
  EXPECT_EQ(front_->counters().evicted, 0u);
}

TEST_F(Tls, ConnectionsThatDoNothingMakeRoom) {
  start({.max_connections = 4, .evict_after_ms = 50});
  const auto silent = raw_clients(rig_->address(), 4);
  EXPECT_TRUE(rig_->has_connections(4));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(ask(url()), "ok");
}

// The end of a client ends what it waits for.
TEST_F(Tls, AClientThatGoesLeavesItsBarrier) {
  start();
  {
    ControlClient client(url());
    std::thread waiting([&] { EXPECT_THROW(client.barrier({"mnist", 1, 2, "ticket"}, 0), Error); });
    EXPECT_TRUE(rig_->eventually([&] { return !rig_->handler.waiting.empty(); }));
    client.cancel();
    waiting.join();
  }
  EXPECT_TRUE(rig_->eventually([&] { return rig_->handler.calls.size() == 2; }));
  EXPECT_THAT(rig_->handler.calls,
              ElementsAre("barrier mnist/1/2/ticket", "leave_barrier mnist/1/2/ticket"));
  EXPECT_TRUE(rig_->has_connections(0));
}

// Records that carry nothing, sent as fast as they can be made, hold up nobody else.
TEST_F(Tls, NewKeysWithoutEndHoldUpNobody) {
  start({.request_timeout_ms = 60'000});
  HttpClient other(url());
  RawTls client(rig_->address(), TLS1_3_VERSION);
  std::atomic<bool> stop = false;
  std::atomic<int> sent = 0;
  std::thread attack([&] {
    while (!stop && SSL_key_update(client.ssl, SSL_KEY_UPDATE_NOT_REQUESTED) == 1 &&
           SSL_do_handshake(client.ssl) == 1) {
      ++sent;
    }
  });
  for (int i = 0; i < 50; ++i) {
    const auto begin = steady_clock::now();
    EXPECT_EQ(other.request("GET", "/healthz", "", "", kMs).status, 200u);
    EXPECT_LT(steady_clock::now() - begin, milliseconds(8000));
  }
  EXPECT_EQ(ask(url()), "ok");
  stop = true;
  attack.join();
  EXPECT_GT(sent, 50);
  EXPECT_THAT(client.get("/healthz"), HasSubstr("HTTP/1.1 200"));
}

// The server answers each with new keys of its own, which this client does not read.
TEST_F(Tls, AClientThatOnlyAsksForNewKeysWaitsForItself) {
  start();
  HttpClient other(url());
  RawTls client(rig_->address(), TLS1_3_VERSION);
  const timeval limit{0, 200'000};
  setsockopt(client.socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  for (int i = 0; i < 20'000; ++i) {
    if (SSL_key_update(client.ssl, SSL_KEY_UPDATE_REQUESTED) != 1) break;
    if (SSL_do_handshake(client.ssl) != 1) break;  // the buffers are full
  }
  EXPECT_EQ(other.request("GET", "/healthz", "", "", kMs).status, 200u);
  EXPECT_EQ(ask(url()), "ok");
}

// The end of the connection with heartbeats tells of the process; a reset only of the network.
TEST_F(Tls, AConnectionThatBrokeIsNoProcessThatEnded) {
  start();
  const std::string beat = to_json(Credential{"mnist", 1, 2, "ticket"});
  const auto count = [&] { return rig_->on_control([&] { return rig_->handler.ended; }); };
  for (const bool reset : {true, false}) {
    RawTls client(rig_->address(), TLS1_3_VERSION);
    const std::string text = fmt::format(
        "POST /v1/jobs/mnist/heartbeat HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        "application/json\r\nAuthorization: Bearer ticket\r\nContent-Length: {}\r\n\r\n{}",
        beat.size(), beat);
    ASSERT_EQ(SSL_write(client.ssl, text.data(), static_cast<int>(text.size())),
              static_cast<int>(text.size()));
    std::array<char, 4096> answer;
    ASSERT_GT(SSL_read(client.ssl, answer.data(), answer.size()), 0);
    EXPECT_THAT(std::string(answer.data(), 15), HasSubstr("200"));
    const linger at_once{1, 0};
    if (reset) setsockopt(client.socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    client.socket.reset();
    EXPECT_TRUE(rig_->has_connections(0));
    EXPECT_EQ(count(), reset ? 0 : 1);
  }
}

TEST_F(Tls, AnIdleConnectionIsClosedAndMadeAgain) {
  start({.idle_timeout_ms = 100});
  HttpClient client(url());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(client.request("GET", "/healthz", "", "", kMs).status, 200u);
    EXPECT_TRUE(rig_->has_connections(0));
  }
  EXPECT_EQ(front_->counters().completed, 3u);
}

TEST_F(Tls, TheServerEndsWithConnectionsOpen) {
  start();
  HttpClient kept(url());
  EXPECT_EQ(kept.request("GET", "/healthz", "", "", kMs).status, 200u);
  RawClient half(rig_->address()), silent(rig_->address());
  half.send(hello().substr(0, 20));
  EXPECT_TRUE(eventually([&] { return handshakes() == 1; }));
  rig_.reset();
  EXPECT_THAT(half.rest(), Not(HasSubstr("still open")));
  EXPECT_THAT(silent.rest(), Not(HasSubstr("still open")));
  EXPECT_THROW(kept.request("GET", "/healthz", "", "", kMs), Error);
  front_.reset();
}

TEST_F(Tls, AHandshakeHasTheDeadlineOfItsRequest) {
  const Mute mute;
  const auto begin = steady_clock::now();
  EXPECT_THAT(ask(mute.url, 500), AllOf(HasSubstr("timeout"), HasSubstr("TLS")));
  EXPECT_LT(steady_clock::now() - begin, milliseconds(20'000));
}

TEST_F(Tls, CancelEndsAHandshake) {
  const Mute mute;
  HttpClient client(mute.url);
  auto asked =
      std::async(std::launch::async, [&] { client.request("GET", "/healthz", "", "", 0); });
  EXPECT_EQ(asked.wait_for(milliseconds(200)), std::future_status::timeout);
  client.cancel();
  ASSERT_EQ(asked.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  EXPECT_THROW(asked.get(), Error);
}

}  // namespace tls_attack_test
}  // namespace phub::testing
