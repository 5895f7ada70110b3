// A connection to the TLS port until its handshake is done. Used by the io_context of both
// descriptors, which has one thread. Kept alive by its pending operations, and by those who wait.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>

#include "phub/control/tls_counters.h"
#include "phub/control/tls_tunnel.h"

namespace phub {

class TlsOpening;

// Who may shake hands: of those who wait the newest, so that a flood of strangers holds up those
// who come after it no longer than one turn takes. Handshake thread only.
class TlsTurns {
 public:
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
  using Descriptor = TlsTunnel::Descriptor;
  // What the openings of a port have in common. `opened` takes over both descriptors.
  struct Shared {
    TlsTurns& turns;
    TlsCounters& counters;
    std::function<Ssl()> new_connection;
    std::function<void(Ssl ssl, int client, int session, std::shared_ptr<std::atomic<bool>> broken)>
        opened;
    std::function<void(const std::string& line)> note;
  };

  TlsOpening(const Shared& shared, Descriptor client, Descriptor session,
             std::shared_ptr<std::atomic<bool>> broken, std::string from);

  void start();
  void begin();  // its turn has come
  void evict();
  bool waits() const { return client_.is_open() && !refused_; }

 private:
  using Step = void (TlsOpening::*)();

  void wait(Descriptor& descriptor, Descriptor::wait_type what, Step next);
  void look();  // the first byte
  void shake_hands();
  void refuse(std::string_view why);
  void refuse_plain();
  void give_up();
  void drain();
  void close();

  const Shared& shared_;
  Descriptor client_, session_;
  const std::shared_ptr<std::atomic<bool>> broken_;
  const std::string from_;
  boost::asio::steady_timer limit_;
  Ssl ssl_;
  bool asked_ = false;  // for a handshake
  bool refused_ = false;
  size_t drained_bytes_ = 0;
};

}  // namespace phub
