// The devices of phub.h, over worker/device.
#include "worker/c_abi/device.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "worker/c_abi/call.h"
#include "worker/c_abi/options.h"
#include "worker/c_abi/worker.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_device_open_host(uint64_t budget_bytes, double copy_bytes_per_second,
                                uint64_t copy_latency_ns, phub_device** device) {
  return call(__func__, [&] {
    need(device, "device");
    constexpr double kLeastSpeed = 1000;
    constexpr uint64_t kMaxLatency = 60'000'000'000;
    if (!std::isfinite(copy_bytes_per_second) ||
        (copy_bytes_per_second != 0 && copy_bytes_per_second < kLeastSpeed) ||
        copy_latency_ns > kMaxLatency) {
      throw Refusal(PHUB_INVALID, fmt::format("copies at {} bytes per second with {} ns",
                                              copy_bytes_per_second, copy_latency_ns));
    }
    auto object = std::make_shared<DeviceObject>();
    object->device = make_host_device({.budget_bytes = budget_bytes,
                                       .copy_bytes_per_second = copy_bytes_per_second,
                                       .copy_latency = std::chrono::nanoseconds(copy_latency_ns),
                                       .holds_all_memory = true});
    *device = handle_of<phub_device>(std::move(object), Type::kDevice);
  });
}

phub_code phub_device_open_cuda(int index, uint64_t budget_bytes, phub_device** device) {
  return call(__func__, [&] {
    need(device, "device");
    auto object = std::make_shared<DeviceObject>();
    object->device = make_cuda_device({.ordinal = index, .budget_bytes = budget_bytes});
    *device = handle_of<phub_device>(std::move(object), Type::kDevice);
  });
}

phub_code phub_options_set_memory_device(phub_options* options, const phub_device* device) {
  return call(__func__, [&] {
    const auto object = object_of<OptionsObject>(options);
    const auto memory = device ? object_of<DeviceObject>(device) : nullptr;
    const std::lock_guard lock(object->mutex);
    object->options.memory_device = memory ? memory->device.get() : nullptr;
    object->memory_device = memory;
  });
}

phub_code phub_device_close(phub_device* device) {
  return call(__func__, [&] {
    check_may_wait();
    Handles::instance().remove(device, Type::kDevice);
  });
}

phub_code phub_host_stream_create(phub_device* device, phub_host_stream** stream) {
  return call(__func__, [&] {
    auto object = std::make_shared<HostStreamObject>();
    object->device = object_of<DeviceObject>(device);
    need(stream, "stream");
    Device& of = *object->device->device;
    if (!of.in_host_memory()) {
      throw Refusal(PHUB_INVALID, fmt::format("{} has the driver's streams: make one there, and "
                                              "pass that",
                                              of.name()));
    }
    object->stream = of.make_stream("host stream");
    *stream = handle_of<phub_host_stream>(std::move(object), Type::kHostStream);
  });
}

phub_code phub_host_stream_destroy(phub_host_stream* stream) {
  return call(__func__, [&] {
    check_may_wait();
    Handles::instance().remove(stream, Type::kHostStream);
  });
}

phub_code phub_host_stream_call(phub_host_stream* stream, phub_stream_work work, void* user_data) {
  return call(__func__, [&] {
    const auto object = object_of<HostStreamObject>(stream);
    if (work == nullptr) throw Refusal(PHUB_INVALID, "work is null");
    object->stream->call([work, user_data] { work(user_data); });
  });
}

phub_code phub_host_stream_wait(phub_host_stream* stream) {
  return call(__func__, [&] {
    const auto object = object_of<HostStreamObject>(stream);
    check_may_wait();
    object->stream->synchronize();
  });
}

phub_code phub_device_memory(const phub_device* device, phub_memory* memory) {
  return call(__func__, [&] {
    const auto object = object_of<DeviceObject>(device);
    need_struct(memory, "memory");
    const DeviceStats all = object->device->stats();
    copy_struct(memory, {.size = 0,
                         .budget_bytes = all.budget_bytes,
                         .used_bytes = all.used_bytes,
                         .peak_bytes = all.peak_bytes,
                         .host_bytes = all.host_bytes});
  });
}
