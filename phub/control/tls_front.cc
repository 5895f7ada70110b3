#include "phub/control/tls_front.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <thread>
#include <utility>

#include "phub/clock.h"
#include "phub/control/tls_opening.h"
#include "phub/control/tls_tunnel.h"
#include "phub/notes.h"
#include "transport/error.h"
#include "transport/fd.h"
#include "transport/text.h"

namespace phub {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

constexpr int kPairBytes = 64 << 10;  // in a pair's buffers, each way

// A thread that runs an io_context until it is stopped.
struct Loop {
  asio::io_context io{1};
  asio::executor_work_guard<asio::io_context::executor_type> work{io.get_executor()};
  TlsTunnel::Scratch scratch{};
  std::jthread thread;

  void start(const char* name) {
    thread = std::jthread([this, name] {
      pthread_setname_np(pthread_self(), name);
      io.run();
    });
  }
  void stop() {
    io.stop();
    if (thread.joinable()) thread.join();
  }
};

}  // namespace

class TlsFront::Impl {
 public:
  TlsCounters counters;

  explicit Impl(TlsOptions options)
      : options_(std::move(options)),
        notes_(options_.note),
        context_(options_.files, TlsServerContext::Use::kRequests),
        turns_(handshakes_.io, options_.max_handshakes, options_.evict_after_ms, counters) {
    counters.expires_s = context_.expires_s();
    handshakes_.start("phub-tls-hello");
    tunnels_.start("phub-tls");
  }
  ~Impl() {
    handshakes_.stop();
    tunnels_.stop();
  }

  void reload() {
    context_.reload();
    counters.expires_s = context_.expires_s();
  }

  Opened open(tcp::socket client, asio::io_context& context) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
      fail_system("socketpair of a TLS connection", errno);
    }
    tcp::socket inner(context);
    boost::system::error_code inner_error, outer_error, peer_error;
    for (const int end : ends) {
      setsockopt(end, SOL_SOCKET, SO_SNDBUF, &kPairBytes, sizeof kPairBytes);  // a hint
    }
    inner.assign(tcp::v4(), ends[1], inner_error);
    if (inner_error) close(ends[1]);
    Descriptor outer = take(handshakes_, ends[0], outer_error);
    boost::system::error_code gone;
    const tcp::endpoint from = client.remote_endpoint(gone);
    auto broken = std::make_shared<std::atomic<bool>>(false);
    Descriptor peer = take(handshakes_, client.release(), peer_error);
    if (inner_error || outer_error || peer_error) {
      fail(ErrorCode::kFull, "a TLS connection: the system watches no more descriptors");
    }
    fcntl(peer.native_handle(), F_SETFL, fcntl(peer.native_handle(), F_GETFL) | O_NONBLOCK);
    std::string name =
        gone ? "a client that is gone" : format_host_port(from.address().to_string(), from.port());
    asio::post(handshakes_.io, [this, peer = std::move(peer), outer = std::move(outer), broken,
                                name = std::move(name)]() mutable {
      std::make_shared<TlsPortOpening>(shared_, opened_, std::move(peer), std::move(outer),
                                       std::move(broken), std::move(name))
          ->open();
    });
    return {std::move(inner), std::move(broken)};
  }

 private:
  using Descriptor = TlsTunnel::Descriptor;

  // Owns the descriptor, or closes it.
  static Descriptor take(Loop& loop, int fd, boost::system::error_code& error) {
    Descriptor taken(loop.io);
    taken.assign(fd, error);
    if (error) close(fd);
    return taken;
  }

  void tunnel(Ssl ssl, int client, int session, std::shared_ptr<std::atomic<bool>> broken) {
    boost::system::error_code client_error, session_error;
    Descriptor to_client = take(tunnels_, client, client_error);
    Descriptor to_session = take(tunnels_, session, session_error);
    if (client_error || session_error) return;  // both ends are told by the end
    asio::post(
        tunnels_.io, [this, ssl = std::move(ssl), to_client = std::move(to_client),
                      to_session = std::move(to_session), broken = std::move(broken)]() mutable {
          std::make_shared<TlsTunnel>(std::move(ssl), std::move(to_client), std::move(to_session),
                                      std::move(broken), tunnels_.scratch)
              ->start();
        });
  }

  void note(const std::string& line) { notes_.add(kSteadyClock.now_ms(), line); }

  const TlsOptions options_;
  Notes notes_;  // handshake thread only
  TlsServerContext context_;
  Loop handshakes_, tunnels_;
  TlsTurns turns_;
  const TlsOpening::Shared shared_{turns_, counters, [this] { return context_.new_connection(); },
                                   [this](const std::string& from, const std::string& why) {
                                     note(fmt::format("TLS: {} was refused: {}", from, why));
                                   }};
  const TlsPortOpening::Opened opened_ = [this](Ssl ssl, int client, int session,
                                                std::shared_ptr<std::atomic<bool>> broken) {
    tunnel(std::move(ssl), client, session, std::move(broken));
  };
};

TlsFront::TlsFront(TlsOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
TlsFront::~TlsFront() = default;

void TlsFront::reload() { impl_->reload(); }

TlsFront::Opened TlsFront::open(tcp::socket client, asio::io_context& context) {
  return impl_->open(std::move(client), context);
}

const TlsCounters& TlsFront::counters() const { return impl_->counters; }

}  // namespace phub
