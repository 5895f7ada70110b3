// What a phub_options is.
#pragma once

#include <mutex>

#include "worker/c_abi_handles.h"
#include "worker/worker.h"

namespace phub::c_abi {

struct OptionsObject : Object {
  static constexpr Type kType = Type::kOptions;
  std::mutex mutex;
  WorkerOptions options;  // guarded by mutex
};

}  // namespace phub::c_abi
