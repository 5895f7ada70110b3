#include "phub/core/core_bells.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/error.h"

namespace phub {

CoreBells::CoreBells(uint32_t cores) : cores_(cores), bells_(std::make_unique<Bell[]>(cores)) {
  for (uint32_t core = 0; core < cores; ++core) {
    bells_[core].fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (bells_[core].fd >= 0) continue;
    const int why = errno;
    while (core > 0) ::close(bells_[--core].fd);
    fail(ErrorCode::kFull, "no file descriptor left for {} cores ({}); raise ulimit -n", cores,
         std::strerror(why));
  }
}

CoreBells::~CoreBells() {
  for (uint32_t core = 0; core < cores_; ++core) ::close(bells_[core].fd);
}

void CoreBells::ring(uint32_t but_core) {
  for (uint32_t other = 0; other < cores_; ++other) {
    Bell& bell = bells_[other];
    if (other == but_core || !bell.armed.load(std::memory_order_seq_cst)) continue;
    bell.armed.store(false, std::memory_order_relaxed);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(bell.fd, &one, sizeof one);
  }
}

}  // namespace phub
