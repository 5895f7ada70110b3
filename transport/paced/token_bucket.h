// A token bucket: in any window of t seconds it lets at most burst + rate · t bytes go.
//
// Plain data, owned by one thread. The caller has the clock: nanoseconds that never go back.
#pragma once

#include <cstdint>

namespace phub {

class TokenBucket {
 public:
  static constexpr uint64_t kMostPerSecond = uint64_t{1} << 40;
  static constexpr uint64_t kMostBytes = uint64_t{1} << 32;  // limit of a burst, and of a write
  // Full at first. REQUIRES, here and of change(): both are at least 1.
  TokenBucket(uint64_t bytes_per_s, uint64_t burst_bytes);

  uint64_t bytes_per_s() const { return bytes_per_s_; }

  // Whether so many bytes may go now; then they are taken. More than the burst go when the bucket
  // is full, and later bytes wait until they are paid for: such a write counts as the burst of the
  // bound above.
  bool take(uint64_t bytes, uint64_t now_ns);
  // The nanoseconds until take() will succeed, rounded up; 0 means now.
  uint64_t wait_ns(uint64_t bytes, uint64_t now_ns);
  // The number of bytes that may go now. If it is less than 0, so many are not paid for yet.
  int64_t available(uint64_t now_ns);

  // Changes both from now on; tokens beyond the new burst are lost.
  void change(uint64_t bytes_per_s, uint64_t burst_bytes, uint64_t now_ns);

 private:
  void fill(uint64_t now_ns);

  // Tokens are billionths of a byte, so that nothing is lost in rounding.
  uint64_t bytes_per_s_;  // tokens in a nanosecond
  int64_t full_;          // tokens
  int64_t tokens_;
  uint64_t filled_ns_ = 0;
};

}  // namespace phub
