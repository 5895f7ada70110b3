// Who accepts whom on the control port over TLS, and what both say when they do not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/phub/tls_rig.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub::testing {
namespace tls_test {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

JoinRequest request_with_keys(size_t keys) {
  JoinRequest request;
  request.spec.name = "large";
  for (size_t i = 0; i < keys; ++i) {
    request.spec.keys.push_back({.name = "layer." + std::to_string(i), .elements = 100});
  }
  return request;
}

TEST_F(Tls, AsksAndAnswersOverOneConnection) {
  start();
  HttpClient client(url());
  rig_->handler.topology = std::string(3 << 20, 'x');
  const auto status = [&] { return client.request("GET", "/v1/status", "", "", kMs).body; };
  EXPECT_THAT(status(), HasSubstr(rig_->handler.topology));
  const HttpAnswer joined =
      client.request("POST", "/v1/jobs/large/join", "", to_json(request_with_keys(20'000)), kMs);
  EXPECT_EQ(joined.status, 200u);
  EXPECT_EQ(from_json<JoinReply>(joined.body).spec.keys.at(19'999).name, "layer.19999");
  EXPECT_THAT(status(), HasSubstr(rig_->handler.topology));
  EXPECT_TRUE(rig_->has_connections(1));
  EXPECT_EQ(ask(url("127.0.0.1")), "ok");
  EXPECT_EQ(front_->counters().failed, 0u) << notes();
}

TEST_F(Tls, TheServerMustBeTrustedAndOfThatName) {
  start();
  EXPECT_THAT(ask(url("127.0.0.2")),  // the port is at 127.0.0.1 only
              HasSubstr("unavailable"));
  {
    const Setting ca("PHUB_CA", files_.write("other.pem", other_.pem()));
    EXPECT_THAT(ask(url()),
                AllOf(HasSubstr("unauthorized"), HasSubstr("not trusted"), HasSubstr("PHUB_CA")));
    EXPECT_TRUE(noted("unknown ca")) << notes();
  }
  {
    const Setting ca("PHUB_CA", "");  // the system's store
    EXPECT_THAT(ask(url()), AllOf(HasSubstr("unauthorized"), HasSubstr("not trusted")));
  }
  use(ca_.issue({.names = "DNS:box.example,DNS:*.cluster,IP:10.0.0.1"}));
  front_->reload();
  EXPECT_THAT(ask(url()), AllOf(HasSubstr("unauthorized"), HasSubstr("not for 'localhost'")));
  EXPECT_THAT(ask(url("127.0.0.1")),
              AllOf(HasSubstr("unauthorized"), HasSubstr("not for '127.0.0.1'")));
  use(Authority::self_signed());
  front_->reload();
  EXPECT_THAT(ask(url()), AllOf(HasSubstr("unauthorized"), HasSubstr("not trusted")));
  use(other_.issue());
  front_->reload();
  EXPECT_THAT(ask(url()), AllOf(HasSubstr("unauthorized"), HasSubstr("not trusted")));
  EXPECT_EQ(front_->counters().completed, 0u);
}

TEST_F(Tls, ACertificateThatExpiresIsNotAcceptedAnyMore) {
  start();
  std::string first;
  for (int seconds = 2; seconds <= 32 && first != "ok"; seconds *= 2) {  // some machines are slow
    use(ca_.issue({.until_s = seconds}));
    front_->reload();
    first = ask(url());
  }
  EXPECT_EQ(first, "ok");
  std::string last;
  EXPECT_TRUE(eventually([&] { return (last = ask(url())) != "ok"; }));
  EXPECT_THAT(last, AllOf(HasSubstr("unauthorized"), HasSubstr("has expired")));
}

// A connection on which TLS did not begin is not used for the next request.
TEST_F(Tls, NothingGoesOutInPlainTextWhereTlsCannotBegin) {
  start();
  const Setting mine("PHUB_CA", files_.write("mine.pem", ca_.pem()));
  HttpClient client(url());
  files_.write("mine.pem", "nothing");
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(client.request("GET", "/healthz", "secret", "", kMs), Error);
  }
  EXPECT_EQ(ask("localhost:" + port()).substr(0, 2), "{\"");  // what plain text is answered with
  EXPECT_TRUE(noted("does not speak TLS"));
  const std::string all = notes();
  EXPECT_EQ(all.find("does not speak TLS"), all.rfind("does not speak TLS")) << all;
}

TEST_F(Tls, ClientsNeedACertificateWhereTheServerAsksForOne) {
  tls_.files.client_authorities = files_.write("clients.pem", other_.pem());
  start();
  EXPECT_THAT(ask(url()), AllOf(HasSubstr("unauthorized"), HasSubstr("PHUB_CLIENT_CERT")));
  EXPECT_TRUE(noted("peer did not return a certificate")) << notes();
  show(other_.issue());
  EXPECT_EQ(ask(url()), "ok");
  show(ca_.issue());  // of the server's authority, which is not that of clients
  EXPECT_THAT(ask(url()), AllOf(HasSubstr("unauthorized"), HasSubstr("does not trust")));
  EXPECT_TRUE(noted("unable to get local issuer certificate")) << notes();
  show(Authority::self_signed());
  EXPECT_THAT(ask(url()), AllOf(HasSubstr("unauthorized"), HasSubstr("does not trust")));
  show(other_.issue({.until_s = -10}));
  EXPECT_THAT(ask(url()), AllOf(HasSubstr("invalid"), HasSubstr("expired")));  // told here
  show_nothing();
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    RawTls raw(rig_->address(), version);
    EXPECT_THAT(raw.connected ? raw.get("/healthz") : "not connected",
                AnyOf("not connected", "no answer", "no write"));
  }
  EXPECT_EQ(front_->counters().completed, 1u);
}

TEST_F(Tls, SpeaksNoOldTls) {
  start();
  for (const auto& [version, good] : {std::pair(TLS1_VERSION, false),
                                      {TLS1_1_VERSION, false},
                                      {TLS1_2_VERSION, true},
                                      {TLS1_3_VERSION, true}}) {
    RawTls raw(rig_->address(), version);
    EXPECT_EQ(raw.connected, good) << version;
    if (good) {
      EXPECT_THAT(raw.get("/healthz"), HasSubstr("HTTP/1.1 200"));
    }
  }
}

TEST_F(Tls, WrongFilesAreNamedAndChangeNothing) {
  start();
  const Certificate good = ca_.issue(), another = ca_.issue();
  const std::string cert = tls_.files.certificate, key = tls_.files.key;
  const auto refused = [&](const Certificate& files, mode_t mode = 0600) {
    files_.write("cert.pem", files.pem);
    files_.write("key.pem", files.key, mode);
    try {
      front_->reload();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refused({good.pem, another.key}),
              AllOf(HasSubstr("--tls-key " + key), HasSubstr("not the key of")));
  EXPECT_THAT(refused(good, 0644), AllOf(HasSubstr("--tls-key"), HasSubstr("chmod 600")));
  EXPECT_THAT(refused(good, 0660), HasSubstr("chmod 600"));
  EXPECT_THAT(refused({"", good.key}),
              AllOf(HasSubstr("--tls-cert " + cert), HasSubstr("no certificate in PEM")));
  EXPECT_THAT(refused({good.pem.substr(0, good.pem.size() / 2), good.key}), HasSubstr("damaged"));
  EXPECT_THAT(refused({good.pem, "secret"}), HasSubstr("no private key"));
  EXPECT_THAT(refused(ca_.issue({.until_s = -10})), HasSubstr("expired on"));
  EXPECT_THAT(refused(ca_.issue({.from_s = 1000})), HasSubstr("valid from"));
  EXPECT_THAT(refused({std::string(5 << 20, '\n'), good.key}), HasSubstr("larger than"));
  unlink(cert.c_str());
  EXPECT_THROW(front_->reload(), Error);
  EXPECT_EQ(ask(url()), "ok");  // with what was there before
  EXPECT_EQ(refused(good, 0640), "accepted");
  EXPECT_EQ(ask(url()), "ok");
}

TEST_F(Tls, ReadAgainTheFilesHoldForNewConnections) {
  start();
  HttpClient kept(url());
  EXPECT_EQ(kept.request("GET", "/healthz", "", "", kMs).status, 200u);
  use(other_.issue());
  front_->reload();
  EXPECT_EQ(kept.request("GET", "/healthz", "", "", kMs).status, 200u);
  EXPECT_THAT(ask(url()), HasSubstr("not trusted"));
  const Setting ca("PHUB_CA", files_.write("other.pem", other_.pem()));
  EXPECT_EQ(ask(url()), "ok");
}

TEST_F(Tls, ATlsClientIsToldThatAPortIsPlain) {
  HttpRig plain;
  EXPECT_THAT(ask("https://" + plain.address()),
              AllOf(HasSubstr("unavailable"), HasSubstr("does not speak TLS")));
}

TEST_F(Tls, ATlsClientIsToldThatAServerIsTooOld) {
  const Certificate mine = ca_.issue();
  SSL_CTX* context = SSL_CTX_new(TLS_server_method());
  SSL_CTX_set_security_level(context, 0);
  SSL_CTX_set_max_proto_version(context, TLS1_1_VERSION);
  const std::string cert = files_.write("old.pem", mine.pem),
                    key = files_.write("old.key", mine.key);
  ASSERT_EQ(SSL_CTX_use_certificate_file(context, cert.c_str(), SSL_FILETYPE_PEM), 1);
  ASSERT_EQ(SSL_CTX_use_PrivateKey_file(context, key.c_str(), SSL_FILETYPE_PEM), 1);
  const Mute port;
  std::thread server([&] {
    const Fd client(port.accept());
    SSL* ssl = SSL_new(context);
    SSL_set_fd(ssl, client.get());
    EXPECT_NE(SSL_accept(ssl), 1);
    SSL_free(ssl);
  });
  EXPECT_THAT(ask(port.url), AllOf(HasSubstr("unavailable"), HasSubstr("1.2 or 1.3")));
  server.join();
  SSL_CTX_free(context);
}

// Another thread may be changing it when a connection is made.
TEST_F(Tls, TheEnvironmentIsReadOnce) {
  start();
  HttpClient client(url());
  const Setting ca("PHUB_CA", files_.path("absent.pem"));
  EXPECT_EQ(client.request("GET", "/healthz", "", "", kMs).status, 200u);
}

TEST_F(Tls, WrongFilesOfAClientAreNamed) {
  start();
  {
    const Setting ca("PHUB_CA", files_.path("absent.pem"));
    EXPECT_THAT(ask(url()), AllOf(HasSubstr("invalid"), HasSubstr("PHUB_CA "),
                                  HasSubstr("absent.pem"), HasSubstr("No such file")));
  }
  const Setting cert("PHUB_CLIENT_CERT", files_.path("cert.pem"));
  EXPECT_THAT(ask(url()), HasSubstr("PHUB_CLIENT_KEY"));
  EXPECT_EQ(ask("http://" + rig_->address()).find("PHUB_CLIENT_KEY"), std::string::npos);
}

}  // namespace tls_test
}  // namespace phub::testing
