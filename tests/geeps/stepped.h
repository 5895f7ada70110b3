// A device, an exchange and a driver of the cache in one thread: all that is in progress goes on by
// single steps, and a seed chooses the next one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "transport/error.h"
#include "worker/device/device.h"
#include "worker/geeps/driver.h"

namespace phub::geeps::testing {

// Floats that are zero, on pages of their own that nothing has touched yet.
class PageFloats {
 public:
  explicit PageFloats(size_t floats)
      : memory_(std::calloc(floats + 2 * kPage, sizeof(float)), std::free), floats_(floats) {}
  float* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory_.get());
    return static_cast<float*>(memory_.get()) + (kPageBytes - at % kPageBytes) / sizeof(float);
  }
  std::span<float> all() { return {data(), floats_}; }

 private:
  static constexpr size_t kPageBytes = 4096, kPage = kPageBytes / sizeof(float);
  std::unique_ptr<void, decltype(&std::free)> memory_;
  size_t floats_;
};

// Work of a stream in order: something to run, or a point of another stream to wait for.
struct SteppedQueue {
  struct Item {
    std::function<void()> run;
    std::shared_ptr<SteppedQueue> other;
    uint64_t position = 0;
  };
  std::deque<Item> items;
  uint64_t enqueued = 0, done = 0;

  bool can_step() const {
    return !items.empty() && (!items[0].other || items[0].other->done >= items[0].position);
  }
};

class SteppedDevice final : public Device {
 public:
  SteppedDevice(uint64_t budget, bool poison, std::mt19937_64& random)
      : Device("stepped", budget),
        poison_(poison),
        random_(random),
        memory_(budget / sizeof(float)) {
    set_memory(memory_.data());
  }

  uint64_t questions = 0;  // whether an event is done

  bool in_host_memory() const override { return true; }
  std::unique_ptr<Stream> make_stream(std::string name) override;
  std::unique_ptr<Event> make_event() override;

  std::vector<SteppedQueue*> steps() const {  // those that have a next one
    std::vector<SteppedQueue*> steps;
    for (const auto& queue : queues_) {
      if (queue->can_step()) steps.push_back(queue.get());
    }
    return steps;
  }
  static void step(SteppedQueue& queue) {
    SteppedQueue::Item item = std::move(queue.items.front());
    queue.items.pop_front();
    if (item.run) item.run();
    ++queue.done;
  }
  void step_until(const std::function<bool()>& over) {
    while (!over()) {
      const auto next = steps();
      if (next.empty()) fail(ErrorCode::kInternal, "the work of a stream never ends");
      step(*next[random_() % next.size()]);
    }
  }

 private:
  friend class SteppedStream;
  void do_allocated(void* memory, size_t bytes) override {
    if (poison_) std::memset(memory, 0xff, bytes);
  }
  void do_released(void*, size_t) override {}
  void* do_allocate_host(size_t bytes) override {
    PageFloats& memory = host_.emplace_back(bytes / sizeof(float));
    return memory.data();
  }
  void do_release_host(void* memory, size_t) override {
    std::erase_if(host_, [&](PageFloats& one) { return one.data() == memory; });
  }
  void do_pin_host(const void*, size_t, HostUse, std::string_view) override {}
  void do_unpin_host(const void*) noexcept override {}
  void do_write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void do_read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

  bool poison_;
  std::mt19937_64& random_;
  PageFloats memory_;
  std::list<PageFloats> host_;
  std::vector<std::shared_ptr<SteppedQueue>> queues_;
};

class SteppedEvent final : public Event {
 public:
  explicit SteppedEvent(SteppedDevice& device) : Event(device), device_(device) {}
  bool done() const override {
    ++device_.questions;
    return !queue || queue->done >= position;
  }
  void wait() const override {
    device_.step_until([this] { return done(); });
  }

  std::shared_ptr<SteppedQueue> queue;
  uint64_t position = 0;

 private:
  SteppedDevice& device_;
};

class SteppedStream final : public Stream {
 public:
  SteppedStream(SteppedDevice& device, std::string name)
      : Stream(device, std::move(name)),
        device_(device),
        queue_(device.queues_.emplace_back(std::make_shared<SteppedQueue>())) {}
  ~SteppedStream() override {
    do_synchronize();
    std::erase(device_.queues_, queue_);
  }

 private:
  void add(SteppedQueue::Item item) {
    queue_->items.push_back(std::move(item));
    ++queue_->enqueued;
  }
  void copy(void* to, const void* from, size_t bytes) {
    add({.run = [=] { std::memcpy(to, from, bytes); }, .other = {}});
  }
  void do_copy_to_device(void* to, const void* from, size_t bytes) override {
    copy(to, from, bytes);
  }
  void do_copy_to_host(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void do_launch(const Kernel& kernel) override {
    add({.run = [kernel] { run_on_host(kernel); }, .other = {}});
  }
  void do_call(std::function<void()> callback) override {
    add({.run = std::move(callback), .other = {}});
  }
  void do_work_for(std::chrono::nanoseconds) override {}
  void do_record(Event& event) override {
    static_cast<SteppedEvent&>(event).queue = queue_;
    static_cast<SteppedEvent&>(event).position = queue_->enqueued;
  }
  void do_wait(const Event& event) override {
    const auto& point = static_cast<const SteppedEvent&>(event);
    if (!point.done()) add({.run = {}, .other = point.queue, .position = point.position});
  }
  void do_synchronize() override {
    device_.step_until([this] { return queue_->done == queue_->enqueued; });
  }

  SteppedDevice& device_;
  std::shared_ptr<SteppedQueue> queue_;
};

inline std::unique_ptr<Stream> SteppedDevice::make_stream(std::string name) {
  return std::make_unique<SteppedStream>(*this, std::move(name));
}
inline std::unique_ptr<Event> SteppedDevice::make_event() {
  return std::make_unique<SteppedEvent>(*this);
}

// Parameters -= gradient, when a step answers a push. While a key is away its parameters are NaN,
// and its gradient must stay as it was.
class SteppedExchange final : public Exchange {
 public:
  SteppedExchange(const JobSpec& job, std::span<const float> initial) {
    for (const KeySpec& key : job.keys) {
      Key& added = keys_.emplace_back(
          Key{key.name, PageFloats(key.elements), PageFloats(key.elements), {}, {}, false});
      std::ranges::copy(initial.first(key.elements), added.parameters.data());
      initial = initial.subspan(key.elements);
    }
  }
  size_t keys() const override { return keys_.size(); }
  const std::string& name(size_t key) const override { return keys_[key].name; }
  size_t elements(size_t key) const override { return keys_[key].gradient.all().size(); }
  std::span<float> gradient(size_t key) override { return keys_[key].gradient.all(); }
  std::span<const float> parameters(size_t key) const override {
    return keys_[key].parameters.all();
  }
  void push(size_t key, int32_t) override {
    const std::span<float> gradient = keys_[key].gradient.all();
    send(key, {gradient.begin(), gradient.end()});
  }
  void push_null(size_t key) override {
    send(key, std::vector<float>(elements(key)));
    keys_[key].null = true;
  }
  std::optional<size_t> next() override { return {}; }
  void stop() override {}
  std::optional<uint32_t> slack() const override { return 0; }
  uint32_t rank() const override { return 0; }
  uint32_t world_size() const override { return 1; }

  const std::vector<size_t>& pushed() const { return pushed_; }
  size_t answer(size_t which) {
    const size_t number = pushed_[which];
    pushed_.erase(pushed_.begin() + static_cast<long>(which));
    Key& key = keys_[number];
    EXPECT_TRUE(key.null || std::memcmp(key.sent.data(), key.gradient.data(),
                                        key.sent.size() * sizeof(float)) == 0)
        << "the gradient of '" << key.name << "' was written while it was away";
    for (size_t i = 0; i < key.sent.size(); ++i)
      key.parameters.data()[i] = key.before[i] - key.sent[i];
    return number;
  }

 private:
  struct Key {
    std::string name;
    PageFloats parameters, gradient;
    std::vector<float> before, sent;
    bool null = false;
  };
  void send(size_t number, std::vector<float> gradient) {
    Key& key = keys_[number];
    EXPECT_EQ(std::ranges::find(pushed_, number), pushed_.end()) << "pushed twice: " << key.name;
    key.sent = std::move(gradient);
    key.null = false;
    const std::span<float> parameters = key.parameters.all();
    key.before.assign(parameters.begin(), parameters.end());
    std::ranges::fill(parameters, std::numeric_limits<float>::quiet_NaN());
    pushed_.push_back(number);
  }

  mutable std::deque<Key> keys_;
  std::vector<size_t> pushed_;
};

// A step is one of: a lane that is due begins a task, a task is run, a task is finished, a stream
// of the device does a piece of work, the exchange answers a push. Lanes that are not due do
// nothing, so that a wake-up that is missing is an end without a next step.
class SteppedDriver final : public Driver {
 public:
  SteppedDriver(Mover& mover, std::mutex& mutex, std::mt19937_64& random)
      : Driver(mover, mutex), random_(random), tasks_(mover.lanes.all().size()) {}

  void wake() override {}
  void stop() override {}
  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& over,
            std::chrono::milliseconds) override {
    while (!over()) {
      if (!step(lock)) return false;
    }
    return true;
  }
  void play(uint64_t steps) {
    std::unique_lock lock(mutex_);
    while (steps-- > 0 && step(lock)) {
    }
  }

 private:
  struct InProgress {
    std::optional<Task> task;
    bool ran = false;
  };

  bool step(std::unique_lock<std::mutex>& lock) {
    auto& device = static_cast<SteppedDevice&>(mover_.device);
    auto& exchange = static_cast<SteppedExchange&>(mover_.exchange);
    std::vector<size_t> lanes;
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (tasks_[i].task || mover_.lanes.all()[i].due) lanes.push_back(i);
    }
    const auto queues = device.steps();
    const size_t pushed = exchange.pushed().size();
    const size_t choices = lanes.size() + queues.size() + pushed;
    if (choices == 0) return false;
    size_t choice = random_() % choices;
    if (choice < lanes.size()) {
      step(lock, lanes[choice]);
    } else if ((choice -= lanes.size()) < queues.size()) {
      SteppedDevice::step(*queues[choice]);
    } else {
      mover_.arrived(exchange.answer(choice - queues.size()));
    }
    return true;
  }

  void step(std::unique_lock<std::mutex>& lock, size_t i) {
    Lane& lane = mover_.lanes.all()[i];
    InProgress& current = tasks_[i];
    if (!current.task) {
      current.task = mover_.begin(lane);
      if (current.task && current.task->kind == Task::Kind::kFill) check(*current.task);
    } else if (!current.ran) {
      lock.unlock();
      mover_.work.run(lane, *current.task);
      lock.lock();
      current.ran = true;
    } else {
      current.ran = false;
      if (!mover_.finish(*current.task)) current.task.reset();
    }
  }

  // Here a result replaces rows in one step; where lanes are threads it takes its time.
  void check(const Task& fill) const {
    for (const InProgress& other : tasks_) {
      const bool replaces = other.task && other.task->kind == Task::Kind::kPull;
      EXPECT_FALSE(replaces && other.task->table == fill.table && other.task->piece == fill.piece)
          << "rows of table " << fill.table << " are fetched while a result replaces them";
    }
  }

  std::mt19937_64& random_;
  std::vector<InProgress> tasks_;  // by lane
};

}  // namespace phub::geeps::testing
