// Keys on a device, of phub.h, over worker/device_keys.h.
#include "worker/device_keys.h"

#include <fmt/format.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "worker/c_abi/call.h"
#include "worker/c_abi/device.h"
#include "worker/c_abi/worker.h"

namespace phub::c_abi {
namespace {

static_assert(DeviceKeys::kDeviceBytes == PHUB_DEVICE_KEYS_BYTES);

// Members are destroyed from the last to the first.
struct DeviceKeysObject : Object {
  static constexpr Type kType = Type::kDeviceKeys;
  std::shared_ptr<DeviceObject> device;
  std::unique_ptr<KeysOfWorker> worker;
  std::mutex mutex;  // guards the next one
  // The caller's, by their handles. A device of host memory has one, in which nothing is ever
  // under way when a call begins or returns: the calling thread.
  std::vector<std::pair<void*, std::unique_ptr<Stream>>> streams;
  std::unique_ptr<DeviceKeys> keys;

  Stream& stream_of(void* handle);
};

Stream& DeviceKeysObject::stream_of(void* handle) {
  Device& made_by = *device->device;
  if (made_by.in_host_memory() && handle != nullptr) {
    throw Refusal(PHUB_INVALID, fmt::format("the stream {}: {} has none of the caller's, pass null",
                                            handle, made_by.name()));
  }
  const std::lock_guard lock(mutex);
  for (const auto& [known, stream] : streams) {
    if (known == handle) return *stream;
  }
  streams.emplace_back(handle, made_by.in_host_memory() ? made_by.make_stream("caller")
                                                        : made_by.adopt_stream(handle, "caller"));
  return *streams.back().second;
}

std::optional<kernels::DType> dtype_of(const char* name) {
  if (name == nullptr) return std::nullopt;
  const auto dtype = kernels::parse_dtype(name);
  if (!dtype) throw Refusal(PHUB_INVALID, fmt::format("dtype '{}' is not f32, bf16 or f16", name));
  return dtype;
}

template <typename Body>
phub_code with(const char* function, const phub_device_keys* handle, Body body) {
  return call(function, [&] { body(*object_of<DeviceKeysObject>(handle)); });
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_device_keys_bytes(const phub_worker* worker, uint64_t* bytes) {
  return call(__func__, [&] {
    const auto of = object_of<WorkerObject>(worker);
    need(bytes, "bytes");
    *bytes = DeviceKeys::encoding_bytes(of->worker);
  });
}

phub_code phub_device_keys_create(phub_worker* worker, phub_device* device,
                                  phub_device_keys** keys) {
  return call(__func__, [&] {
    auto object = std::make_shared<DeviceKeysObject>();
    object->device = object_of<DeviceObject>(device);
    const auto of = object_of<WorkerObject>(worker);
    need(keys, "keys");
    check_may_wait();
    object->worker = std::make_unique<KeysOfWorker>(of, Type::kDeviceKeys);
    object->keys = std::make_unique<DeviceKeys>(object->worker->worker(), *object->device->device);
    *keys = handle_of<phub_device_keys>(std::move(object), Type::kDeviceKeys);
  });
}

phub_code phub_device_keys_destroy(phub_device_keys* keys) {
  return call(__func__, [&] {
    check_may_wait();
    Handles::instance().remove(keys, Type::kDeviceKeys);
  });
}

phub_code phub_push_device(phub_device_keys* keys, size_t key, const void* gradient,
                           const char* dtype, float scale, int32_t priority, void* stream) {
  return with(__func__, keys, [&](DeviceKeysObject& object) {
    object.keys->push(
        key, gradient, object.stream_of(stream),
        {.dtype = dtype_of(dtype), .scale = scale == 0 ? 1 : scale, .priority = priority});
  });
}

phub_code phub_push_factors_device(phub_device_keys* keys, size_t key, const float* left,
                                   const float* right, uint32_t pairs, int32_t priority,
                                   void* stream) {
  return with(__func__, keys, [&](DeviceKeysObject& object) {
    const FactorPairs factors{left, right, pairs};
    object.keys->push_factors(key, {&factors, 1}, object.stream_of(stream), {.priority = priority});
  });
}

phub_code phub_pull_device(phub_device_keys* keys, size_t key, void* result, const char* dtype,
                           void* stream) {
  return with(__func__, keys, [&](DeviceKeysObject& object) {
    need(result, "result");
    check_may_wait();
    Stream& caller = object.stream_of(stream);
    object.keys->pull(key, result, caller, dtype_of(dtype));
    if (!object.device->device->in_host_memory()) return;
    caller.synchronize();
    object.keys->check();
  });
}

phub_code phub_wait_device(phub_device_keys* keys) {
  return with(__func__, keys, [&](DeviceKeysObject& object) {
    check_may_wait();
    object.keys->wait();
  });
}
