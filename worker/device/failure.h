// The failure of work on a device, shared by all streams that it stopped.
#pragma once

#include <atomic>
#include <string>
#include <string_view>
#include <utility>

namespace phub {

class Failure {
 public:
  explicit Failure(std::string origin) : origin_(std::move(origin)) {}

  // Throws: kInternal with the origin the first time, kUnavailable afterwards.
  [[noreturn]] void raise(std::string_view device, std::string_view stream);

 private:
  std::string origin_;
  std::atomic<bool> reported_ = false;
};

}  // namespace phub
