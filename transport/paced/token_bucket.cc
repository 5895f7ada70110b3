#include "transport/paced/token_bucket.h"

#include <algorithm>

#include "transport/error.h"

namespace phub {
namespace {

constexpr int64_t kTokensPerByte = 1'000'000'000;

int64_t tokens_of(uint64_t bytes) {
  PHUB_CHECK(bytes <= TokenBucket::kMostBytes);
  return static_cast<int64_t>(bytes) * kTokensPerByte;
}

}  // namespace

TokenBucket::TokenBucket(uint64_t bytes_per_s, uint64_t burst_bytes)
    : bytes_per_s_(bytes_per_s), full_(tokens_of(burst_bytes)), tokens_(full_) {
  PHUB_CHECK(bytes_per_s > 0 && bytes_per_s <= kMostPerSecond && burst_bytes > 0);
}

// No product is computed that could overflow: a long time fills the bucket.
void TokenBucket::fill(uint64_t now_ns) {
  const uint64_t passed = now_ns - std::min(now_ns, filled_ns_);
  filled_ns_ = std::max(filled_ns_, now_ns);
  const auto missing = static_cast<uint64_t>(full_ - tokens_);
  tokens_ = passed > missing / bytes_per_s_ ? full_
                                            : tokens_ + static_cast<int64_t>(passed * bytes_per_s_);
}

bool TokenBucket::take(uint64_t bytes, uint64_t now_ns) {
  if (wait_ns(bytes, now_ns) > 0) return false;
  tokens_ -= tokens_of(bytes);
  return true;
}

uint64_t TokenBucket::wait_ns(uint64_t bytes, uint64_t now_ns) {
  fill(now_ns);
  const int64_t wanted = std::min(tokens_of(bytes), full_);
  if (wanted <= tokens_) return 0;
  const auto missing = static_cast<uint64_t>(wanted - tokens_);
  return (missing + bytes_per_s_ - 1) / bytes_per_s_;
}

int64_t TokenBucket::available(uint64_t now_ns) {
  fill(now_ns);
  return tokens_ / kTokensPerByte;
}

void TokenBucket::change(uint64_t bytes_per_s, uint64_t burst_bytes, uint64_t now_ns) {
  PHUB_CHECK(bytes_per_s > 0 && bytes_per_s <= kMostPerSecond && burst_bytes > 0);
  fill(now_ns);
  bytes_per_s_ = bytes_per_s;
  full_ = tokens_of(burst_bytes);
  tokens_ = std::min(tokens_, full_);
}

}  // namespace phub
