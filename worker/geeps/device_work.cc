#include "worker/geeps/device_work.h"

namespace phub::geeps {

DeviceWork::DeviceWork(Device& device, Stream* compute)
    : here_(compute == nullptr && device.in_host_memory()), stream_(compute) {
  if (!here_ && compute == nullptr) own_ = device.make_stream("rows");
}

namespace {

uint64_t moved_bytes(const Kernel& kernel) {
  switch (kernel.kind) {
    case Kernel::Kind::kCopy:
      return kernel.count;
    case Kernel::Kind::kFill:
      return 0;
    case Kernel::Kind::kAddScaled:
      return kernel.count * sizeof(float);
    default:
      return kernel.count * kernel.row_floats * sizeof(float);
  }
}

}  // namespace

template <class Enqueue>
void DeviceWork::run(const Kernel& kernel, Enqueue enqueue) {
  if (kernel.count == 0) return;
  if (stream_ != nullptr) return enqueue(*stream_);
  caller_bytes_ += moved_bytes(kernel);
  if (here_) return run_on_host(kernel);
  enqueue(*own_);
  own_->synchronize();
}

void DeviceWork::copy(float* to, const float* from, size_t floats) {
  const size_t bytes = floats * sizeof(float);
  run({.kind = Kernel::Kind::kCopy, .from = from, .to = to, .count = bytes},
      [&](Stream& stream) { stream.copy_on_device(to, from, bytes); });
}

void DeviceWork::add(float* to, const float* from, size_t floats, float factor) {
  run({.kind = Kernel::Kind::kAddScaled, .from = from, .to = to, .count = floats, .factor = factor},
      [&](Stream& stream) { stream.add_scaled(factor, from, to, floats); });
}

void DeviceWork::fill(float* to, float value, size_t floats) {
  run({.kind = Kernel::Kind::kFill, .to = to, .count = floats, .factor = value},
      [&](Stream& stream) { stream.fill(to, value, floats); });
}

void DeviceWork::scatter(const float* from, const RowIndex& index, Rows to) {
  run({.kind = Kernel::Kind::kScatter,
       .from = from,
       .to = to.data,
       .count = index.size(),
       .row_floats = to.row_floats,
       .index = index.data()},
      [&](Stream& stream) { stream.scatter(from, index, to); });
}

void DeviceWork::gather(ConstRows from, const RowIndex& index, float* to) {
  run({.kind = Kernel::Kind::kGather,
       .from = from.data,
       .to = to,
       .count = index.size(),
       .row_floats = from.row_floats,
       .index = index.data()},
      [&](Stream& stream) { stream.gather(from, index, to); });
}

void DeviceWork::gather_add(ConstRows from, const RowIndex& index, float* to) {
  run({.kind = Kernel::Kind::kGatherAdd,
       .from = from.data,
       .to = to,
       .count = index.size(),
       .row_floats = from.row_floats,
       .index = index.data()},
      [&](Stream& stream) { stream.gather_add(from, index, to); });
}

void DeviceWork::wait(const Event& event) {
  if (stream_ != nullptr) {
    stream_->wait(event);
  } else {
    event.wait();
  }
}

void DeviceWork::record(Event& event) {
  if (stream_ != nullptr) stream_->record(event);
}

}  // namespace phub::geeps
