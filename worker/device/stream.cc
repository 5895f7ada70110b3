// What every device checks before it is given work.
#include <utility>

#include "transport/error.h"
#include "worker/device/device.h"

namespace phub {
namespace {

constexpr size_t kSlotBytes = 4;  // slots of coded formats begin at a multiple of these

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a);
  const auto b_begin = reinterpret_cast<uintptr_t>(b);
  return a_begin < b_begin + b_bytes && b_begin < a_begin + a_bytes;
}

// Bytes of rows, elements: saturated, so that no range can hold a product that has overflowed.
size_t bytes_of(size_t count, size_t each) {
  size_t bytes = 0;
  return __builtin_mul_overflow(count, each, &bytes) ? SIZE_MAX : bytes;
}
size_t bytes_of(ConstRows table) {
  return bytes_of(table.rows, bytes_of(table.row_floats, sizeof(float)));
}

}  // namespace

Stream::Stream(Device& device, std::string name) : device_(device), name_(std::move(name)) {}

void Stream::copy_to_device(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  device_.check_device("copy to", to, bytes);
  device_.check_host("copy from", from, bytes, HostUse::kRead);
  device_.bytes_to_device_ += bytes;
  ++device_.copies_;
  do_copy_to_device(to, from, bytes);
}

void Stream::copy_to_host(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  device_.check_device("copy from", from, bytes);
  device_.check_host("copy to", to, bytes, HostUse::kReadWrite);
  device_.bytes_to_host_ += bytes;
  ++device_.copies_;
  do_copy_to_host(to, from, bytes);
}

void Stream::launch(const char* what, const Kernel& kernel, size_t from_bytes, size_t to_bytes) {
  if (kernel.count == 0) return;
  if (kernel.from != nullptr || from_bytes > 0) device_.check_device(what, kernel.from, from_bytes);
  device_.check_device(what, kernel.to, to_bytes);
  if (overlap(kernel.from, from_bytes, kernel.to, to_bytes)) {
    fail(ErrorCode::kInvalid, "{}: {} from {} bytes at {} to {} bytes at {}: these overlap",
         device_.name(), what, from_bytes, kernel.from, to_bytes, kernel.to);
  }
  ++device_.kernels_;
  do_launch(kernel);
}

void Stream::copy_on_device(void* to, const void* from, size_t bytes) {
  launch("copy on the device",
         {.kind = Kernel::Kind::kCopy, .from = from, .to = to, .count = bytes}, bytes, bytes);
}

void Stream::check_index(const char* what, const RowIndex& index, ConstRows table) const {
  if (index.table_rows() > table.rows) {
    fail(ErrorCode::kInvalid, "{}: {} with an index up to row {} of a table of {} rows",
         device_.name(), what, index.table_rows() - 1, table.rows);
  }
  device_.check_device("index", index.data(), index.size() * sizeof(uint32_t));
}

void Stream::gather(ConstRows from, const RowIndex& index, float* to) {
  gather("gather", Kernel::Kind::kGather, from, index, to);
}

void Stream::gather_add(ConstRows from, const RowIndex& index, float* to) {
  gather("gather_add", Kernel::Kind::kGatherAdd, from, index, to);
}

void Stream::gather(const char* what, Kernel::Kind kind, ConstRows from, const RowIndex& index,
                    float* to) {
  check_index(what, index, from);
  if (from.row_floats == 0) return;
  launch(what,
         {.kind = kind,
          .from = from.data,
          .to = to,
          .count = index.size(),
          .row_floats = from.row_floats,
          .index = index.data()},
         bytes_of(from), bytes_of({to, index.size(), from.row_floats}));
}

void Stream::scatter(const float* from, const RowIndex& index, Rows to) {
  scatter("scatter", Kernel::Kind::kScatter, from, index, to);
}

void Stream::scatter_add(const float* from, const RowIndex& index, Rows to) {
  scatter("scatter_add", Kernel::Kind::kScatterAdd, from, index, to);
}

void Stream::scatter(const char* what, Kernel::Kind kind, const float* from, const RowIndex& index,
                     Rows to) {
  check_index(what, index, to);
  if (!index.distinct()) {
    fail(ErrorCode::kInvalid, "{}: {} with an index that names a row twice", device_.name(), what);
  }
  if (to.row_floats == 0) return;
  launch(what,
         {.kind = kind,
          .from = from,
          .to = to.data,
          .count = index.size(),
          .row_floats = to.row_floats,
          .index = index.data()},
         bytes_of({from, index.size(), to.row_floats}), bytes_of(to));
}

void Stream::add_scaled(float factor, const float* from, float* to, size_t elements) {
  const size_t bytes = bytes_of(elements, sizeof(float));
  launch("add_scaled",
         {.kind = Kernel::Kind::kAddScaled,
          .from = from,
          .to = to,
          .count = elements,
          .factor = factor},
         bytes, bytes);
}

void Stream::fill(float* to, float value, size_t elements) {
  launch("fill", {.kind = Kernel::Kind::kFill, .to = to, .count = elements, .factor = value}, 0,
         bytes_of(elements, sizeof(float)));
}

void Stream::convert(const void* from, kernels::DType from_dtype, void* to, kernels::DType to_dtype,
                     size_t elements, float factor) {
  if (from_dtype == to_dtype && factor == 1) {
    return copy_on_device(to, from, bytes_of(elements, kernels::bytes_of(to_dtype)));
  }
  launch("convert",
         {.kind = Kernel::Kind::kConvert,
          .from = from,
          .to = to,
          .count = elements,
          .factor = factor,
          .from_dtype = from_dtype,
          .to_dtype = to_dtype},
         bytes_of(elements, kernels::bytes_of(from_dtype)),
         bytes_of(elements, kernels::bytes_of(to_dtype)));
}

void Stream::check_slots(const ChunkedSlots& slots, const void* to) const {
  const std::string_view format = kernels::name_of(slots.format);
  if (!Device::may_encode(slots.format)) {
    fail(ErrorCode::kInvalid, "{}: encode: this device does not encode the format {}",
         device_.name(), format);
  }
  if (slots.chunk_elements == 0 ||
      slots.chunk_elements > kernels::most_slot_elements(slots.format) ||
      slots.chunk_bytes < kernels::slot_bytes(slots.format, slots.chunk_elements) ||
      slots.chunk_bytes % kSlotBytes != 0 || reinterpret_cast<uintptr_t>(to) % kSlotBytes != 0) {
    fail(ErrorCode::kInvalid,
         "{}: encode: chunks of {} elements of {}, {} bytes apart from {} on, which do not fit",
         device_.name(), slots.chunk_elements, format, slots.chunk_bytes, to);
  }
}

void Stream::encode(const void* from, kernels::DType from_dtype, float factor, float* residual,
                    const ChunkedSlots& slots, void* to, size_t elements) {
  if (elements == 0) return;
  check_slots(slots, to);
  const size_t last = (elements - 1) / slots.chunk_elements;
  const size_t last_bytes =
      kernels::slot_bytes(slots.format, elements - last * slots.chunk_elements);
  const size_t from_bytes = bytes_of(elements, kernels::bytes_of(from_dtype));
  const size_t residual_bytes = residual == nullptr ? 0 : bytes_of(elements, sizeof(float));
  size_t to_bytes = bytes_of(last, slots.chunk_bytes);
  if (__builtin_add_overflow(to_bytes, last_bytes, &to_bytes)) to_bytes = SIZE_MAX;
  device_.check_device("encode: residual", residual, residual_bytes);
  if (overlap(residual, residual_bytes, from, from_bytes) ||
      overlap(residual, residual_bytes, to, to_bytes)) {
    fail(ErrorCode::kInvalid, "{}: encode with a residual of {} bytes at {}, which overlaps",
         device_.name(), residual_bytes, static_cast<const void*>(residual));
  }
  launch("encode",
         {.kind = Kernel::Kind::kEncode,
          .from = from,
          .to = to,
          .count = elements,
          .factor = factor,
          .from_dtype = from_dtype,
          .to_dtype = slots.format,
          .residual = residual,
          .chunk_elements = slots.chunk_elements,
          .chunk_bytes = slots.chunk_bytes,
          .rounding = slots.rounding},
         from_bytes, to_bytes);
}

void Stream::call(std::function<void()> callback) {
  if (!callback) fail(ErrorCode::kInvalid, "{}: call of an empty function", device_.name());
  do_call(std::move(callback));
}

void Stream::work_for(std::chrono::nanoseconds time) {
  if (time.count() > 0) do_work_for(time);
}

void Stream::record(Event& event) {
  if (&event.device() != &device_) {
    fail(ErrorCode::kInvalid, "{}: record of an event of another device, {}", device_.name(),
         event.device().name());
  }
  do_record(event);
}

void Stream::wait(const Event& event) {
  if (&event.device() != &device_) {
    fail(ErrorCode::kInvalid, "{}: wait for an event of another device, {}", device_.name(),
         event.device().name());
  }
  do_wait(event);
}

void Stream::synchronize() { do_synchronize(); }

void Stream::wait(const Signals& signals, size_t index, uint32_t number) {
  check_signals(signals);
  if (index >= signals.size()) {
    fail(ErrorCode::kInvalid, "{}: wait for signal {} of {}", device_.name(), index,
         signals.size());
  }
  do_wait_for(signals.words_ + 1 + index, number);
}

void Stream::poison_if_failed(const Signals& signals, void* memory, size_t bytes) {
  check_signals(signals);
  launch("poison",
         {.kind = Kernel::Kind::kPoisonIf, .from = signals.words_, .to = memory, .count = bytes}, 0,
         bytes);
}

void Stream::check_signals(const Signals& signals) const {
  if (&signals.device() == &device_) return;
  fail(ErrorCode::kInvalid, "{}: signals of another device, {}", device_.name(),
       signals.device().name());
}

void Stream::do_wait_for(const uint32_t* /*word*/, uint32_t /*number*/) {
  fail(ErrorCode::kUnavailable, "{}: this device has no signals", device_.name());
}

Signals::Signals(Device& device, size_t count)
    : device_(device),
      size_(count),
      memory_(device, (1 + count) * sizeof(uint32_t), "signals"),
      words_(static_cast<uint32_t*>(memory_.data())) {}

void Signals::raise(size_t index, uint32_t number) {
  if (has_failed_) return;  // no wait is left
  std::atomic_ref(words_[1 + index]).store(number, std::memory_order_release);
  do_raised();
}

void Signals::fail() {
  if (std::exchange(has_failed_, true)) return;
  constexpr uint32_t kBeyondAllWaits = 1u << 30;
  std::atomic_ref(words_[0]).store(1, std::memory_order_release);
  for (size_t i = 1; i <= size_; ++i) {
    std::atomic_ref(words_[i]).fetch_add(kBeyondAllWaits, std::memory_order_release);
  }
  do_raised();
}

}  // namespace phub
