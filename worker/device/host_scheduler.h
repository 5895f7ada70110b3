// Runs streams of work in threads: one for kernels, one per direction of copies, one for callbacks
// and one for timed work. Each thread runs its kind of work at the heads of the streams in turn,
// and sleeps while there is none.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "worker/device/copy_engine.h"
#include "worker/device/failure.h"
#include "worker/device/kernel.h"

namespace phub {

struct HostQueue;

// A position in a queue, with all work that was enqueued before. An event is such a point.
struct HostPoint {
  HostQueue* queue = nullptr;  // null: done
  uint64_t position = 0;
};

// A word of Signals, and how far it must be raised.
struct HostNumber {
  const uint32_t* word;
  uint32_t number;
};

// A HostPoint or a HostNumber makes the queue wait for it.
using HostWork = std::variant<Kernel, HostCopy, std::function<void()>, std::chrono::nanoseconds,
                              HostPoint, HostNumber>;

// Thread-safe. REQUIRES: all queues are closed before it is destroyed.
class HostScheduler {
 public:
  HostScheduler(std::string device, const CopyEngineOptions& copies);
  ~HostScheduler();
  HostScheduler(const HostScheduler&) = delete;
  HostScheduler& operator=(const HostScheduler&) = delete;

  // Queues live as long as the scheduler, so that points into a closed queue stay valid.
  HostQueue& open(std::string name);
  void close(HostQueue& queue);  // waits for its work

  void enqueue(HostQueue& queue, HostWork work);
  void record(HostQueue& queue, HostPoint& point);
  void enqueue_wait(HostQueue& queue, const HostPoint& point);
  bool is_done(const HostPoint& point);
  void wait(const HostPoint& point);
  void synchronize(HostQueue& queue);
  void raised();  // some words of Signals are

  CopyEngine& engine(bool to_device) { return to_device ? to_device_ : to_host_; }

 private:
  using Clock = CopyEngine::Clock;
  enum Lane : size_t { kKernels, kToDevice, kToHost, kCallbacks, kLanes };
  struct LaneState {
    std::deque<HostQueue*> ready;  // queues whose head is work of this lane
    std::condition_variable wake;
    std::thread thread;
  };
  struct Outcome {
    Clock::time_point end;
    std::optional<std::string> error;
  };

  void stop();
  void serve(Lane lane);
  void serve_timers();
  Outcome run(HostWork& work, Clock::time_point ready);
  void push(HostQueue& queue, HostWork work);
  void finish(HostQueue& queue, Outcome outcome);
  void advance(HostQueue& queue);
  void start_next(HostQueue& queue);
  void wait(std::unique_lock<std::mutex>& lock, const HostPoint& point);

  std::string device_;
  CopyEngine to_device_;
  CopyEngine to_host_;

  std::mutex mutex_;  // guards all that follows
  std::deque<HostQueue> queues_;
  std::vector<HostQueue*> closed_;
  std::vector<HostQueue*> unsignalled_;  // those whose head is a HostNumber that is not reached
  std::array<LaneState, kLanes> lanes_;
  std::set<std::pair<Clock::time_point, HostQueue*>> timers_;
  std::condition_variable timer_wake_;
  std::thread timer_thread_;
  bool stopping_ = false;
};

}  // namespace phub
