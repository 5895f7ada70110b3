#include "phub/server_loop.h"

#include <chrono>

namespace phub {

namespace asio = boost::asio;

ServerLoop::ServerLoop(Server& server, asio::io_context& io) : server_(server), timer_(io) {
  for (int fd : server.event_fds()) descriptors_.emplace_back(io, fd);
  for (auto& descriptor : descriptors_) wait(descriptor);
  poll();
}

ServerLoop::~ServerLoop() {
  for (auto& descriptor : descriptors_) descriptor.release();  // the server owns them
}

void ServerLoop::wait(asio::posix::stream_descriptor& descriptor) {
  descriptor.async_wait(asio::posix::descriptor_base::wait_read,
                        [this, &descriptor](const boost::system::error_code& error) {
                          if (error) return;
                          poll();
                          wait(descriptor);
                        });
}

void ServerLoop::poll_soon() { poll(); }

void ServerLoop::poll() {
  server_.poll();
  timer_.expires_after(std::chrono::milliseconds(server_.poll_interval_ms()));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) poll();
  });
}

}  // namespace phub
