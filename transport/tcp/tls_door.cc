#include "transport/tcp/tls_door.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <string_view>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

constexpr uint32_t kMaxHandshakes = 256;
constexpr uint32_t kEvictAfterMs = 1000;
constexpr size_t kMaxUntold = 1024;  // refusals that the control thread has not taken

}  // namespace

class TcpTlsOpening final : public TlsOpening {
 public:
  TcpTlsOpening(TcpTlsDoor& door, Descriptor client, std::string from)
      : TlsOpening(door.shared_, std::move(client), std::move(from)),
        door_(door),
        deadline_(client_.get_executor()) {}
  void begin_waiting() {
    deadline_.expires_after(std::chrono::milliseconds(door_.half_open_ms_));
    deadline_.async_wait([weak = weak_from_this()](const boost::system::error_code& error) {
      const auto self = std::static_pointer_cast<TcpTlsOpening>(weak.lock());
      if (error || !self) return;
      self->end(fmt::format("no ticket within {} ms", self->door_.half_open_ms_));
    });
    start();
  }
  void end(const std::string& why) {
    if (waits()) refuse(why);
    close();
  }

 private:
  void opened(Ssl ssl) override {
    tls_ = std::move(ssl);
    read_hello();
  }
  std::string_view plain_answer(char) const override {
    static const std::string text = [] {
      const auto bytes = make_tcp_refusal(
          ErrorCode::kInvalid,
          "the data connections of this server speak TLS, this worker does not: ask the server as "
          "https://HOST:PORT, with a library that knows TLS of data");
      return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }();
    return text;
  }
  void closed() override {
    deadline_.cancel();
    tls_.reset();
    if (std::exchange(present_, false)) --door_.present_;
  }

  void read_hello() {
    while (hello_.size() < sizeof(TcpHello) && !is_wrong()) {
      std::array<std::byte, sizeof(TcpHello)> some;
      size_t got = 0;
      ERR_clear_error();
      const int result =
          SSL_read_ex(tls_.get(), some.data(), sizeof(TcpHello) - hello_.size(), &got);
      if (result == 1) {
        hello_.insert(hello_.end(), some.begin(), some.begin() + got);
        continue;
      }
      const int error = SSL_get_error(tls_.get(), result);
      if (error != SSL_ERROR_WANT_READ) return end("it ended before its hello");
      constexpr Step kAgain = static_cast<Step>(&TcpTlsOpening::read_hello);
      if (socket_of(tls_.get()).drained) return wait(client_, Descriptor::wait_read, kAgain);
      return boost::asio::post(
          client_.get_executor(),
          [self = std::static_pointer_cast<TcpTlsOpening>(shared_from_this())] {
            if (self->waits()) self->read_hello();
          });
    }
    door_.deliver({.from = from_,
                   .refused = "",
                   .socket = Fd(client_.release()),
                   .tls = std::make_unique<TcpTls>(std::move(tls_)),
                   .hello = std::move(hello_)});
    close();
  }
  // A peer with a wrong header may wait for its answer before it sends the rest.
  bool is_wrong() const {
    if (hello_.size() < sizeof(TcpHeader)) return false;
    try {
      parse_tcp_header(hello_, "hello");
      return false;
    } catch (const Error&) {
      return true;
    }
  }

  TcpTlsDoor& door_;
  boost::asio::steady_timer deadline_;
  Ssl tls_;
  std::vector<std::byte> hello_;
  bool present_ = true;
};

TcpTlsDoor::TcpTlsDoor(const TlsServerContext& context, uint32_t half_open_ms,
                       uint32_t max_half_open)
    : context_(context),
      half_open_ms_(half_open_ms),
      max_half_open_(max_half_open),
      event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      turns_(io_, kMaxHandshakes, kEvictAfterMs, counters_),
      shared_{turns_, counters_, [this] { return context_.new_connection(); },
              [this](const std::string& from, const std::string& why) {
                deliver({.from = from, .refused = why});
              }} {
  if (!event_) fail_system("eventfd of a transport", errno);
  thread_ = std::jthread([this] {
    pthread_setname_np(pthread_self(), "phub-data-hello");
    io_.run();
  });
}

TcpTlsDoor::~TcpTlsDoor() {
  io_.stop();
  thread_.join();
}

void TcpTlsDoor::open(Fd socket, std::string from) {
  if (present_ >= 2 * max_half_open_) return;  // the thread does not keep up
  ++present_;
  boost::asio::post(io_, [this, socket = std::move(socket), from = std::move(from)]() mutable {
    admit(std::move(socket), std::move(from));
  });
}

void TcpTlsDoor::admit(Fd socket, std::string from) {
  TlsOpening::Descriptor client(io_);
  boost::system::error_code error;
  client.assign(socket.get(), error);
  if (error) {
    --present_;
    return;
  }
  socket.release();
  const auto opening = std::make_shared<TcpTlsOpening>(*this, std::move(client), std::move(from));
  while (!openings_.empty()) {
    const std::shared_ptr<TcpTlsOpening> oldest = openings_.front().lock();
    if (oldest && present_ > max_half_open_) {
      oldest->end("too many connections that have shown no ticket; this was the oldest");
    } else if (oldest && oldest->is_open()) {
      break;
    }
    openings_.pop_front();
  }
  openings_.push_back(opening);
  opening->begin_waiting();
}

void TcpTlsDoor::deliver(Guest guest) {
  {
    const std::lock_guard lock(mutex_);
    if (!guest.refused.empty() && guests_.size() >= kMaxUntold) return;
    guests_.push_back(std::move(guest));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_.get(), &one, sizeof one);
}

std::vector<TcpTlsDoor::Guest> TcpTlsDoor::take() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t bytes = read(event_.get(), &count, sizeof count);
  const std::lock_guard lock(mutex_);
  return std::exchange(guests_, {});
}

}  // namespace phub
