// The memory that the coordinator and the worker processes of a measurement share: a barrier, the
// coordinator's orders and the workers' reports, in an anonymous mapping made before the fork.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "worker/worker.h"

namespace phub {

int64_t monotonic_ns();

// A counter in shared memory that processes sleep on.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void raise();  // adds one and wakes everyone
  // Waits until the value is not `seen` any more. Spins for `spin_ns` first.
  void wait(uint32_t seen, int64_t spin_ns) const;

 private:
  std::atomic<uint32_t> value_{0};
};

// A barrier of a fixed number of processes, used again and again.
class ProcessBarrier {
 public:
  void init(uint32_t parties, int64_t spin_ns);
  // Returns false after abort(), which ends all waits.
  bool wait();
  void abort();
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

 private:
  std::atomic<uint32_t> arrived_{0};
  std::atomic<bool> aborted_{false};
  uint32_t parties_ = 0;
  int64_t spin_ns_ = 0;
  Signal passed_;
};

// The largest number of measured rounds of a case.
inline constexpr uint64_t kMaxRounds = 1u << 20;

// For so many of them the times of each rank are kept.
inline constexpr uint64_t kLatenessRounds = 2048;

// Written by the coordinator while all workers are parked.
struct Order {
  bool finish = false;        // leave the job and exit
  bool record = false;        // measure these rounds
  uint64_t rounds = 0;        // at most
  uint64_t least_rounds = 0;  // at least, whatever the deadline
  int64_t deadline_ns = 0;    // monotonic
};

// The sizes of a worker's messages in a round.
struct CaseSizes {
  uint64_t elements = 0, keys = 0, chunks = 0;
  uint64_t bytes = 0;         // one worker's gradient, as it is sent
  uint64_t result_bytes = 0;  // the parameters that come back
};

// One per worker, on cache lines of its own. Written by that worker.
struct alignas(128) WorkerSlot {
  int64_t start_ns = 0, pushed_ns = 0, end_ns = 0;  // those of the present round
  int64_t run_ns = 0;                               // its processor time in the measured exchanges
  uint64_t wrong = 0;                               // elements, all rounds
  uint64_t checked = 0;                             // elements, all rounds
  WorkerStats stats;                                // at the end
  CaseSizes sizes;                                  // once it has joined
  // The times of the first measured rounds, from the round's start. Written by rank 0.
  std::array<double, kLatenessRounds> pushed_us{}, done_us{};
  char wrong_text[384] = {};  // the first wrong element
  char error[1024] = {};      // the reason why the worker gave up
};
void set_text(std::span<char> field, std::string_view text);

struct SharedHead {
  ProcessBarrier workers;
  Signal orders;  // raised for every new order
  Order order;
  std::atomic<bool> stop{false};         // rank 0: this order is done
  std::atomic<uint64_t> rounds_done{0};  // counts all rounds of rank 0
  std::atomic<uint64_t> recorded{0};     // counts those in round_us
};

// The mapping. Made by the coordinator; inherited by its children, never copied.
class SharedCase {
 public:
  // Throws Error(kFull) if there is not enough memory.
  SharedCase(uint32_t workers, size_t reference_bytes, int64_t spin_ns);
  ~SharedCase();
  SharedCase(const SharedCase&) = delete;
  SharedCase& operator=(const SharedCase&) = delete;

  SharedHead& head() const { return *head_; }
  std::span<WorkerSlot> slots() const { return slots_; }
  std::span<double> round_us() const { return round_us_; }
  std::span<std::byte> reference() const { return reference_; }
  int parked_fd() const { return parked_fd_; }  // eventfd: rank 0 adds one when all are parked

 private:
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
  int parked_fd_ = -1;
  SharedHead* head_ = nullptr;
  std::span<WorkerSlot> slots_;
  std::span<double> round_us_;
  std::span<std::byte> reference_;
};

}  // namespace phub
