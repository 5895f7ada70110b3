// What a phub_device, a phub_geeps_options and a phub_geeps are.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "worker/c_abi_handles.h"
#include "worker/c_abi_worker.h"
#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/exchange.h"

namespace phub::c_abi {

struct DeviceObject : Object {
  static constexpr Type kType = Type::kDevice;
  std::unique_ptr<Device> device;
};

struct GeepsOptionsObject : Object {
  static constexpr Type kType = Type::kGeepsOptions;
  std::mutex mutex;  // guards what follows
  geeps::CacheOptions options;
  std::vector<geeps::TableSpec> tables;
};

// What a worker's cache holds of it: its keys, from the beginning to the end.
class KeysOfWorker {
 public:
  explicit KeysOfWorker(std::shared_ptr<WorkerObject> object);  // throws Refusal(PHUB_TAKEN)
  ~KeysOfWorker() { object_->has_cache = false; }
  KeysOfWorker(const KeysOfWorker&) = delete;
  KeysOfWorker& operator=(const KeysOfWorker&) = delete;
  Worker& worker() const { return object_->worker; }

 private:
  std::shared_ptr<WorkerObject> object_;
};

// A call of it is one thread's at a time. The members go from the last to the first.
struct GeepsObject : Object {
  static constexpr Type kType = Type::kGeeps;
  std::mutex call;
  std::shared_ptr<DeviceObject> device;
  std::unique_ptr<KeysOfWorker> keys;  // null: standalone
  // Where device memory is not the caller's to touch: the work that a buffer waits for.
  std::unique_ptr<Stream> compute;
  std::unique_ptr<geeps::Exchange> exchange;
  std::unique_ptr<geeps::Cache> cache;
  bool placed = false;
};

}  // namespace phub::c_abi
