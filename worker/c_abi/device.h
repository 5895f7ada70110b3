// The objects behind phub_device and phub_host_stream.
#pragma once

#include <memory>

#include "worker/c_abi/handles.h"
#include "worker/device/device.h"

namespace phub::c_abi {

struct DeviceObject : Object {
  static constexpr Type kType = Type::kDevice;
  std::unique_ptr<Device> device;
};

// Members are destroyed from the last to the first.
struct HostStreamObject : Object {
  static constexpr Type kType = Type::kHostStream;
  std::shared_ptr<DeviceObject> device;
  std::unique_ptr<Stream> stream;
};

}  // namespace phub::c_abi
