// One simulated box that serves under the rack's server. It is the production shard; in the stead
// of ShardLink's threads the rack's control connections carry its mail.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "phub/clock.h"
#include "phub/shard/shard_post.h"
#include "phub/shard/shard_server.h"
#include "tests/sim/control_net.h"
#include "transport/sim/net.h"

namespace phub::sim {

class Shard {
 public:
  // `server()`: REQUIRES: it lives, as for all requests that arrive.
  using MakeServer = std::function<std::unique_ptr<ShardServer>()>;
  Shard(SimNet& net, ControlNet& control, const Clock& clock,
        std::function<ControlHandler&()> server, MakeServer make);

  void poll();  // one pass of its control thread
  bool runnable() const { return server_ != nullptr && net_.now_ns() >= hangs_until_ns_; }

  void crash();
  void start();  // after a crash
  void hang(uint64_t ns) { hangs_until_ns_ = net_.now_ns() + ns; }

  ShardServer* server() { return server_.get(); }  // null: it is dead
  bool idle() const { return server_ == nullptr || server_->empty(); }

 private:
  void join();
  void ask();
  void report();
  void move(const ShardPiece& piece);
  // Whether mail came through; if not, whether to try again is known when this is called next.
  template <typename T>
  bool arrived(uint64_t as, const Result<T>& result);
  void set_timer();

  SimNet& net_;
  ControlNet& control_;
  const Clock& clock_;
  const std::function<ControlHandler&()> handler_;
  const MakeServer make_;
  std::unique_ptr<ShardServer> server_;
  std::shared_ptr<Mail> mail_;  // of the process
  uint64_t hangs_until_ns_ = 0;
  uint64_t timer_ns_ = 0;

  enum class State : uint8_t { kApart, kJoined, kEnding } state_ = State::kApart;
  ShardPost post_;
  bool joining_ = false, asking_ = false, reporting_ = false, moving_ = false;
  uint64_t failing_since_ms_ = 0;  // 0: mail comes through
  uint64_t tried_ms_ = 0;          // the latest answer, or that there was none
};

}  // namespace phub::sim
