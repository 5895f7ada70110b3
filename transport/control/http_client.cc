#include "transport/control/http_client.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <sstream>
#include <vector>

#include "transport/control/name_lookup.h"
#include "transport/control/server_address.h"
#include "transport/error.h"
#include "transport/fd.h"
#include "transport/text.h"
#include "transport/tls/client.h"

namespace phub {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using Clock = std::chrono::steady_clock;
using boost::system::error_code;

constexpr auto kConnectLimit = std::chrono::seconds(10);
// For one address while others are left: enough for a packet that is sent twice.
constexpr auto kAddressLimit = std::chrono::milliseconds(1500);
constexpr uint64_t kMaxAnswerBytes = uint64_t{256} << 20;
constexpr size_t kReadBytes = 64u << 10;
constexpr auto kSlice = std::chrono::milliseconds(20);  // how often a wait looks for cancel()

// The other end is gone when it has acknowledged nothing for so long: a barrier may have nothing to
// say for hours.
constexpr int kKeepIdleSeconds = 10;
constexpr int kKeepIntervalSeconds = 5;
constexpr int kKeepProbes = 4;

void keep_alive(int socket) {
  const auto set = [&](int level, int option, int value) {
    setsockopt(socket, level, option, &value, sizeof value);  // hints
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepProbes);
}

bool is_shortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

}  // namespace

struct HttpClient::Impl {
  Impl(const std::string& text, std::string secret, ClientTls tls_options)
      : server(text),
        address(parse_server_address(text)),
        token(std::move(secret)),
        trusted(std::move(tls_options)) {
    if (address.tls) make_client_context(trusted);  // throws now for what is wrong with it
  }

  const std::string server;
  const ServerAddress address;
  const std::string token;
  const ClientTls trusted;
  std::atomic<bool> cancelled = false;
  std::optional<asio::io_context> context;  // while there is a stream
  std::optional<tcp::socket> stream;
  std::optional<asio::ssl::context> trust;
  std::optional<asio::ssl::stream<tcp::socket&>> tls;
  bool crosses_network = false;  // without TLS
  std::string reached;           // by the latest connection
  TlsContext context_of_tls;     // the latest
  ClosedOnFork not_in_children;  // the stream's socket
  beast::flat_buffer buffer;

  [[noreturn]] void unavailable(std::string_view why) const {
    fail(ErrorCode::kUnavailable,
         "no phub server at {}: {}; start one with 'phub serve' or set PHUB_SERVER", server, why);
  }
  [[noreturn]] void timed_out(std::string_view doing) const {
    fail(ErrorCode::kTimeout, "timeout while {} the phub server at {}", doing, server);
  }
  void check_cancelled() const {
    if (cancelled) fail(ErrorCode::kUnavailable, "the request to {} was cancelled", server);
  }

  // Runs what was started until `done`. On a timeout, cancel() or an exception the connection is
  // closed and what is left of the operation ends with it.
  void run(const bool& done, Clock::time_point deadline, std::string_view doing) {
    wait(done, deadline);
    end_wait(done, doing);
  }
  void wait(const bool& done, Clock::time_point deadline) {
    try {
      context->restart();
      for (auto now = Clock::now(); !done && now < deadline && !cancelled; now = Clock::now()) {
        context->run_one_until(std::min(deadline, now + kSlice));
      }
    } catch (...) {
      drop();
      throw;
    }
  }
  void end_wait(const bool& done, std::string_view doing) {
    if (done) return;
    drop();
    check_cancelled();
    timed_out(doing);
  }

  // Closes the connection. Pending operations go with it and refer to nothing any more.
  void drop() {
    not_in_children = {};
    tls.reset();
    trust.reset();
    stream.reset();
    context.reset();
    buffer.clear();
  }

  std::vector<tcp::endpoint> resolve(Clock::time_point deadline) {
    auto future = look_up(address.host);
    while (future.wait_for(kSlice) != std::future_status::ready) {
      check_cancelled();
      if (Clock::now() >= deadline) timed_out("looking up the name of");
    }
    const FoundAddresses found = future.get();
    if (found.error != 0) unavailable(gai_strerror(found.error));
    if (found.addresses.empty()) unavailable("the name has no address");
    std::vector<tcp::endpoint> endpoints;
    for (const sockaddr_storage& from : found.addresses) {
      tcp::endpoint& endpoint = endpoints.emplace_back();
      std::memcpy(endpoint.data(), &from, endpoint.capacity());
      endpoint.resize(from.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      endpoint.port(address.port);
    }
    return endpoints;
  }

  [[noreturn]] void fail_to_connect(const error_code& error) {
    drop();
    const int number = error.value();
    if (is_shortage(number)) {
      fail_system(fmt::format("connecting to the phub server at {}", server), number);
    }
    unavailable(error.message());
  }

  void connect(Clock::time_point deadline) {
    deadline = std::min(deadline, Clock::now() + kConnectLimit);
    error_code error;
    // One address at a time: Asio, given all of them, closes and opens the socket for each, and
    // says "Operation canceled" where another thread has taken the last descriptor meanwhile.
    const std::vector<tcp::endpoint> endpoints = resolve(deadline);
    auto left = static_cast<int>(endpoints.size());
    for (const tcp::endpoint& endpoint : endpoints) {
      --left;  // to be tried after this one
      drop();
      context.emplace();
      stream.emplace(*context);
      stream->open(endpoint.protocol(), error);
      if (!error) {
        bool done = false;
        stream->async_connect(endpoint, [&](const error_code& ec) {
          error = ec;
          done = true;
        });
        wait(done, left == 0 ? deadline : std::min(deadline, Clock::now() + kAddressLimit));
        if (!done && left > 0 && !cancelled && Clock::now() < deadline) continue;
        end_wait(done, "connecting to");
      }
      if (!error || is_shortage(error.value())) break;
    }
    if (error) fail_to_connect(error);
    not_in_children = ClosedOnFork(stream->native_handle());
    keep_alive(stream->native_handle());
    error_code gone;
    const auto there = stream->remote_endpoint(gone).address();
    if (!gone) reached = there.to_string();
    if (address.tls) {
      try {
        return begin_tls(deadline);
      } catch (...) {
        drop();  // else the next request would go over it as it is
        throw;
      }
    }
    const auto here = stream->local_endpoint(gone).address();
    crosses_network = gone || !(there.is_loopback() || there == here);
  }

  // Files are read for each connection: new ones take no restart. Those that are wrong do not
  // replace the ones before: somebody may just be changing them.
  void begin_tls(Clock::time_point deadline) {
    try {
      context_of_tls = make_client_context(trusted);
    } catch (const Error&) {
      if (!context_of_tls) throw;
    }
    const TlsContext& context = context_of_tls;
    SSL_CTX_up_ref(context.get());
    trust.emplace(context.get());
    tls.emplace(*stream, *trust);
    expect_server(tls->native_handle(), name());
    bool done = false;
    error_code error;
    tls->async_handshake(asio::ssl::stream_base::client, [&](const error_code& ec) {
      error = ec;
      done = true;
    });
    run(done, deadline, "agreeing on TLS with");
    if (!error) return;
    check_tls(error);
    drop();
    fail(ErrorCode::kUnavailable, "no TLS with the phub server at {}: {}", server, error.message());
  }

  TlsServer name() const { return {address.host, address.authority}; }

  // Throws if it is an error of TLS.
  void check_tls(const error_code& error) {
    if (!tls || error.category() != asio::error::get_ssl_category()) return;
    const Error why = tls_error(tls->native_handle(), name(),
                                static_cast<unsigned long>(static_cast<unsigned>(error.value())));
    drop();
    throw Error(why);
  }

  void check_secret(std::string_view bearer) const {
    if (!crosses_network || bearer.empty() || bearer != token || trusted.network_is_trusted) return;
    fail(ErrorCode::kUnauthorized,
         "the token would cross the network in plain text: ask the server as https://{}, or set "
         "PHUB_INSECURE=true if everybody on the network is trusted",
         address.authority);
  }

  // A kept connection on which anything, or the end, has arrived cannot be used again.
  bool usable() {
    if (!stream) return false;
    char byte = 0;
    const ssize_t got = recv(stream->native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }

  enum class Outcome { kAnswered, kLost, kLostInAnswer };

  // Of one type for all operations: for each type Asio compiles them anew.
  using Handler = std::function<void(const error_code&, size_t)>;

  void send(std::string_view head, std::string_view body, Clock::time_point deadline,
            error_code& error) {
    PHUB_CHECK(tls.has_value() == address.tls);  // no secret goes out in plain text
    bool done = false;
    const Handler finish = [&](const error_code& ec, size_t) {
      error = ec;
      done = true;
    };
    const std::array<asio::const_buffer, 2> bytes = {asio::buffer(head), asio::buffer(body)};
    if (tls) {
      asio::async_write(*tls, bytes, finish);
    } else {
      asio::async_write(*stream, bytes, finish);
    }
    run(done, deadline, "sending a request to");
  }

  // Appends to `buffer` what has come.
  void receive(Clock::time_point deadline, error_code& error) {
    bool done = false;
    const Handler finish = [&](const error_code& ec, size_t bytes) {
      error = ec;
      buffer.commit(bytes);
      done = true;
    };
    const asio::mutable_buffer room = buffer.prepare(kReadBytes);
    if (tls) {
      tls->async_read_some(room, finish);
    } else {
      stream->async_read_some(room, finish);
    }
    run(done, deadline, "waiting for an answer of");
  }

  Outcome exchange(std::string_view head, std::string_view body, bool asks_first,
                   Clock::time_point deadline, HttpAnswer& answer, error_code& error) {
    if (asks_first) {
      send(head, {}, deadline, error);
      const Outcome outcome = read_answer(deadline, answer, error);
      if (outcome != Outcome::kAnswered) return outcome;
      if (answer.status != static_cast<unsigned>(http::status::continue_)) {
        drop();  // the body is not sent, and what comes next must not be taken for it
        return outcome;
      }
      if (!stream) return Outcome::kLostInAnswer;  // told to go on, and closed
      head = {};
    }
    send(head, body, deadline, error);
    const Outcome outcome = read_answer(deadline, answer, error);
    return asks_first && outcome == Outcome::kLost ? Outcome::kLostInAnswer : outcome;
  }

  // `error`: of writing the request. A server that refuses a long body answers and closes before it
  // has read all of it.
  Outcome read_answer(Clock::time_point deadline, HttpAnswer& answer, error_code& error) {
    const error_code write_error = error;
    http::response_parser<http::string_body> parser;
    parser.body_limit(kMaxAnswerBytes);
    parser.eager(true);
    error = {};
    parse(parser, error);
    while (!error && !parser.is_done()) {
      receive(deadline, error);
      if (error == asio::error::eof) {
        error = http::error::end_of_stream;
        if (parser.got_some()) parser.put_eof(error);  // no error: an answer may end so
      } else if (!error) {
        parse(parser, error);
      }
    }
    if (error) {
      const bool begun = parser.got_some();
      if (!begun) check_tls(error);  // in TLS 1.3 a client is refused after its handshake
      if (!begun && write_error) error = write_error;
      return begun ? Outcome::kLostInAnswer : Outcome::kLost;
    }
    answer.status = parser.get().result_int();
    answer.body = std::move(parser.get().body());
    if (!parser.get().keep_alive() || write_error) drop();
    return Outcome::kAnswered;
  }

  // What `buffer` holds, as far as it goes.
  void parse(http::response_parser<http::string_body>& parser, error_code& error) {
    if (buffer.size() == 0) return;
    buffer.consume(parser.put(buffer.data(), error));
    if (error == http::error::need_more) error = {};
  }
};

namespace {

// A line break would begin a header of its own.
void check_visible(std::string_view what, std::string_view text) {
  for (const unsigned char c : text) {
    if (c <= 0x20 || c >= 0x7f) {
      fail(ErrorCode::kInvalid, "the {} of a request cannot hold the byte {:#04x}", what, c);
    }
  }
}

// What the system refuses, descriptors above all, comes out of Asio in a type of its own.
template <typename Body>
decltype(auto) with_system_errors(const std::string& server, Body body) {
  try {
    return body();
  } catch (const boost::system::system_error& error) {
    fail_system(fmt::format("a connection to the phub server at {}", server), error.code().value());
  }
}

}  // namespace

HttpClient::HttpClient(const std::string& server, std::string token, ClientTls tls)
    : impl_(std::make_unique<Impl>(server, std::move(token), std::move(tls))) {}
HttpClient::~HttpClient() { disconnect(); }

std::string HttpClient::reached() const { return impl_->reached; }

void HttpClient::disconnect() { impl_->drop(); }

void HttpClient::cancel() { impl_->cancelled = true; }

HttpAnswer HttpClient::request(std::string_view method, std::string_view target,
                               std::string_view bearer, std::string_view body, uint32_t timeout_ms,
                               std::string_view content_type) {
  impl_->check_cancelled();
  check_visible("path", target);
  check_visible("ticket", bearer);
  const auto deadline = timeout_ms == 0 ? Clock::time_point::max()
                                        : Clock::now() + std::chrono::milliseconds(timeout_ms);
  http::request<http::empty_body> request;
  request.method_string(beast::string_view(method.data(), method.size()));
  request.target(beast::string_view(target.data(), target.size()));
  request.version(11);
  request.set(http::field::host, impl_->address.authority);
  request.set(http::field::user_agent, "phub");
  if (!bearer.empty()) request.set(http::field::authorization, fmt::format("Bearer {}", bearer));
  if (!body.empty()) {
    request.set(http::field::content_type,
                beast::string_view(content_type.data(), content_type.size()));
    if (content_type == kBytesType) request.set(http::field::expect, "100-continue");
  }
  if (!body.empty() || request.method() == http::verb::post) request.content_length(body.size());
  std::ostringstream head;
  head << request.base();

  return with_system_errors(impl_->server, [&]() -> HttpAnswer {
    if (!impl_->usable()) impl_->drop();
    for (bool kept = impl_->stream.has_value();; kept = false) {
      if (!kept) impl_->connect(deadline);
      impl_->check_secret(bearer);
      HttpAnswer answer;
      error_code error;
      const auto outcome = impl_->exchange(
          head.view(), body, request.count(http::field::expect) > 0, deadline, answer, error);
      if (outcome == Impl::Outcome::kAnswered) return answer;
      impl_->drop();
      if (kept && outcome == Impl::Outcome::kLost) continue;
      fail(ErrorCode::kUnavailable, "connection to the phub server at {} lost: {}", impl_->server,
           error.message());
    }
  });
}

}  // namespace phub
