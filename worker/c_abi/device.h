// The object behind phub_device.
#pragma once

#include <memory>

#include "worker/c_abi/handles.h"
#include "worker/device/device.h"

namespace phub::c_abi {

struct DeviceObject : Object {
  static constexpr Type kType = Type::kDevice;
  std::unique_ptr<Device> device;
};

}  // namespace phub::c_abi
