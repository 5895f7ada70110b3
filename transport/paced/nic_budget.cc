#include "transport/paced/nic_budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <utility>

#include "transport/error.h"
#include "transport/paced/token_bucket.h"
#include "transport/text.h"

namespace phub {
namespace {

constexpr uint64_t kLeastPerSecond = 1000;
constexpr uint64_t kLeastBurst = 64 << 10;
constexpr uint64_t kBurstMs = 5;

constexpr std::array<std::pair<std::string_view, double>, 4> kUnits = {{
    {"gbit", 1e9 / 8},
    {"mbit", 1e6 / 8},
    {"kbit", 1e3 / 8},
    {"", 1},
}};

}  // namespace

PacedClock steady_paced_clock() {
  return [] {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
  };
}

uint64_t parse_rate(std::string_view text) {
  for (const auto& [unit, bytes] : kUnits) {
    if (!text.ends_with(unit)) continue;
    const std::string_view digits = text.substr(0, text.size() - unit.size());
    double number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number,
                                              std::chars_format::fixed);
    if (error != std::errc() || end != digits.data() + digits.size()) break;
    if (digits.find_first_not_of("0123456789.") != digits.npos) break;
    const double rate = number * bytes;
    if (!(rate >= kLeastPerSecond && rate <= static_cast<double>(TokenBucket::kMostPerSecond))) {
      fail(ErrorCode::kInvalid, "a budget of '{}' is out of range: {} to {} bytes per second",
           printable(text), kLeastPerSecond, TokenBucket::kMostPerSecond);
    }
    return static_cast<uint64_t>(rate);
  }
  fail(ErrorCode::kInvalid,
       "'{}' is not a rate: 1gbit, 250mbit or 800kbit, or a number of bytes per second",
       printable(text));
}

std::string describe_rate(uint64_t bytes_per_s) {
  const double bits = 8.0 * static_cast<double>(bytes_per_s);
  if (bits >= 1e9) return fmt::format("{:g} Gbit/s", bits / 1e9);
  if (bits >= 1e6) return fmt::format("{:g} Mbit/s", bits / 1e6);
  return fmt::format("{:g} kbit/s", bits / 1e3);
}

uint64_t burst_of(uint64_t bytes_per_s) {
  return std::clamp(bytes_per_s * kBurstMs / 1000, kLeastBurst, TokenBucket::kMostBytes);
}

}  // namespace phub
