#include "bench/zerocompute/shared.h"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>

#include "numa/relax.h"
#include "transport/error.h"

namespace phub {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

void Signal::raise() {
  value_.fetch_add(1, std::memory_order_acq_rel);
  syscall(SYS_futex, &value_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Signal::wait(uint32_t seen, int64_t spin_ns) const {
  if (spin_ns > 0) {
    const int64_t until = monotonic_ns() + spin_ns;
    while (value() == seen && monotonic_ns() < until) numa::relax();
  }
  while (value() == seen) {
    syscall(SYS_futex, &value_, FUTEX_WAIT, seen, nullptr, nullptr, 0);
  }
}

void ProcessBarrier::init(uint32_t parties, int64_t spin_ns) {
  parties_ = parties;
  spin_ns_ = spin_ns;
}

bool ProcessBarrier::wait() {
  const uint32_t seen = passed_.value();
  if (aborted()) return false;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
    arrived_.store(0, std::memory_order_release);
    passed_.raise();
  } else {
    passed_.wait(seen, spin_ns_);
  }
  return !aborted();
}

void ProcessBarrier::abort() {
  aborted_.store(true, std::memory_order_release);
  passed_.raise();
}

void set_text(std::span<char> field, std::string_view text) {
  const size_t n = std::min(text.size(), field.size() - 1);
  std::copy_n(text.data(), n, field.data());
  field[n] = '\0';
}

SharedCase::SharedCase(uint32_t workers, size_t reference_bytes, int64_t spin_ns) {
  constexpr size_t kPage = 4096;
  const auto pages = [](size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; };
  const size_t head = pages(sizeof(SharedHead));
  const size_t slots = pages(workers * sizeof(WorkerSlot));
  const size_t times = pages(kMaxRounds * sizeof(double));
  map_bytes_ = head + slots + times + pages(reference_bytes);
  map_ = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE,
              MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) {
    fail(ErrorCode::kFull, "{} bytes of memory for the checker's reference: {}", map_bytes_,
         std::strerror(errno));
  }
  parked_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (parked_fd_ < 0) {
    const int error = errno;
    munmap(map_, map_bytes_);
    fail(ErrorCode::kFull, "eventfd: {}", std::strerror(error));
  }
  std::byte* at = static_cast<std::byte*>(map_);
  head_ = new (at) SharedHead;
  head_->workers.init(workers, spin_ns);
  slots_ = {reinterpret_cast<WorkerSlot*>(at + head), workers};
  for (WorkerSlot& slot : slots_) new (&slot) WorkerSlot;
  round_us_ = {reinterpret_cast<double*>(at + head + slots), kMaxRounds};
  reference_ = {at + head + slots + times, reference_bytes};
}

SharedCase::~SharedCase() {
  munmap(map_, map_bytes_);
  close(parked_fd_);
}

}  // namespace phub
