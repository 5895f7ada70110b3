// The objects behind phub_geeps_options and phub_geeps.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "worker/c_abi/device.h"
#include "worker/c_abi/handles.h"
#include "worker/c_abi/worker.h"
#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/exchange.h"

namespace phub::c_abi {

struct GeepsOptionsObject : Object {
  static constexpr Type kType = Type::kGeepsOptions;
  std::mutex mutex;  // guards the members below
  geeps::CacheOptions options;
  std::vector<geeps::TableSpec> tables;
};

// Calls are serialised by `call`. Members are destroyed from the last to the first.
struct GeepsObject : Object {
  static constexpr Type kType = Type::kGeeps;
  std::mutex call;
  std::shared_ptr<DeviceObject> device;
  std::unique_ptr<KeysOfWorker> keys;  // null: standalone
  // Null where the caller computes in device memory itself; else buffers wait for its work.
  std::unique_ptr<Stream> compute;
  std::unique_ptr<geeps::Exchange> exchange;
  std::unique_ptr<geeps::Cache> cache;
  bool placed = false;
};

}  // namespace phub::c_abi
