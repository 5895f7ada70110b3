// Messages to the cores. A message that finds a full mailbox waits here with all messages behind
// it, so every core gets its messages in order. Control thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "phub/core/core.h"

namespace phub {

class CoreMail {
 public:
  explicit CoreMail(const std::vector<std::unique_ptr<Core>>& cores) : cores_(cores) {}

  void send(uint32_t core, const CoreMessage& message) {
    if (waiting_.empty() && cores_[core]->send(message)) return;
    waiting_.emplace_back(core, message);
  }
  void flush() {
    while (!waiting_.empty() && cores_[waiting_.front().first]->send(waiting_.front().second)) {
      waiting_.pop_front();
    }
  }
  bool empty() const { return waiting_.empty(); }

 private:
  const std::vector<std::unique_ptr<Core>>& cores_;
  std::deque<std::pair<uint32_t, CoreMessage>> waiting_;
};

}  // namespace phub
