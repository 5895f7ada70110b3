// A thread for each lane; that of the pull lane waits for the exchange, too.
#include "worker/geeps/driver.h"

#include <condition_variable>
#include <deque>
#include <thread>

#include "worker/any_error.h"

namespace phub::geeps {

void Driver::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!mover_.fail(error)) return;
    wake();
  }
  mover_.exchange.abandon(mover_.failure.error());  // which stays from here on
}

namespace {

class Threads final : public Driver {
 public:
  Threads(Mover& mover, std::mutex& mutex) : Driver(mover, mutex) {
    constexpr const char* kNames[] = {"geeps-fetch", "geeps-reclaim", "geeps-push", "geeps-pull"};
    wakes_.resize(mover.lanes.all().size());
    try {
      for (size_t i = 0; i < mover.lanes.all().size(); ++i) {
        const Lane::Kind kind = mover.lanes.all()[i].kind;
        threads_.push_back(start_thread(kNames[static_cast<size_t>(kind)],
                                        [this, i, kind](const std::stop_token&) {
                                          try {
                                            kind == Lane::Kind::kPull ? pull() : serve(i);
                                          } catch (...) {
                                            fail(std::current_exception());
                                          }
                                        }));
      }
    } catch (...) {  // too many threads: end those that were started
      stop();
      throw;
    }
  }
  ~Threads() override { stop(); }

  void wake() override {
    for (size_t i = 0; i < wakes_.size(); ++i) {
      if (mover_.lanes.all()[i].due) wakes_[i].notify_one();
    }
    if (mover_.failure.happened()) changed_.notify_all();
  }

  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& over,
            std::chrono::milliseconds limit) override {
    const auto over_or_woken = [&] {
      if (over()) return true;
      wake();  // over() may have made lanes due
      return false;
    };
    if (limit.count() > 0) return changed_.wait_for(lock, limit, over_or_woken);
    changed_.wait(lock, over_or_woken);
    return true;
  }

  void stop() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      for (auto& wake : wakes_) wake.notify_one();
    }
    if (threads_.size() == wakes_.size()) mover_.exchange.stop();  // the pull thread was started
    for (auto& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

 private:
  // Waits for the lane's next task and runs it. False: there will be none.
  bool serve_one(std::unique_lock<std::mutex>& lock, size_t i) {
    Lane& lane = mover_.lanes.all()[i];
    std::optional<Task> task;
    wakes_[i].wait(lock, [&] {
      if (stopping_ || mover_.failure.happened()) return true;
      if (lane.due) task = mover_.begin(lane);
      if (!task) wake();  // begin() may have given parts to other lanes
      return task.has_value();
    });
    if (!task) return false;
    wake();  // begin() may have given parts to other lanes
    bool more = true;
    while (more) {
      lock.unlock();
      mover_.work.run(lane, *task);
      lock.lock();
      more = mover_.finish(*task);
      changed_.notify_all();
      wake();
    }
    return true;
  }

  void serve(size_t lane) {
    std::unique_lock lock(mutex_);
    while (serve_one(lock, lane)) {
    }
  }

  void pull() {
    while (const std::optional<size_t> key = mover_.exchange.next()) {
      std::unique_lock lock(mutex_);
      mover_.arrived(*key);
      if (!serve_one(lock, wakes_.size() - 1)) return;
    }
  }

  std::deque<std::condition_variable> wakes_;  // by lane
  std::condition_variable changed_;            // for the application
  bool stopping_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace

std::unique_ptr<Driver> make_threads(Mover& mover, std::mutex& mutex) {
  return std::make_unique<Threads>(mover, mutex);
}

}  // namespace phub::geeps
