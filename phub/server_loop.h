// Calls Server::poll() from an event loop, when one of its descriptors or its timer fires.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <vector>

#include "phub/server.h"

namespace phub {

// Used by the io_context's one thread only. REQUIRES: outlives io_context::run().
class ServerLoop {
 public:
  ServerLoop(Server& server, boost::asio::io_context& io);
  ~ServerLoop();

  // REQUIRES: called after each request, which may have shortened the interval to the next poll.
  void poll_soon();

 private:
  void wait(boost::asio::posix::stream_descriptor& descriptor);
  void poll();

  Server& server_;
  boost::asio::steady_timer timer_;
  std::vector<boost::asio::posix::stream_descriptor> descriptors_;
};

}  // namespace phub
