// The control port under attack: while strangers hold it up, a live job keeps its lease and whoever
// has something to ask is answered.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/phub/http_rig.h"
#include "tests/worker/box.h"
#include "transport/control/control_client.h"
#include "transport/control/http_client.h"
#include "worker/worker.h"

namespace phub {
namespace http_attack_test {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The value of a series of /metrics. Of a metric that is known, 0 if nobody has counted it yet.
uint64_t metric(const std::string& address, const std::string& series) {
  RawClient client(address);
  client.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  const std::string text = client.rest();
  EXPECT_THAT(text, ::testing::HasSubstr("# TYPE " + series.substr(0, series.find('{')) + " "));
  const size_t at = text.find("\n" + series + " ");
  return at == text.npos ? 0 : std::stoull(text.substr(at + series.size() + 2));
}

bool enough_descriptors(rlim_t wanted) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur >= wanted;
}

constexpr const char* kHeartbeats =
    R"(phub_http_requests_total{path="/v1/jobs/{job}/heartbeat",code="200"})";

TEST(HttpAttack, ALiveJobKeepsItsLease) {
  if (!enough_descriptors(4000)) GTEST_SKIP() << "not enough file descriptors";
  testing::Box box;
  JobSpec spec;
  spec.name = "live";
  spec.lease_ms = 6000;
  spec.keys = {{.name = "w", .elements = 100'000}};
  WorkerOptions options = box.options(spec);
  options.transport = "shm";
  Worker worker(options);

  const auto idle = raw_clients(box.address(), 300);
  const auto dripping =
      raw_clients(box.address(), 300, "GET /v1/status HTTP/1.1\r\nHost: localhost\r\nX: ");
  const auto short_bodies =
      raw_clients(box.address(), 100,
                  "POST /v1/jobs/live/join HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                  "application/json\r\nContent-Length: 1000000\r\n\r\n{\"version\"");

  // For longer than a lease: four heartbeats are more than three thirds of it.
  const uint64_t before = metric(box.address(), kHeartbeats);
  const auto deadline = steady_clock::now() + std::chrono::seconds(60);
  while (metric(box.address(), kHeartbeats) < before + 4) {
    ASSERT_LT(steady_clock::now(), deadline) << "heartbeats do not get through";
    for (const auto& client : dripping) client->send("x");
    raw_clients(box.address(), 20,
                "GET / HTTP/1.1\r\nHost: localhost\r\nX: " + std::string(20'000, 'x') +
                    std::string("\x16\x03\x01\x02\0\x01", 6));
    worker.push(0);
    worker.wait(0);
    std::this_thread::sleep_for(milliseconds(50));
  }
  const ServerStatus status = box.status();
  ASSERT_EQ(status.jobs.size(), 1u);
  EXPECT_EQ(status.jobs[0].ranks[0].state, "live");
  EXPECT_EQ(status.jobs[0].ranks[0].incarnation, 1u);
  for (const LogRecord& record : box.log("live")) EXPECT_NE(record.kind, LogRecord::Kind::kLost);
  worker.leave();
}

TEST(HttpAttack, ConnectionsThatAskForNothingMakeRoomForThoseThatDo) {
  HttpRig rig({.max_connections = 40, .evict_after_ms = 0});
  ControlClient heart(rig.address());
  const Credential who{"j", 0, 1, "t"};
  heart.heartbeat(who);
  const uint64_t accepted = metric(rig.address(), "phub_http_connections_accepted_total");
  EXPECT_EQ(accepted, 2u);
  EXPECT_TRUE(rig.has_connections(1));
  const auto idle = raw_clients(rig.address(), 39);
  EXPECT_TRUE(rig.has_connections(40));
  const auto more = raw_clients(rig.address(), 60);
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.calls.size() == 1; }));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ControlClient(rig.address()).status().topology, "fake");
  // The one that had served a request stayed: its next one needs no new connection.
  const uint64_t before = metric(rig.address(), "phub_http_connections_accepted_total");
  heart.heartbeat(who);
  EXPECT_EQ(metric(rig.address(), "phub_http_connections_accepted_total"), before + 1);
  EXPECT_GE(metric(rig.address(), "phub_http_connections_evicted_total"), 60u);
  EXPECT_EQ(metric(rig.address(), "phub_http_connections_refused_total"), 0u);
}

TEST(HttpAttack, AConnectionThatWaitsForItsAnswerIsNotEvicted) {
  std::vector<std::string> said;
  HttpRig rig({.max_connections = 3,
               .evict_after_ms = 0,
               .audit = [&said](const std::string& line) { said.push_back(line); }});
  const auto waiting =
      raw_clients(rig.address(), 3,
                  "POST /v1/jobs/j/barrier HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                  "application/json\r\nContent-Length: 26\r\nAuthorization: Bearer "
                  "t\r\n\r\n{\"rank\":0,\"incarnation\":1} ");
  EXPECT_TRUE(rig.eventually([&] { return rig.handler.waiting.size() == 3; }));
  RawClient extra(rig.address());
  EXPECT_THAT(extra.rest(), ::testing::StartsWith("HTTP/1.1 503"));
  rig.on_control([&] {
    EXPECT_THAT(said, ::testing::Contains(::testing::HasSubstr(
                          "no further connection: 3 are open, which is the most there may be")));
    rig.handler.release_barrier();
  });
  for (const auto& client : waiting) {
    EXPECT_THAT(client->answers(1), ::testing::StartsWith("HTTP/1.1 200"));
  }
}

TEST(HttpAttack, SlowConnectionsAreCounted) {
  std::vector<std::string> said;
  HttpRig rig({.request_timeout_ms = 1000,
               .idle_timeout_ms = 1000,
               .audit = [&said](const std::string& line) { said.push_back(line); }});
  RawClient header(rig.address());
  header.send("GET /v1/sta");
  RawClient body(rig.address());
  body.send(
      "POST /v1/jobs/j/leave HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
      "application/json\r\nContent-Length: 50\r\n\r\n{");
  RawClient nothing(rig.address());
  EXPECT_EQ(header.rest(), "");
  EXPECT_EQ(body.rest(), "");
  EXPECT_EQ(nothing.rest(), "");
  EXPECT_TRUE(rig.has_connections(0));
  EXPECT_EQ(metric(rig.address(), "phub_http_timeouts_total"), 3u);
  rig.on_control([&said] {
    EXPECT_THAT(said,
                ::testing::ElementsAre(::testing::HasSubstr("/v1/jobs/j/leave\" from=127.0.0.1:")));
    EXPECT_THAT(said.at(0), ::testing::HasSubstr("1 bytes did; if none ever comes"));
  });
}

}  // namespace http_attack_test
}  // namespace phub
