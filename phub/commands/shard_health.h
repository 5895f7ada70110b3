// What a box that serves under another answers at its own control port: whether it lives and is
// ready. Jobs are the server's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "phub/control/handler.h"

namespace phub {

class ShardHealth final : public ControlHandler {
 public:
  ShardHealth(std::string server, std::function<bool()> has_joined)
      : server_(std::move(server)), has_joined_(std::move(has_joined)) {}

  void check_ready(Reply<Done> reply) override {
    if (!has_joined_()) fail(ErrorCode::kUnavailable, "this box has not joined {}", server_);
    reply(Done{});
  }

 private:
  std::string why_not_here() const override {
    return fmt::format("this box serves under {}: ask there", server_);
  }

  const std::string server_;
  const std::function<bool()> has_joined_;
};

}  // namespace phub
