#include "phub/control/port.h"

#include <fmt/format.h>
#include <malloc.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <utility>

#include "phub/clock.h"
#include "phub/control/http_shared.h"
#include "phub/control/session.h"
#include "phub/control/tls_front.h"
#include "transport/control/messages_json.h"
#include "transport/text.h"

namespace phub {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr auto kPauseWithoutDescriptors = std::chrono::milliseconds(100);
constexpr auto kBeforeGivingBack = std::chrono::seconds(1);

// Answers a connection beyond the limit, without waiting for it.
const std::string& too_many_connections() {
  static const std::string text = [] {
    const std::string body =
        error_json(503, ErrorCode::kUnavailable, "too many connections; try again");
    return fmt::format(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\n"
        "Content-Length: {}\r\nConnection: close\r\n\r\n{}",
        body.size(), body);
  }();
  return text;
}

std::vector<tcp::endpoint> resolve(asio::io_context& context, const std::string& text) {
  const HostPort address = parse_host_port(text);
  if (address.host.empty()) {
    return {tcp::endpoint(tcp::v4(), address.port), tcp::endpoint(tcp::v6(), address.port)};
  }
  error_code error;
  tcp::resolver resolver(context);
  const auto results =
      resolver.resolve(address.host, std::to_string(address.port), tcp::resolver::passive, error);
  if (error) {
    fail(ErrorCode::kUnavailable, "cannot listen on {}: {}: {}", text, address.host,
         error.message());
  }
  std::vector<tcp::endpoint> endpoints;
  for (const auto& result : results) endpoints.push_back(result.endpoint());
  return endpoints;
}

std::string describe(const tcp::endpoint& endpoint) {
  return format_host_port(endpoint.address().to_string(), endpoint.port());
}

// "*" includes IPv6 only if this machine has IPv6.
bool may_be_skipped(const std::string& text, const tcp::endpoint& endpoint,
                    const error_code& error) {
  return parse_host_port(text).host.empty() && endpoint.address().is_v6() &&
         (error == asio::error::address_family_not_supported || error.value() == EADDRNOTAVAIL);
}

[[noreturn]] void refuse(const tcp::endpoint& endpoint, const error_code& error) {
  const std::string host = endpoint.address().to_string();
  if (error == asio::error::address_in_use) {
    fail(
        ErrorCode::kTaken,
        "port {} on {} is in use; stop the program that uses it, or listen elsewhere with --listen "
        "{} (0 takes a free port)",
        endpoint.port(), host, format_host_port(host, 0));
  }
  if (error == asio::error::access_denied) {
    fail(ErrorCode::kUnavailable,
         "port {} on {} is not permitted; ports below 1024 need privileges", endpoint.port(), host);
  }
  if (error.value() == EADDRNOTAVAIL) {
    fail(ErrorCode::kUnavailable,
         "cannot listen on {}: no interface of this machine has that address", describe(endpoint));
  }
  fail(ErrorCode::kUnavailable, "cannot listen on {}: {}", describe(endpoint), error.message());
}

HttpPeer peer_of(const tcp::socket& socket) {
  error_code unknown, gone;
  const tcp::endpoint here = socket.local_endpoint(unknown);
  const tcp::endpoint from = socket.remote_endpoint(gone);
  return {.address = gone ? "-" : describe(from),
          .over_loopback = !unknown && here.address().is_loopback()};
}

}  // namespace

class HttpServer::Shared : public HttpShared, public std::enable_shared_from_this<Shared> {
 public:
  explicit Shared(asio::io_context& context) : context_(context), give_back_(context) {
    large_message_is_over = [this] { give_back_heap_soon(); };
  }

  void listen(const std::string& text) {
    uint16_t taken = 0;  // for port 0: all addresses of one name get the same port
    for (tcp::endpoint endpoint : resolve(context_, text)) {
      if (endpoint.port() == 0) endpoint.port(taken);
      tcp::acceptor acceptor(context_);
      error_code error;
      open(acceptor, endpoint, error);
      if (error && may_be_skipped(text, endpoint, error)) continue;
      if (error) refuse(endpoint, error);
      taken = acceptor.local_endpoint().port();
      listeners_.push_back({std::move(acceptor), asio::steady_timer(context_)});
    }
  }

  void start() {
    for (size_t i = 0; i < listeners_.size(); ++i) accept(i);
  }

  std::vector<std::string> addresses() const {
    std::vector<std::string> out;
    for (const Listener& listener : listeners_) {
      out.push_back(describe(listener.acceptor.local_endpoint()));
    }
    return out;
  }

  void stop() {
    handler = nullptr;
    error_code ignored;
    for (Listener& listener : listeners_) {
      listener.acceptor.close(ignored);
      listener.retry.cancel();
    }
    give_back_.cancel();
    // A closed session may be destroyed, which removes it from the set.
    std::vector<std::shared_ptr<HttpSession>> open;
    for (HttpSession* session : sessions) open.push_back(session->shared_from_this());
    for (const auto& session : open) session->close();
  }

 private:
  struct Listener {
    tcp::acceptor acceptor;
    asio::steady_timer retry;
  };

  static void open(tcp::acceptor& acceptor, const tcp::endpoint& endpoint, error_code& error) {
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error && endpoint.address().is_v6()) {
      acceptor.set_option(asio::ip::v6_only(true), error);
    }
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  }

  void accept(size_t i) {
    listeners_[i].acceptor.async_accept(
        [this, i, self = shared_from_this()](const error_code& error, tcp::socket socket) {
          if (handler == nullptr) return;
          if (!error) {
            serve(std::move(socket));
            return accept(i);
          }
          // Usually no descriptors are left: try again when others have been closed.
          say_full(fmt::format("and: {}; raise LimitNOFILE or ulimit -n", error.message()));
          make_room();
          listeners_[i].retry.expires_after(kPauseWithoutDescriptors);
          listeners_[i].retry.async_wait([this, i, self](const error_code&) {
            if (handler != nullptr) accept(i);
          });
        });
  }

  // The allocator keeps freed memory, a multiple of a large message's bytes: what decoded and
  // encoded it, and the jobs that it made.
  void give_back_heap_soon() {
#ifdef __GLIBC__
    if (handler == nullptr) return;
    give_back_.expires_after(kBeforeGivingBack);  // after the last one
    give_back_.async_wait([weak = weak_from_this()](const error_code& error) {
      const auto self = weak.lock();
      if (error || !self || self->handler == nullptr) return;
      const auto trim = [] { malloc_trim(0); };
      self->options.background ? self->options.background->run(trim) : trim();
    });
#endif
  }

  void say_full(const std::string& why) {
    if (!refused) return;
    refused->add(kSteadyClock.now_ms(),
                 fmt::format("the control port takes no further connection: {} are open, {}",
                             sessions.size(), why));
  }

  // Closes the idle connection that is of the least use, if there is one.
  bool make_room() {
    const auto worth = [](const HttpSession* session) {
      return std::pair(session->has_served(), session->idle_since());
    };
    const auto limit =
        std::chrono::steady_clock::now() - std::chrono::milliseconds(options.evict_after_ms);
    HttpSession* least = nullptr;
    for (HttpSession* session : sessions) {
      if (!session->idle() || session->idle_since() > limit) continue;
      if (least == nullptr || worth(session) < worth(least)) least = session;
    }
    if (least == nullptr) return false;
    ++counters.evicted;
    least->shared_from_this()->close();
    return true;
  }

  void serve(tcp::socket socket) {
    error_code ignored;
    if (sessions.size() >= options.max_connections && !make_room()) {
      ++counters.refused;
      say_full("which is the most there may be");
      if (options.tls != nullptr) return;
      socket.non_blocking(true, ignored);
      socket.write_some(asio::buffer(too_many_connections()), ignored);
      socket.shutdown(tcp::socket::shutdown_both, ignored);
      return;
    }
    socket.set_option(tcp::no_delay(true), ignored);
    socket.set_option(asio::socket_base::keep_alive(true), ignored);
    HttpPeer peer = peer_of(socket);
    if (options.tls != nullptr) {
      try {
        TlsFront::Opened opened = options.tls->open(std::move(socket), context_);
        socket = std::move(opened.socket);
        peer.broken = std::move(opened.broken);
      } catch (const Error&) {  // no descriptors: the next one may find some
        ++counters.refused;
        make_room();
        return;
      }
    }
    std::make_shared<HttpSession>(std::move(socket), std::move(peer), shared_from_this())->start();
  }

  asio::io_context& context_;
  std::vector<Listener> listeners_;
  asio::steady_timer give_back_;
};

HttpServer::HttpServer(asio::io_context& context, ControlHandler& handler, HttpOptions options)
    : shared_(std::make_shared<Shared>(context)) {
  if (options.listen.empty()) fail(ErrorCode::kInvalid, "there is no address to listen on");
  shared_->handler = &handler;
  shared_->options = std::move(options);
  if (shared_->options.tls != nullptr) shared_->counters.tls = &shared_->options.tls->counters();
  shared_->host_names = HostNames(shared_->options.listen);
  if (shared_->options.audit) {
    shared_->done.emplace(shared_->options.audit);
    shared_->refused.emplace(shared_->options.audit);
  }
  for (const std::string& text : shared_->options.listen) shared_->listen(text);
  shared_->start();
}

HttpServer::~HttpServer() { stop(); }

void HttpServer::stop() { shared_->stop(); }

std::vector<std::string> HttpServer::addresses() const { return shared_->addresses(); }

size_t HttpServer::connections() const { return shared_->sessions.size(); }

}  // namespace phub
