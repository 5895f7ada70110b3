// A client's connection until its TLS handshake is done, at the control port and for data. It takes
// no memory for TLS before its first byte, and handshakes take turns. Used by the io_context of its
// descriptor, which has one thread. Its pending operations, and those who wait, keep it alive.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>

#include "transport/tls/counters.h"
#include "transport/tls/socket.h"

namespace phub {

class TlsOpening;

// Decides who may shake hands: among those who wait the newest, so that a flood of strangers holds
// up later clients no longer than one turn takes. Handshake thread only.
class TlsTurns {
 public:
  // At most `most` at once; one that has taken longer than `evict_after_ms` makes room for others.
  TlsTurns(boost::asio::io_context& context, uint32_t most, uint32_t evict_after_ms,
           TlsCounters& counters);

  void ask(const std::shared_ptr<TlsOpening>& opening);  // calls begin(), maybe later
  void done(const TlsOpening* opening);                  // it had its turn; else: nothing

 private:
  using Clock = std::chrono::steady_clock;
  struct Turn {
    TlsOpening* opening;
    Clock::time_point since;
  };

  void grant();

  const uint32_t most_;
  const std::chrono::milliseconds evict_after_;
  TlsCounters& counters_;
  boost::asio::steady_timer timer_;
  std::list<Turn> under_way_;                      // the oldest first
  std::deque<std::weak_ptr<TlsOpening>> waiting_;  // the oldest first
};

class TlsOpening : public std::enable_shared_from_this<TlsOpening> {
 public:
  using Descriptor = boost::asio::posix::stream_descriptor;
  // The common state of a port's openings.
  struct Shared {
    TlsTurns& turns;
    TlsCounters& counters;
    std::function<Ssl()> new_connection;
    // Is told of each client that was refused: its address, and the reason. May be null.
    std::function<void(const std::string& from, const std::string& why)> note;
  };

  // `from`: the client, for notes. `shared` outlives this.
  TlsOpening(const Shared& shared, Descriptor client, std::string from);
  virtual ~TlsOpening() = default;

  void start();
  void begin();  // its turn has come
  void evict();
  bool waits() const { return client_.is_open() && !refused_; }
  bool is_open() const { return client_.is_open(); }  // also while a refused client's rest drains

 protected:
  // The handshake is done.
  virtual void opened(Ssl ssl) = 0;
  // The text for a client that does not speak TLS, and whose first byte is this one; "": none.
  virtual std::string_view plain_answer(char first) const = 0;
  virtual void closed() {}

  using Step = void (TlsOpening::*)();
  void wait(Descriptor& descriptor, Descriptor::wait_type what, Step next);
  void give_up();  // its time is over
  void refuse(const std::string& why);
  void close();

  Descriptor client_;
  const std::string from_;

 private:
  void look();  // the first byte
  void shake_hands();
  void refuse_plain();
  void drain();

  const Shared& shared_;
  boost::asio::steady_timer limit_;
  Ssl ssl_;
  bool asked_ = false;  // for a handshake
  bool refused_ = false;
  size_t drained_bytes_ = 0;
};

}  // namespace phub
