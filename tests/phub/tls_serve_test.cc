// phub serve with TLS, as an operator runs it: its files, SIGHUP, whom it lets in, and a whole
// training over it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tests/phub/tls_certificates.h"
#include "tests/worker/process.h"
#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"

namespace phub::testing {
namespace tls_serve_test {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

class TlsServe : public ::testing::Test {
 protected:
  TlsServe() { use(ca_.issue()); }

  void use(const Certificate& certificate) {
    cert_ = files_.write("cert.pem", certificate.pem);
    key_ = files_.write("key.pem", certificate.key);
  }
  Words flags(const Words& more = {}) const {
    Words words = {"--tls-cert", cert_, "--tls-key", key_};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  // What `phub WORDS` prints until it ends, and its status.
  std::string run(const Words& words, int expected = 1) {
    Words command = {PHUB_BINARY};
    command.insert(command.end(), words.begin(), words.end());
    Process process(command, files_.path("output"));
    EXPECT_EQ(process.wait(seconds(30)), expected) << process.output();
    return process.output();
  }
  std::string serve(const Words& flags) {
    Words words = {"serve", "--listen", "127.0.0.1:0"};
    words.insert(words.end(), flags.begin(), flags.end());
    return run(words);
  }
  std::string status(const std::string& server, int expected = 0) {
    return run({"status", "--server", server}, expected);
  }

  struct Secret {
    std::string token, file;  // and the server's file that has its hash
  };
  Secret secret(const std::string& name) {
    const std::string made = run({"token", "new", "--name", name, "--role", "train"}, 0);
    const size_t begin = made.find("phub-");
    return {made.substr(begin, made.find('\n', begin) - begin),
            files_.write(name + ".toml", made.substr(made.find("[[token]]")))};
  }

  const Files files_;
  const Authority ca_{"the authority"}, other_{"another authority"};
  const Setting trusted_{"PHUB_CA", files_.write("ca.pem", ca_.pem())};
  std::string cert_, key_;
};

TEST_F(TlsServe, WrongFilesEndItAtOnce) {
  EXPECT_THAT(serve({"--tls-cert", cert_}), HasSubstr("--tls-key go together"));
  EXPECT_THAT(serve({"--tls-key", key_}), HasSubstr("--tls-key go together"));
  EXPECT_THAT(serve({"--tls-client-ca", cert_}), HasSubstr("needs --tls-cert"));
  EXPECT_THAT(serve({"--tls-data"}), HasSubstr("--tls-data needs --tls-cert"));
  EXPECT_THAT(serve({"--tls-cert", files_.path("absent"), "--tls-key", key_}),
              AllOf(HasSubstr("--tls-cert"), HasSubstr("absent: No such file")));
  EXPECT_THAT(serve({"--tls-cert", files_.path(""), "--tls-key", key_}),
              HasSubstr("is not a file"));
  EXPECT_THAT(serve(flags({"--tls-client-ca", key_})), HasSubstr("--tls-client-ca"));
  use(ca_.issue({.until_s = -10}));
  EXPECT_THAT(serve(flags()), HasSubstr("expired on"));
  use({ca_.issue().pem, ca_.issue().key});
  EXPECT_THAT(serve(flags()), HasSubstr("is not the key of the certificate"));
}

TEST_F(TlsServe, OtherHostsNeedTlsAndTokens) {
  const std::string tokens = files_.write("tokens.toml", "");
  const auto refused = [&](const Words& words) {
    Words all = {"serve", "--listen", "0.0.0.0:0"};
    all.insert(all.end(), words.begin(), words.end());
    return run(all);
  };
  EXPECT_THAT(refused({}),
              AllOf(HasSubstr("--tls-cert"), HasSubstr("--tokens"), HasSubstr("--insecure")));
  EXPECT_THAT(refused(flags()), AllOf(HasSubstr("--tokens"), HasSubstr("--insecure")));
  EXPECT_THAT(refused({"--tokens", tokens}),
              AllOf(HasSubstr("--tls-cert"), HasSubstr("--insecure")));
  ServerProcess server(PHUB_BINARY, flags({"--tokens", tokens, "--listen", "0.0.0.0:0"}));
  EXPECT_THAT(server.output(), HasSubstr("listening on https://0.0.0.0:"));
}

TEST_F(TlsServe, SighupReadsTheFilesAgain) {
  ServerProcess server(PHUB_BINARY, flags({"--tls-data"}));
  EXPECT_THAT(server.address(), HasSubstr("https://127.0.0.1:"));
  EXPECT_THAT(status(server.address()), HasSubstr("no jobs"));
  use(other_.issue());
  kill(server.pid(), SIGHUP);
  EXPECT_TRUE(
      becomes([&] { return server.output().find("were read again") != std::string::npos; }));
  EXPECT_THAT(server.output(), HasSubstr("for data were read again"));
  EXPECT_THAT(status(server.address(), 1), HasSubstr("not trusted"));
  const Setting ca("PHUB_CA", files_.write("other.pem", other_.pem()));
  EXPECT_THAT(status(server.address()), HasSubstr("no jobs"));
  files_.write("key.pem", ca_.issue().key);
  kill(server.pid(), SIGHUP);
  EXPECT_TRUE(
      becomes([&] { return server.output().find("stay as they were") != std::string::npos; }));
  EXPECT_THAT(server.output(), HasSubstr("is not the key of the certificate"));
  EXPECT_THAT(status(server.address()), HasSubstr("no jobs"));
}

// A rank is killed, and its place is taken again; what all saw is what the log says. Over tcp each
// rank has a window of one place at a core.
TEST_F(TlsServe, ATrainingOverItEndsWell) {
  ServerProcess server(PHUB_BINARY, flags({"--tls-data", "--slot-window", "1", "--tls-client-ca",
                                           files_.write("clients.pem", other_.pem())}));
  EXPECT_THAT(server.output(), HasSubstr("; with TLS;"));
  const Certificate mine = other_.issue();
  const Setting cert("PHUB_CLIENT_CERT", files_.write("mine.pem", mine.pem));
  const Setting key("PHUB_CLIENT_KEY", files_.write("mine.key", mine.key));
  for (const char* transport : {"tcp", "auto"}) {
    SCOPED_TRACE(transport);
    Training training(server.address(), fault_spec(std::string("tls-") + transport, 3, "adam"));
    const Flags over = {"--transport", transport};
    Process &zero = training.start(0, over), &one = training.start(1, over);
    Process& victim = training.start(2, {"--transport", transport, "--die-in", "20"});
    EXPECT_EQ(victim.wait(kLong), -SIGKILL) << victim.output();
    Process& next = training.start(2, {"--transport", transport, "--patient"});
    EXPECT_TRUE(becomes([&] { return training.rank(2).incarnation > 1; }));
    EXPECT_TRUE(training.goes_on(50));
    const bool over_tcp = std::string(transport) == "tcp";
    EXPECT_EQ(training.status().transport, over_tcp ? "tcp" : "shm");
    EXPECT_EQ(training.status().window_bytes > 0, over_tcp);
    for (Process* worker : {&zero, &one, &next}) worker->send(SIGTERM);
    for (Process* worker : {&zero, &one, &next}) EXPECT_TRUE(left(*worker)) << worker->output();
    training.check();
  }
}

TEST_F(TlsServe, ATrainingOverItAtTwoBoxesEndsWell) {
  const Words secret = flags({"--tls-data", "--transports", "tcp"});
  ServerProcess server(PHUB_BINARY, secret);
  ServerProcess shard(PHUB_BINARY,
                      flags({"--tls-data", "--transports", "tcp", "--join", server.address()}));
  ASSERT_TRUE(becomes([&] { return ControlClient(server.address()).status().shards.size() == 1; }))
      << shard.output();
  EXPECT_THAT(shard.output(), HasSubstr("; with TLS;"));
  Training training(server.address(), fault_spec("two-boxes", 3, "adam"));
  for (uint32_t rank = 0; rank < 3; ++rank) training.start(rank, {"--transport", "tcp"});
  ASSERT_TRUE(training.goes_on(10));
  const JobStatus job = ControlClient(server.address()).status().jobs.at(0);
  EXPECT_TRUE(std::ranges::any_of(job.cores, [](const auto& core) { return core.box == 1; }));
  training.end();
  training.check();
}

// Every level asks for a token of its own, and everything goes over TLS: the workers' gradients,
// and their sum.
TEST_F(TlsServe, ATrainingOverItBelowAParentEndsWell) {
  const Secret at_root = secret("root"), at_rack = secret("rack");
  ServerProcess root(PHUB_BINARY, flags({"--tls-data", "--tokens", at_root.file}));
  const Words as_rack = flags({"--tls-data", "--tokens", at_rack.file, "--parent", root.address()});
  const Words with_root = {"/usr/bin/env", "PHUB_TOKEN=" + at_root.token};
  const Words with_rack = {"/usr/bin/env", "PHUB_TOKEN=" + at_rack.token};
  ServerProcess rack(PHUB_BINARY, as_rack, "127.0.0.1:0", "pack:1 core:2 pu:1", with_root);
  ServerProcess other(PHUB_BINARY, as_rack, "127.0.0.1:0", "pack:1 core:2 pu:1", with_rack);
  JobSpec spec = fault_spec("below", 2, "adam");
  spec.groups = "2";
  Training training(root.address(), spec);
  Process& refused = training.start_at(other.address(), 0, {"--transport", "tcp"}, with_rack);
  ASSERT_TRUE(refused.wait(kLong).has_value());
  EXPECT_THAT(refused.output(), HasSubstr("the parent at " + root.address()));
  EXPECT_THAT(refused.output(), HasSubstr("unauthorized: "));

  Training below(rack.address(), spec);
  Process& worker = below.start(0, {"--transport", "tcp"}, with_rack);
  below.start(1, {"--transport", "tcp"}, with_rack);
  const auto round = [&] {
    return ControlClient(rack.address(), at_rack.token).job_status("below").completed_round;
  };
  ASSERT_TRUE(becomes([&] {
    try {
      return round() > 10;
    } catch (const Error&) {
      return false;
    }
  })) << worker.output();
  const JobStatus above = ControlClient(root.address(), at_root.token).job_status("below");
  EXPECT_EQ(above.ranks.size(), 1u);
  EXPECT_EQ(above.transport, "tcp");
  below.end();
  below.check(ControlClient(rack.address(), at_rack.token).log("below"));
}

// In a network of its own, where what goes to 10.9.0.1 comes from another address, as from another
// host.
TEST_F(TlsServe, ATokenCrossesNoNetworkInPlainText) {
  const std::string script = files_.write("script", R"(
    ip link set lo up && ip addr add 10.9.0.1/32 dev lo && ip addr add 10.9.0.2/32 dev lo &&
      ip route replace local 10.9.0.1 dev lo src 10.9.0.2 table local || exit 77
    "$1" serve --listen 10.9.0.1:7921 --listen 127.0.0.1:7921 --insecure > "$2" 2>&1 & server=$!
    until grep -q 127.0.0.1:7921 "$2"; do kill -0 $server || exit 1; sleep 0.05; done
    ask() { echo "$1:"; shift; env "$@" 2>&1; }
    ask network PHUB_TOKEN=secret "$1" status --server 10.9.0.1:7921
    ask trusted PHUB_TOKEN=secret PHUB_INSECURE=true "$1" status --server 10.9.0.1:7921
    ask nothing "$1" status --server 10.9.0.1:7921
    ask loopback PHUB_TOKEN=secret "$1" status --server 127.0.0.1:7921
    kill $server)");
  Process process(
      {"/usr/bin/env", "unshare", "-rn", "bash", script, PHUB_BINARY, files_.path("serve")},
      files_.path("output"));
  const std::optional<int> status = process.wait(kLong);
  const std::string said = process.output();
  if (status == 77 || said.starts_with("unshare:")) {
    GTEST_SKIP() << "no network of its own here: " << said;
  }
  ASSERT_EQ(status, 0) << said;
  const size_t network = said.find("network:"), trusted = said.find("trusted:"),
               nothing = said.find("nothing:"), loopback = said.find("loopback:");
  EXPECT_THAT(said.substr(network, trusted - network),
              AllOf(HasSubstr("would cross the network in plain text"), HasSubstr("https://")));
  EXPECT_THAT(said.substr(trusted, nothing - trusted), HasSubstr("no jobs"));
  EXPECT_THAT(said.substr(nothing, loopback - nothing), HasSubstr("no jobs"));
  EXPECT_THAT(said.substr(loopback), HasSubstr("no jobs"));
}

// Without what the server asks for nobody gets in, and is told why.
TEST_F(TlsServe, AWorkerWithoutCertificateIsToldWhy) {
  ServerProcess server(PHUB_BINARY,
                       flags({"--tls-client-ca", files_.write("clients.pem", other_.pem())}));
  Training training(server.address(), fault_spec("refused", 1, "none"));
  Process& worker = training.start(0);
  EXPECT_EQ(worker.wait(kLong), 3) << worker.output();
  EXPECT_THAT(worker.output(), AllOf(HasSubstr("unauthorized"), HasSubstr("PHUB_CLIENT_CERT")));
}

}  // namespace tls_serve_test
}  // namespace phub::testing
