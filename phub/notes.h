// What the server tells whoever runs it while it serves: a line for each connection that it closed
// or refused, and why. Peers can make it say something at any rate, so few lines a second go out,
// and the others are counted. Control thread only.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace phub {

class Notes {
 public:
  using Print = std::function<void(const std::string& line)>;
  static constexpr uint64_t kBurst = 20;        // lines at once
  static constexpr uint64_t kMsPerLine = 1000;  // and one more in this time

  explicit Notes(Print print) : print_(std::move(print)) {}

  void add(uint64_t now_ms, const std::string& line) {
    if (!print_) return;
    const uint64_t earned = (now_ms - since_ms_) / kMsPerLine;
    since_ms_ += earned * kMsPerLine;
    room_ = std::min(kBurst, room_ + earned);
    if (room_ == 0) {
      ++left_out_;
      return;
    }
    --room_;
    if (left_out_ > 0) print_(fmt::format("{} more lines like the next one", left_out_));
    left_out_ = 0;
    print_(line);
  }

 private:
  const Print print_;
  uint64_t since_ms_ = 0;
  uint64_t room_ = kBurst;
  uint64_t left_out_ = 0;
};

}  // namespace phub
