// A control port over TLS in the test's process, and clients of it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "phub/control/tls_front.h"
#include "tests/phub/http_rig.h"
#include "tests/phub/tls_certificates.h"
#include "transport/control/http_client.h"
#include "transport/error.h"
#include "transport/fd.h"

namespace phub::testing {

inline constexpr uint32_t kMs = 20'000;

// A port with a certificate for localhost and 127.0.0.1, and clients that trust its authority.
class Tls : public ::testing::Test {
 protected:
  Tls() {
    std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes to sockets as to files
    use(ca_.issue());
  }

  void use(const Certificate& certificate) {
    tls_.files.certificate = files_.write("cert.pem", certificate.pem);
    tls_.files.key = files_.write("key.pem", certificate.key);
  }
  void show(const Certificate& certificate) {
    client_cert_.emplace("PHUB_CLIENT_CERT", files_.write("client.pem", certificate.pem));
    client_key_.emplace("PHUB_CLIENT_KEY", files_.write("client.key", certificate.key));
  }
  void show_nothing() {
    client_key_.reset();
    client_cert_.reset();
  }
  void start(HttpOptions options = {}) {
    tls_.note = [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      notes_ += line + "\n";
    };
    front_ = std::make_unique<TlsFront>(tls_);
    options.tls = front_.get();
    rig_ = std::make_unique<HttpRig>(std::move(options));
  }
  std::string port() const {
    const std::string address = rig_->address();
    return address.substr(address.rfind(':') + 1);
  }
  std::string url(const std::string& host = "localhost") const {
    return "https://" + host + ":" + port();
  }
  std::string notes() {
    const std::lock_guard lock(mutex_);
    return notes_;
  }
  bool noted(const std::string& text) {
    for (int i = 0; i < 12000 && notes().find(text) == std::string::npos; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return notes().find(text) != std::string::npos;
  }
  // "ok", or the error.
  std::string ask(const std::string& server, uint32_t timeout_ms = kMs) {
    try {
      const HttpAnswer answer = HttpClient(server).request("GET", "/healthz", "", "", timeout_ms);
      return answer.status == 200 ? "ok" : answer.body;
    } catch (const Error& error) {
      return std::string(name_of(error.code())) + ": " + error.what();
    }
  }
  uint64_t handshakes() const { return front_->counters().handshakes; }
  bool eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 12000 && !condition(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return condition();
  }

  const Files files_;
  const Authority ca_{"the authority"}, other_{"another authority"};
  const Setting trusted_{"PHUB_CA", files_.write("ca.pem", ca_.pem())};
  std::optional<Setting> client_cert_, client_key_;
  TlsOptions tls_;
  std::mutex mutex_;
  std::string notes_;
  std::unique_ptr<TlsFront> front_;
  std::unique_ptr<HttpRig> rig_;
};

// The first bytes of a client's handshake, as OpenSSL makes them.
inline std::string hello() {
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  SSL* ssl = SSL_new(context);
  BIO* in = BIO_new(BIO_s_mem());
  BIO* out = BIO_new(BIO_s_mem());
  SSL_set_bio(ssl, in, out);
  SSL_set_connect_state(ssl);
  SSL_do_handshake(ssl);
  const char* text = nullptr;
  const long bytes = BIO_get_mem_data(out, &text);
  std::string made(text, static_cast<size_t>(bytes));
  SSL_free(ssl);
  SSL_CTX_free(context);
  return made;
}

// A client of OpenSSL's own, with an environment of its own.
struct RawTls {
  RawTls(const std::string& address, int version) {
    context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_security_level(context, 0);
    SSL_CTX_set_min_proto_version(context, version);
    SSL_CTX_set_max_proto_version(context, version);
    const HostPort to = parse_host_port(address);
    socket = Fd(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in peer{};
    peer.sin_family = AF_INET;
    peer.sin_port = htons(to.port);
    peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&peer), sizeof peer), 0);
    ssl = SSL_new(context);
    SSL_set_fd(ssl, socket.get());
    connected = SSL_connect(ssl) == 1;
  }
  ~RawTls() {
    SSL_free(ssl);
    SSL_CTX_free(context);
  }
  std::string get(const std::string& path) {
    const std::string text = "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n";
    char answer[4096];
    if (SSL_write(ssl, text.data(), static_cast<int>(text.size())) <= 0) return "no write";
    const int got = SSL_read(ssl, answer, sizeof answer);
    return got > 0 ? std::string(answer, static_cast<size_t>(got)) : "no answer";
  }
  SSL_CTX* context;
  SSL* ssl;
  Fd socket;
  bool connected = false;
};

// It accepts, and says nothing.
class Mute {
 public:
  Mute() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in here{};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof here;
    EXPECT_EQ(bind(socket_.get(), reinterpret_cast<sockaddr*>(&here), bytes), 0);
    EXPECT_EQ(listen(socket_.get(), 5), 0);
    getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&here), &bytes);
    url = "https://127.0.0.1:" + std::to_string(ntohs(here.sin_port));
  }
  int accept() const { return ::accept(socket_.get(), nullptr, nullptr); }
  std::string url;

 private:
  Fd socket_;
};

}  // namespace phub::testing
