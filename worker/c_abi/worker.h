// The object behind phub_worker.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "worker/c_abi/handles.h"
#include "worker/completions.h"
#include "worker/worker.h"

namespace phub::c_abi {

struct WorkerObject : Object {
  static constexpr Type kType = Type::kWorker;
  WorkerObject(std::unique_ptr<Worker> made, std::shared_ptr<Object> device)
      : memory_device(std::move(device)),
        owned(std::move(made)),
        worker(*owned),
        completions(worker) {}
  const std::shared_ptr<Object> memory_device;  // in which its keys lie; null: the host's
  const std::unique_ptr<Worker> owned;
  Worker& worker;
  Completions completions;
  // The object that pushes its keys: its caller, a phub_geeps or a phub_device_keys.
  std::atomic<Type> exchanger = Type::kWorker;
  std::atomic<bool> has_completions = false;  // phub_push_then was called
  std::mutex rejoining;
};

// The exclusive use of a worker's keys by a phub_geeps or phub_device_keys, for as long as this
// lives.
class KeysOfWorker {
 public:
  KeysOfWorker(std::shared_ptr<WorkerObject> object, Type exchanger)  // throws Refusal(PHUB_TAKEN)
      : object_(std::move(object)) {
    if (object_->has_completions) {
      throw Refusal(PHUB_INVALID, "the worker's results are waited for by its completions");
    }
    Type before = Type::kWorker;
    if (!object_->exchanger.compare_exchange_strong(before, exchanger)) {
      throw Refusal(PHUB_TAKEN, fmt::format("the worker has a {} already", name_of(before)));
    }
  }
  ~KeysOfWorker() { object_->exchanger = Type::kWorker; }
  KeysOfWorker(const KeysOfWorker&) = delete;
  KeysOfWorker& operator=(const KeysOfWorker&) = delete;
  Worker& worker() const { return object_->worker; }

 private:
  std::shared_ptr<WorkerObject> object_;
};

// Throws Refusal(PHUB_WRONG_THREAD) within a completion, which would wait for its own thread.
inline void check_may_wait() {
  if (Completions::in_callback()) {
    throw Refusal(PHUB_WRONG_THREAD, "a completion may neither wait nor destroy");
  }
}

}  // namespace phub::c_abi
