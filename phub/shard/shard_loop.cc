#include "phub/shard/shard_loop.h"

#include <chrono>

namespace phub {

namespace asio = boost::asio;

ShardLoop::ShardLoop(ShardServer& shard, ShardLink& link, asio::io_context& io)
    : shard_(shard), link_(link), timer_(io) {
  descriptors_.emplace_back(io, link.event_fd());
  for (const int fd : shard.event_fds()) descriptors_.emplace_back(io, fd);
  for (auto& descriptor : descriptors_) wait(descriptor);
  poll();
}

ShardLoop::~ShardLoop() {
  for (auto& descriptor : descriptors_) descriptor.release();  // others own them
}

void ShardLoop::wait(asio::posix::stream_descriptor& descriptor) {
  descriptor.async_wait(asio::posix::descriptor_base::wait_read,
                        [this, &descriptor](const boost::system::error_code& error) {
                          if (error) return;
                          poll();
                          wait(descriptor);
                        });
}

void ShardLoop::poll() {
  const ShardLink::News news = link_.take();
  if (news.lost) {
    ending_ = true;
    shard_.end_all();
  }
  if (!ending_) {
    for (const ShardOrder& order : news.orders) shard_.handle(order);
  }
  if (news.moved) shard_.moved(news.moved->piece, news.moved->failed);
  shard_.poll();
  if (!link_.is_moving()) {
    if (const auto piece = shard_.next_piece()) link_.move(*piece);
  }
  std::vector<ShardReport> reports = shard_.take_reports();
  if (!ending_) link_.send(std::move(reports));
  if (ending_ && shard_.empty()) {
    ending_ = false;
    link_.rejoin();
  }
  timer_.expires_after(std::chrono::milliseconds(ShardServer::kPollMs));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) poll();
  });
}

}  // namespace phub
