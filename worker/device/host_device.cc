#include "worker/device/host_device.h"

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "numa/memory.h"
#include "transport/error.h"
#include "worker/device/host_scheduler.h"
#include "worker/device/poison.h"

namespace phub {
namespace {

class HostEvent : public Event {
 public:
  HostEvent(Device& device, HostScheduler& scheduler) : Event(device), scheduler_(scheduler) {}
  bool done() const override { return scheduler_.is_done(point); }
  void wait() const override { scheduler_.wait(point); }

  HostPoint point;  // guarded by the scheduler

 private:
  HostScheduler& scheduler_;
};

class HostStream : public Stream {
 public:
  HostStream(Device& device, HostScheduler& scheduler, const std::string& name)
      : Stream(device, name), scheduler_(scheduler), queue_(scheduler.open(name)) {}
  ~HostStream() override { scheduler_.close(queue_); }

 private:
  void do_copy_to_device(void* to, const void* from, size_t bytes) override {
    scheduler_.enqueue(queue_, HostCopy{true, to, from, bytes});
  }
  void do_copy_to_host(void* to, const void* from, size_t bytes) override {
    scheduler_.enqueue(queue_, HostCopy{false, to, from, bytes});
  }
  void do_launch(const Kernel& kernel) override { scheduler_.enqueue(queue_, kernel); }
  void do_call(std::function<void()> callback) override {
    scheduler_.enqueue(queue_, std::move(callback));
  }
  void do_work_for(std::chrono::nanoseconds time) override { scheduler_.enqueue(queue_, time); }
  void do_record(Event& event) override {
    scheduler_.record(queue_, static_cast<HostEvent&>(event).point);
  }
  void do_wait(const Event& event) override {
    scheduler_.enqueue_wait(queue_, static_cast<const HostEvent&>(event).point);
  }
  void do_synchronize() override { scheduler_.synchronize(queue_); }
  void do_wait_for(const uint32_t* word, uint32_t number) override {
    scheduler_.enqueue(queue_, HostNumber{word, number});
  }

  HostScheduler& scheduler_;
  HostQueue& queue_;
};

class HostSignals : public Signals {
 public:
  HostSignals(Device& device, HostScheduler& scheduler, size_t count)
      : Signals(device, count), scheduler_(scheduler) {}

 private:
  void do_raised() override { scheduler_.raised(); }

  HostScheduler& scheduler_;
};

class HostDeviceImpl : public HostDevice {
 public:
  explicit HostDeviceImpl(const HostDeviceOptions& options)
      : HostDevice(options.name, options.budget_bytes),
        numa_node_(options.numa_node),
        holds_all_memory_(options.holds_all_memory),
        pages_(options.pages),
        host_budget_(options.host_budget_bytes),
        arena_memory_(options.budget_bytes, options.numa_node),
        scheduler_(options.name,
                   {options.copy_bytes_per_second, options.copy_latency, options.poison_copies}) {
    set_memory(arena_memory_.bytes().data());
    forbid(arena_memory_.bytes().data(), options.budget_bytes);
  }
  ~HostDeviceImpl() override { permit(arena_memory_.bytes().data(), arena_memory_.bytes().size()); }

  bool in_host_memory() const override { return true; }
  std::unique_ptr<Stream> make_stream(std::string name) override {
    return std::make_unique<HostStream>(*this, scheduler_, name);
  }
  std::unique_ptr<Event> make_event() override {
    return std::make_unique<HostEvent>(*this, scheduler_);
  }
  std::unique_ptr<Signals> make_signals(size_t count) override {
    return std::make_unique<HostSignals>(*this, scheduler_, count);
  }
  void fail_copy(Direction direction, uint64_t copies, size_t bytes) override {
    scheduler_.engine(direction == Direction::kToDevice).inject_failure(copies, bytes);
  }

 private:
  bool holds_of_others(const void* /*memory*/, size_t /*bytes*/) const override {
    return holds_all_memory_;
  }
  void do_allocated(void* memory, size_t bytes) override {
    permit(memory, bytes);
    poison(memory, bytes);
  }
  void do_released(void* memory, size_t bytes) override {
    poison(memory, bytes);
    forbid(memory, bytes);
  }
  void* do_allocate_host(size_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (host_budget_ > 0 && bytes > host_budget_ - pinned_bytes_) {
      fail(ErrorCode::kFull, "{} of {} bytes are in use", pinned_bytes_, host_budget_);
    }
    numa::Memory memory(bytes, numa_node_);
    void* data = memory.bytes().data();
    pinned_.emplace(data, std::move(memory));
    pinned_bytes_ += bytes;
    return data;
  }
  void do_release_host(void* memory, size_t bytes) override {
    const std::lock_guard lock(mutex_);
    pinned_.erase(memory);
    pinned_bytes_ -= bytes;
  }
  void do_pin_host(const void* memory, size_t bytes, HostUse use, std::string_view what) override {
    if (pages_ != nullptr) pages_->pin(memory, bytes, use, what);
  }
  void do_unpin_host(const void* memory) noexcept override {
    if (pages_ != nullptr) pages_->unpin(memory);
  }
  void do_write(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void do_read(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

  uint32_t numa_node_;
  bool holds_all_memory_;
  HostPages* pages_;
  size_t host_budget_;
  numa::Memory arena_memory_;
  std::mutex mutex_;  // guards the next two
  std::map<void*, numa::Memory> pinned_;
  size_t pinned_bytes_ = 0;
  HostScheduler scheduler_;
};

}  // namespace

std::unique_ptr<HostDevice> make_host_device(const HostDeviceOptions& options) {
  if (options.copy_bytes_per_second < 0 || options.copy_latency.count() < 0) {
    fail(ErrorCode::kInvalid, "{}: a copy bandwidth or latency below 0", options.name);
  }
  try {
    return std::make_unique<HostDeviceImpl>(options);
  } catch (const std::exception& e) {
    fail(ErrorCode::kFull, "{}: a budget of {} bytes: {}", options.name, options.budget_bytes,
         e.what());
  }
}

}  // namespace phub
