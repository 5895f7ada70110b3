// The object behind phub_worker.
#pragma once

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
  explicit WorkerObject(std::unique_ptr<Worker> made)
      : owned(std::move(made)), worker(*owned), completions(worker) {}
  const std::unique_ptr<Worker> owned;
  Worker& worker;
  Completions completions;
  std::atomic<bool> has_cache = false;        // a phub_geeps pushes its keys
  std::atomic<bool> has_completions = false;  // phub_push_then was called
  std::mutex rejoining;
};

// Throws Refusal(PHUB_WRONG_THREAD) within a completion, which would wait for its own thread.
inline void check_may_wait() {
  if (Completions::in_callback()) {
    throw Refusal(PHUB_WRONG_THREAD, "a completion may neither wait nor destroy");
  }
}

}  // namespace phub::c_abi
