// Counts the handshakes of TLS at a port. Any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace phub {

struct TlsCounters {
  std::atomic<uint64_t> handshakes = 0;  // under way
  std::atomic<uint64_t> completed = 0;
  std::atomic<uint64_t> failed = 0;
  std::atomic<uint64_t> evicted = 0;    // those of the failed ones that made room
  std::atomic<uint64_t> expires_s = 0;  // when the certificate expires, since the epoch
};

}  // namespace phub
