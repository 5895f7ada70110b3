// A shard's connection to its server: one thread waits for orders, one sends reports, one moves
// pieces of checkpoints. What a broken connection lost is sent again. The server is lost when it
// has not answered for a lease, or does not know the shard any more; then this joins it anew, once
// the shard has ended its parts.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "phub/shard/shard_piece.h"
#include "phub/shard/shard_post.h"
#include "transport/control/control_client.h"
#include "transport/control/shard_messages.h"

namespace phub {

class ShardLink {
 public:
  struct Options {
    std::string server;  // HOST:PORT, with https:// before it over TLS
    std::string token;
    ClientTls tls;
    std::function<void(const std::string& line)> note;  // any thread
  };
  ShardLink(Options options, ShardHello hello);
  ~ShardLink();
  ShardLink(const ShardLink&) = delete;
  ShardLink& operator=(const ShardLink&) = delete;

  // Control thread. What came since the last call.
  struct Moved {
    ShardPiece piece;
    std::optional<Error> failed;
  };
  struct News {
    bool lost = false;  // the server; reports are dropped until rejoin()
    std::vector<ShardOrder> orders;
    std::optional<Moved> moved;
  };
  News take();
  void send(std::vector<ShardReport> reports);
  // Begins to move a piece; the news have the outcome. REQUIRES: !is_moving().
  void move(const ShardPiece& piece);
  bool is_moving();
  void rejoin();  // after `lost`: all parts have ended
  // This shard ends: tells the server, so that it need not wait for a lease. Blocks until the
  // server has answered, at most for a second.
  void leave();
  bool has_joined();
  int event_fd() const { return event_fd_; }  // readable when there is news

 private:
  void receive(const std::stop_token& stop);
  void deliver(const std::stop_token& stop);
  void move_pieces(const std::stop_token& stop);
  bool join(const std::stop_token& stop);
  void move_once(const ShardWelcome& as, const ShardPiece& piece);
  void lose(const ShardWelcome& as, const std::string& why);
  // Calls until there is an answer, for a lease at most; what it failed with.
  std::optional<Error> attempt(const std::stop_token& stop, const ShardWelcome& as,
                               const std::function<void()>& call);
  // The same for mail; false: the server is lost, or stop was requested.
  bool exchange(ControlClient& client, const std::stop_token& stop, const ShardWelcome& as,
                const ShardMail& mail, ShardOrders& orders);

  const Options options_;
  const ShardHello hello_;
  int event_fd_ = -1;
  ControlClient waiting_, sending_, moving_;

  // What it joined as holds still. REQUIRES: mutex_ is locked.
  bool serves_as(const ShardWelcome& as) const {
    return state_ == State::kJoined && post_.welcome().shard == as.shard;
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable_any changed_;
  enum class State { kApart, kJoined, kLost } state_ = State::kApart;
  ShardPost post_;
  News news_;
  std::optional<ShardPiece> piece_;         // that moves
  std::jthread receiver_, sender_, mover_;  // last
};

}  // namespace phub
