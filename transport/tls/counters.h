// What TLS at a port has done. Any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace phub {

struct TlsCounters {
  std::atomic<uint64_t> handshakes = 0;  // under way
  std::atomic<uint64_t> completed = 0;
  std::atomic<uint64_t> failed = 0;
  std::atomic<uint64_t> evicted = 0;    // of these
  std::atomic<uint64_t> expires_s = 0;  // of the certificate, since the epoch
};

}  // namespace phub
