// The server's messages to its operator: a line for each connection that it closed or refused, with
// the reason. Peers can cause them at any rate, so the rate of lines is limited, and those left out
// are counted. Control thread only.
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
  static constexpr uint64_t kMsPerLine = 1000;  // after that, one line in this time

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
    if (left_out_ > 0) print_(fmt::format("{} lines were left out here", left_out_));
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
