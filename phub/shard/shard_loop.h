// Carries mail between a shard and its server, and polls the shard, from an event loop: when one of
// their descriptors fires, and now and then.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <vector>

#include "phub/shard/shard_link.h"
#include "phub/shard/shard_server.h"

namespace phub {

// Used by the io_context's one thread only. REQUIRES: outlives io_context::run().
class ShardLoop {
 public:
  ShardLoop(ShardServer& shard, ShardLink& link, boost::asio::io_context& io);
  ~ShardLoop();

 private:
  void wait(boost::asio::posix::stream_descriptor& descriptor);
  void poll();

  ShardServer& shard_;
  ShardLink& link_;
  boost::asio::steady_timer timer_;
  std::vector<boost::asio::posix::stream_descriptor> descriptors_;
  bool ending_ = false;  // the server is lost, and parts of its jobs are still here
};

}  // namespace phub
