#include "worker/device/host_scheduler.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "transport/error.h"

namespace phub {

struct HostQueue {
  static constexpr uint64_t kNobody = std::numeric_limits<uint64_t>::max();

  std::string name;
  std::deque<HostWork> pending;        // the head may be at work in a lane
  uint64_t completed = 0;              // how much work is done, ever; what is dropped counts
  std::vector<HostQueue*> followers;   // whose head waits for this queue
  uint64_t sleepers_target = kNobody;  // the least position that a sleeping thread waits for
  std::condition_variable progress;
  std::shared_ptr<Failure> failure;
  uint64_t failed_at = kNobody;  // positions behind this one are lost
  // When the head could begin if threads woke up at once: so that delays of the machine do not add
  // up in a chain of timed work and throttled copies.
  CopyEngine::Clock::time_point ready_at;

  uint64_t enqueued() const { return completed + pending.size(); }
  bool lost(uint64_t position) const { return failure != nullptr && position > failed_at; }
  void fail_here(std::shared_ptr<Failure> with) {
    failure = std::move(with);
    failed_at = completed;
  }
};

namespace {

bool is_reached(const HostNumber& wanted) {
  const auto word = std::atomic_ref(*const_cast<uint32_t*>(wanted.word));
  return static_cast<int32_t>(word.load(std::memory_order_acquire) - wanted.number) >= 0;
}

}  // namespace

HostScheduler::HostScheduler(std::string device, const CopyEngineOptions& copies)
    : device_(std::move(device)), to_device_(copies), to_host_(copies) {
  try {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes_[lane].thread = std::thread([this, lane] { serve(static_cast<Lane>(lane)); });
    }
    timer_thread_ = std::thread([this] { serve_timers(); });
  } catch (...) {  // there are no more: those that are there end
    stop();
    throw;
  }
}

HostScheduler::~HostScheduler() { stop(); }

void HostScheduler::stop() {
  {
    const std::lock_guard lock(mutex_);
    PHUB_CHECK(closed_.size() == queues_.size());
    stopping_ = true;
    for (LaneState& lane : lanes_) lane.wake.notify_all();
    timer_wake_.notify_all();
  }
  for (LaneState& lane : lanes_) {
    if (lane.thread.joinable()) lane.thread.join();
  }
  if (timer_thread_.joinable()) timer_thread_.join();
}

HostQueue& HostScheduler::open(std::string name) {
  const std::lock_guard lock(mutex_);
  // A failed queue is not used again: there may be events that must go on to say so.
  const auto usable = std::find_if(closed_.begin(), closed_.end(),
                                   [](const HostQueue* q) { return q->failure == nullptr; });
  HostQueue* queue = nullptr;
  if (usable == closed_.end()) {
    queue = &queues_.emplace_back();
  } else {
    queue = *usable;
    closed_.erase(usable);
  }
  queue->name = std::move(name);
  return *queue;
}

void HostScheduler::close(HostQueue& queue) {
  std::unique_lock lock(mutex_);
  wait(lock, {&queue, queue.enqueued()});
  closed_.push_back(&queue);
}

void HostScheduler::enqueue(HostQueue& queue, HostWork work) {
  const std::lock_guard lock(mutex_);
  push(queue, std::move(work));
}

void HostScheduler::enqueue_wait(HostQueue& queue, const HostPoint& point) {
  const std::lock_guard lock(mutex_);
  if (point.queue != nullptr) push(queue, point);
}

void HostScheduler::push(HostQueue& queue, HostWork work) {
  if (queue.failure != nullptr) queue.failure->raise(device_, queue.name);
  const bool idle = queue.pending.empty();
  queue.pending.push_back(std::move(work));
  if (!idle) return;
  queue.ready_at = std::max(queue.ready_at, Clock::now());
  advance(queue);
}

void HostScheduler::record(HostQueue& queue, HostPoint& point) {
  const std::lock_guard lock(mutex_);
  if (queue.failure != nullptr) queue.failure->raise(device_, queue.name);
  point = {&queue, queue.enqueued()};
}

bool HostScheduler::is_done(const HostPoint& point) {
  const std::lock_guard lock(mutex_);
  if (point.queue == nullptr) return true;
  if (point.queue->completed < point.position) return false;
  if (point.queue->lost(point.position)) point.queue->failure->raise(device_, point.queue->name);
  return true;
}

void HostScheduler::wait(const HostPoint& point) {
  std::unique_lock lock(mutex_);
  const HostPoint now = point;  // it may be recorded again meanwhile
  wait(lock, now);
  if (now.queue != nullptr && now.queue->lost(now.position)) {
    now.queue->failure->raise(device_, now.queue->name);
  }
}

void HostScheduler::wait(std::unique_lock<std::mutex>& lock, const HostPoint& point) {
  if (point.queue == nullptr) return;
  HostQueue& queue = *point.queue;
  while (queue.completed < point.position) {
    queue.sleepers_target = std::min(queue.sleepers_target, point.position);
    queue.progress.wait(lock);
  }
}

void HostScheduler::synchronize(HostQueue& queue) {
  std::unique_lock lock(mutex_);
  wait(lock, {&queue, queue.enqueued()});
  if (queue.failure != nullptr) queue.failure->raise(device_, queue.name);
}

// The lock orders this after a start_next() that has read an old number, or before it.
void HostScheduler::raised() {
  const std::lock_guard lock(mutex_);
  for (HostQueue* queue : std::exchange(unsignalled_, {})) {
    queue->ready_at = std::max(queue->ready_at, Clock::now());
    advance(*queue);
  }
}

void HostScheduler::serve(Lane lane) {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; the usual 50 µs are more than a copy's latency
  std::unique_lock lock(mutex_);
  LaneState& state = lanes_[lane];
  while (true) {
    state.wake.wait(lock, [&] { return stopping_ || !state.ready.empty(); });
    if (state.ready.empty()) return;
    HostQueue& queue = *state.ready.front();
    state.ready.pop_front();
    HostWork& head = queue.pending.front();  // stays in place while others are pushed behind it
    const auto ready = queue.ready_at;
    lock.unlock();
    Outcome outcome = run(head, ready);
    lock.lock();
    finish(queue, std::move(outcome));
  }
}

HostScheduler::Outcome HostScheduler::run(HostWork& work, Clock::time_point ready) {
  if (const auto* copy = std::get_if<HostCopy>(&work)) {
    auto [end, error] = engine(copy->to_device).move(*copy, ready);
    return {end, std::move(error)};
  }
  if (const auto* kernel = std::get_if<Kernel>(&work)) run_on_host(*kernel);
  if (auto* callback = std::get_if<std::function<void()>>(&work)) {
    [&]() noexcept { (*callback)(); }();
    *callback = nullptr;  // what it holds is given back here, not under the lock
  }
  return {Clock::now(), std::nullopt};
}

void HostScheduler::serve_timers() {
  prctl(PR_SET_TIMERSLACK, 1000);
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (timers_.empty()) {
      timer_wake_.wait(lock);
      continue;
    }
    const auto [end, queue] = *timers_.begin();
    if (Clock::now() < end) {
      timer_wake_.wait_until(lock, end);
      continue;
    }
    timers_.erase(timers_.begin());
    finish(*queue, {end, std::nullopt});
  }
}

void HostScheduler::finish(HostQueue& queue, Outcome outcome) {
  if (outcome.error) {
    queue.fail_here(
        std::make_shared<Failure>(fmt::format("stream '{}': {}", queue.name, *outcome.error)));
  } else {
    queue.pending.pop_front();
    ++queue.completed;
    queue.ready_at = outcome.end;
  }
  advance(queue);
}

// REQUIRES: the queue's head is not at work. Starts what can run now, there and in the queues that
// wait for it.
void HostScheduler::advance(HostQueue& first) {
  std::vector<HostQueue*> queues{&first};
  while (!queues.empty()) {
    HostQueue& queue = *queues.back();
    queues.pop_back();
    start_next(queue);
    if (queue.completed >= queue.sleepers_target) {
      queue.sleepers_target = HostQueue::kNobody;
      queue.progress.notify_all();
    }
    queues.insert(queues.end(), queue.followers.begin(), queue.followers.end());
    queue.followers.clear();
  }
}

void HostScheduler::start_next(HostQueue& queue) {
  while (!queue.pending.empty()) {
    if (queue.failure != nullptr) {
      queue.completed += queue.pending.size();
      queue.pending.clear();
      return;
    }
    const HostWork& head = queue.pending.front();
    if (const auto* point = std::get_if<HostPoint>(&head)) {
      HostQueue& other = *point->queue;
      if (other.completed < point->position) {
        other.followers.push_back(&queue);
        return;
      }
      if (other.lost(point->position)) {
        queue.fail_here(other.failure);
      } else {
        queue.ready_at = std::max(queue.ready_at, other.ready_at);
        queue.pending.pop_front();
        ++queue.completed;
      }
      continue;
    }
    if (const auto* raised = std::get_if<HostNumber>(&head)) {
      if (!is_reached(*raised)) {
        unsignalled_.push_back(&queue);
        return;
      }
      queue.pending.pop_front();
      ++queue.completed;
      continue;
    }
    if (const auto* time = std::get_if<std::chrono::nanoseconds>(&head)) {
      timers_.emplace(queue.ready_at + *time, &queue);
      timer_wake_.notify_one();
      return;
    }
    Lane lane = kCallbacks;
    if (std::holds_alternative<Kernel>(head)) lane = kKernels;
    if (const auto* copy = std::get_if<HostCopy>(&head))
      lane = copy->to_device ? kToDevice : kToHost;
    lanes_[lane].ready.push_back(&queue);
    lanes_[lane].wake.notify_one();
    return;
  }
}

}  // namespace phub
