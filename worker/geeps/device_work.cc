#include "worker/geeps/device_work.h"

#include <utility>

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

void DeviceWork::read_pinned(const ListPlan& list, std::span<const PlacedEntry> entries,
                             size_t row_floats, bool less_log, float* buffer) {
  for (const PinnedPart& part : list.pinned) {
    const PlacedEntry& entry = entries[part.entry];
    if (part.index) scatter(entry.rows, *part.index, {buffer, list.rows, row_floats});
    for (const Run& run : part.runs) {
      float* const to = buffer + run.first * row_floats;
      const size_t from = run.source * row_floats;
      if (!part.index) copy(to, entry.rows + from, run.rows * row_floats);
      if (less_log && entry.log_used) add(to, entry.log + from, run.rows * row_floats, -1);
    }
  }
}

void DeviceWork::save_pinned(const ListPlan& list, std::span<PlacedEntry> entries,
                             size_t row_floats, const float* buffer) {
  for (const PinnedPart& part : list.pinned) {
    PlacedEntry& entry = entries[part.entry];
    entry.dirty = true;
    if (part.index) {
      gather({buffer, list.rows, row_floats}, *part.index, entry.rows);
      continue;
    }
    for (const Run& run : part.runs) {
      copy(entry.rows + run.source * row_floats, buffer + run.first * row_floats,
           run.rows * row_floats);
    }
  }
}

// The first update of a clock is copied, as in host memory (Mover::log()).
void DeviceWork::update_pinned(const ListPlan& list, std::span<PlacedEntry> entries,
                               size_t row_floats, const float* buffer) {
  for (const PinnedPart& part : list.pinned) {
    PlacedEntry& entry = entries[part.entry];
    const bool adds = std::exchange(entry.log_used, true);
    if (!adds && part.rows < entry.count) fill(entry.log, 0, entry.count * row_floats);
    if (part.index) {
      const ConstRows rows{buffer, list.rows, row_floats};
      adds ? gather_add(rows, *part.index, entry.log) : gather(rows, *part.index, entry.log);
      continue;
    }
    for (const Run& run : part.runs) {
      float* const to = entry.log + run.source * row_floats;
      const float* const from = buffer + run.first * row_floats;
      adds ? add(to, from, run.rows * row_floats) : copy(to, from, run.rows * row_floats);
    }
  }
}

}  // namespace phub::geeps
