// What a browser can be made to send to the control port, and what its header must have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "phub/control/request_head.h"
#include "tests/phub/http_rig.h"
#include "tests/transport/shm_rig.h"
#include "transport/control/control_client.h"

namespace phub {
namespace http_head_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::string_view kJoin =
    R"({"version":1,"spec":{"name":"j","keys":[{"name":"w","elements":1}]}})";

unsigned status_of(const RequestHead& head, const std::vector<std::string>& listen = {}) {
  const auto refused = refuse_head(head, HostNames(listen));
  return refused ? refused->status : 200;
}

TEST(RequestHead, OverLoopbackTheHostIsThisMachine) {
  std::string own(256, '\0');
  gethostname(own.data(), own.size() - 1);
  own.resize(own.find('\0'));
  for (const std::string& host : std::vector<std::string>{
           "localhost", "localhost:7717", "LocalHost:1", "localhost.:7717", "127.0.0.1",
           "127.0.0.1:7717", "127.200.3.4:80", "[::1]", "[::1]:7717", "box.example:7717",
           "BOX.example", own, own + ":7717"}) {
    EXPECT_EQ(status_of({.host = host, .hosts = 1, .over_loopback = true}, {"box.example:0"}), 200u)
        << host;
  }
  for (const char* host :
       {"evil", "evil:7717", "evil.localhost.example", "localhost.evil", "127.0.0.1.evil:7717",
        "127.evil", "1127.0.0.1", "128.0.0.1", "10.0.0.1:7717", "0.0.0.0:7717", "[::2]:7717",
        "[::ffff:10.0.0.1]", "[::1", "", ":7717", "2130706433", "0x7f.1", "box.example.evil"}) {
    EXPECT_EQ(status_of({.host = host, .hosts = 1, .over_loopback = true}, {"box.example:0"}), 421u)
        << host;
  }
  // From other hosts the box has names that it does not know.
  EXPECT_EQ(status_of({.host = "box.rack7.example:7717", .hosts = 1}), 200u);
}

// As Debian names a host. Other lines say nothing of this one.
TEST(RequestHead, OverLoopbackTheHostMayHaveItsDomain) {
  std::string own(256, '\0');
  gethostname(own.data(), own.size() - 1);
  own.resize(own.find('\0'));
  const TemporaryDirectory folder;
  const std::string file = folder.path() + "/hosts";
  std::ofstream(file) << "127.0.0.1 localhost\n"
                      << "127.0.1.1\t" << own << ".Rack7.example  " << own << " # other.example\n"
                      << "::1 six.example " << own << "\n"
                      << "#127.0.0.1 " << own << " comment.example\n"
                      << "10.0.0.1 " << own << " network.example\n"
                      << "127.0.0.1 elsewhere.example\n"
                      << own << " no-address.example\n";
  const HostNames names({}, file);
  for (const std::string& name : {own, own + ".rack7.example", own + ".rack7.example:7717",
                                  own + ".RACK7.example.", std::string("six.example")}) {
    EXPECT_TRUE(names.has(name)) << name;
  }
  for (const char* name : {"other.example", "comment.example", "network.example",
                           "elsewhere.example", "no-address.example", "rack7.example"}) {
    EXPECT_FALSE(names.has(name)) << name;
  }
  EXPECT_TRUE(HostNames({}, folder.path() + "/absent").has(own));
}

TEST(RequestHead, ThereIsOneHost) {
  EXPECT_EQ(status_of({}), 400u);
  EXPECT_EQ(status_of({.host = "localhost", .hosts = 2}), 400u);
  EXPECT_EQ(status_of({.hosts = 0, .http_1_0 = true, .over_loopback = true}), 200u);
}

TEST(RequestHead, AnOriginIsThePortsOwn) {
  const auto with = [](std::string_view origin, bool loopback, bool reads = true) {
    return status_of({.host = "localhost:7717",
                      .origin = origin,
                      .hosts = 1,
                      .reads = reads,
                      .over_loopback = loopback});
  };
  for (const bool loopback : {false, true}) {
    EXPECT_EQ(with("http://localhost:7717", loopback, false), 403u) << "our page changes nothing";
    EXPECT_EQ(with("http://localhost:7717", loopback), 200u);
    EXPECT_EQ(with("https://LOCALHOST:7717", loopback), 200u);
    for (const char* origin :
         {"null", "http://evil", "http://localhost", "http://localhost:7718", "localhost:7717",
          "http://localhost:7717.evil", "http://localhost:77170", "file://", "http://",
          "ftp://localhost:7717", "http://127.0.0.1:7717"}) {
      EXPECT_EQ(with(origin, loopback), 403u) << origin;
    }
  }
}

TEST(RequestHead, ABodyIsJson) {
  const auto with = [](std::string_view type, bool body) {
    return status_of({.host = "h", .content_type = type, .hosts = 1, .has_body = body});
  };
  for (const char* type : {"application/json", "Application/JSON",
                           "application/json; charset=utf-8", "application/json ;x=y"}) {
    EXPECT_EQ(with(type, true), 200u) << type;
  }
  for (const char* type : {"", "text/plain", "application/x-www-form-urlencoded",
                           "multipart/form-data; boundary=application/json", "application/jsonx",
                           "text/plain; application/json"}) {
    EXPECT_EQ(with(type, true), 415u) << type;
    EXPECT_EQ(with(type, false), 200u) << type;
  }
  // But for a rank's part of a checkpoint, which is never JSON.
  const auto of_bytes = [](std::string_view type) {
    return status_of(
        {.host = "h", .content_type = type, .hosts = 1, .has_body = true, .of_bytes = true});
  };
  EXPECT_EQ(of_bytes("application/octet-stream"), 200u);
  for (const char* type : {"", "text/plain", "application/json", "application/octet-streams"}) {
    EXPECT_EQ(of_bytes(type), 415u) << type;
  }
  EXPECT_EQ(with("application/octet-stream", true), 415u);
}

std::string post(std::string_view headers) {
  return fmt::format("POST /v1/jobs/j/join HTTP/1.1\r\nContent-Length: {}\r\n{}\r\n{}",
                     kJoin.size(), headers, kJoin);
}

// Over real sockets, before the body is read: the handler sees nothing.
TEST(HttpHead, APageOfAnotherSiteReachesNothing) {
  HttpRig rig;
  const std::string json = "Content-Type: application/json\r\n";
  const std::vector<std::tuple<std::string, std::string, std::string>> cases = {
      // A form, or fetch() without asking: the body of a join as text.
      {post("Host: localhost\r\nContent-Type: text/plain\r\nOrigin: http://evil\r\n"), "403",
       "pages of 'http://evil' may not use this server"},
      {post("Host: localhost\r\nContent-Type: text/plain\r\n"), "415", "not 'text/plain'"},
      {post("Host: localhost\r\n"), "415", "application/json"},
      {post("Host: localhost\r\nOrigin: null\r\n" + json), "403", "'null'"},
      // A name of the page's own that means 127.0.0.1.
      {post("Host: evil:7717\r\nOrigin: http://evil:7717\r\n" + json), "421",
       "'evil:7717' is not a name of this server"},
      {"GET /v1/status HTTP/1.1\r\nHost: evil\r\n\r\n", "421", "Misdirected Request"},
      {"DELETE /v1/jobs/j HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil\r\n\r\n", "403",
       "Forbidden"},
      {"GET / HTTP/1.1\r\nHost: evil\r\n\r\n", "421", "evil"},
      {"GET / HTTP/1.1\r\n\r\n", "400", "has 0"},
      {"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", "400", "has 2"},
      // What a browser asks before it sends more; without an answer that permits it, it does not.
      {"OPTIONS /v1/jobs/j/join HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil\r\n"
       "Access-Control-Request-Method: POST\r\n\r\n",
       "403", "evil"},
      // Names do not bring control characters with them.
      {"GET / HTTP/1.1\r\nHost: a\xc2\x9b"
       "31m\r\n\r\n",
       "421", "a\\\\u009b31m"},
  };
  for (const auto& [request, status, expected] : cases) {
    RawClient client(rig.address());
    client.send(request);
    const std::string answer = client.answers(1);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 " + status)) << request;
    EXPECT_THAT(answer, HasSubstr(expected)) << request;
    EXPECT_THAT(answer, HasSubstr("Content-Type: application/problem+json\r\n"));
    EXPECT_THAT(answer, ::testing::Not(HasSubstr("Access-Control"))) << request;
  }
  EXPECT_THAT(rig.on_control([&] { return rig.handler.calls; }), ElementsAre());
  EXPECT_EQ(rig.on_control([&] { return rig.handler.status_calls; }), 0);

  // Our own page reads, and changes nothing.
  const std::string from_own =
      "Host: " + rig.address() + "\r\nOrigin: http://" + rig.address() + "\r\n";
  RawClient reads(rig.address());
  reads.send("GET /v1/status HTTP/1.1\r\n" + from_own + "\r\n");
  EXPECT_THAT(reads.answers(1), StartsWith("HTTP/1.1 200"));
  RawClient changes(rig.address());
  changes.send(post(from_own + json));
  EXPECT_THAT(changes.answers(1), StartsWith("HTTP/1.1 403"));
}

}  // namespace http_head_test
}  // namespace phub
