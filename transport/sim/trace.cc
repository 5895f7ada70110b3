#include "transport/sim/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace phub {

void SimTrace::trace(std::string_view what, uint64_t a, uint64_t b, uint64_t c) {
  for (uint64_t word : {time_.now_ns(), static_cast<uint64_t>(what.size()), a, b, c}) {
    hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15ull;
    hash_ ^= hash_ >> 29;
  }
  trace_bytes(std::as_bytes(std::span(what)));
  if (keep_text_) text_.push_back(fmt::format("{:>12} {} {} {} {}", time_.now_ns(), what, a, b, c));
}

void SimTrace::trace_bytes(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    uint64_t word = 0;
    const size_t n = std::min(bytes.size(), sizeof(word));
    std::memcpy(&word, bytes.data(), n);
    hash_ = (hash_ ^ word) * 0x100000001b3ull;
    hash_ ^= hash_ >> 31;
    bytes = bytes.subspan(n);
  }
}

}  // namespace phub
