// What a phub_worker is.
#pragma once

#include <atomic>

#include "worker/c_abi_handles.h"
#include "worker/completions.h"
#include "worker/worker.h"

namespace phub::c_abi {

struct WorkerObject : Object {
  static constexpr Type kType = Type::kWorker;
  explicit WorkerObject(const WorkerOptions& options) : worker(options), completions(worker) {}
  Worker worker;
  Completions completions;
  std::atomic<bool> has_cache = false;        // a phub_geeps pushes its keys
  std::atomic<bool> has_completions = false;  // they wait for what was pushed
};

// Throws Refusal(PHUB_WRONG_THREAD) in a completion: one that waits would keep the results back
// that it waits for.
inline void may_wait() {
  if (Completions::in_callback()) {
    throw Refusal(PHUB_WRONG_THREAD, "a completion may neither wait nor destroy");
  }
}

}  // namespace phub::c_abi
