// The objects behind phub_geeps_options, phub_geeps and phub_device_group.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "worker/c_abi/device.h"
#include "worker/c_abi/handles.h"
#include "worker/c_abi/worker.h"
#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/exchange.h"

namespace phub::c_abi {

struct GeepsOptionsObject : Object {
  static constexpr Type kType = Type::kGeepsOptions;
  std::mutex mutex;  // guards the members below
  geeps::CacheOptions options;
  std::vector<geeps::TableSpec> tables;
  std::optional<void*> stream;  // phub_geeps_options_set_stream was called with it
};

// The exchange of a worker's keys, or of a job without a server. Members are destroyed from the
// last to the first.
struct OwnExchange {
  std::unique_ptr<KeysOfWorker> keys;  // null: standalone
  std::unique_ptr<geeps::Exchange> exchange;
};
OwnExchange exchange_of(phub_worker* worker, std::span<const geeps::TableSpec> tables,
                        Type exchanger);
OwnExchange standalone_exchange(const phub_options* job, const float* initial, size_t elements);

// The phub_geeps of its members keep it. Members are destroyed from the last to the first.
struct DeviceGroupObject : Object {
  static constexpr Type kType = Type::kDeviceGroup;
  OwnExchange downstream;
  std::unique_ptr<geeps::DeviceGroup> group;
  std::mutex mutex;         // guards the next one
  std::vector<bool> taken;  // by member: it has, or had, a phub_geeps
};

// Calls are serialised by `call`. Members are destroyed from the last to the first.
struct GeepsObject : Object {
  static constexpr Type kType = Type::kGeeps;
  std::mutex call;
  std::shared_ptr<DeviceObject> device;
  std::shared_ptr<DeviceGroupObject> group;  // whose member its exchange is; null: it has its own
  OwnExchange own;
  std::shared_ptr<HostStreamObject> host_stream;  // the caller's; null: it has none
  std::unique_ptr<Stream> compute;                // of the device, if that is not of host memory
  // The one in which buffers become ready, if the caller computes elsewhere on the device: calls
  // wait for it before they return a buffer. Null: there is none.
  Stream* awaited = nullptr;
  std::unique_ptr<geeps::Cache> cache;
  bool placed = false;
};

// Makes a phub_geeps over the exchange that `exchange_for(object, tables)` returns, which lives as
// long as the object.
using ExchangeFor =
    std::function<geeps::Exchange&(GeepsObject& object, std::span<const geeps::TableSpec> tables)>;
phub_code create_geeps(const char* function, const phub_device* device,
                       const phub_geeps_options* options, phub_geeps** geeps,
                       const ExchangeFor& exchange_for);

}  // namespace phub::c_abi
