// Rows are copied by the run: neighbours in an index that are neighbours in the table are one copy,
// and the rows that come next are asked for ahead.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels/convert_scaled.h"
#include "kernels/copy.h"
#include "kernels/encode.h"
#include "worker/device/add_rows.h"
#include "worker/device/kernel.h"
#include "worker/device/poison.h"

namespace phub {
namespace {

constexpr size_t kAheadBytes = 8192;            // enough for the memory's latency
constexpr size_t kStreamedBytes = 2 * 1048576;  // a batch of at least these is not kept in caches
constexpr size_t kLine = 64;

// Calls move(entry, row, rows) for every run of entries that name successive rows, and asks for the
// memory at next(entry), as much as a row, ahead.
template <class Next, class Move>
void for_runs(const Kernel& k, Next next, Move move) {
  const size_t row_bytes = k.row_floats * sizeof(float);
  const size_t ahead = std::max<size_t>(1, kAheadBytes / row_bytes);
  const size_t fetched = std::min(row_bytes, kAheadBytes);
  for (size_t entry = 0; entry < k.count;) {
    if (entry + ahead < k.count) {
      const std::byte* memory = next(entry + ahead);
      for (size_t at = 0; at < fetched; at += kLine) __builtin_prefetch(memory + at);
    }
    size_t end = entry + 1;
    while (end < k.count && k.index[end] == k.index[end - 1] + 1) ++end;
    move(entry, k.index[entry], end - entry);
    entry = end;
  }
}

bool is_streamed(const Kernel& k) {
  return k.count * k.row_floats * sizeof(float) >= kStreamedBytes;
}

void gather(const Kernel& k) {
  const size_t row_bytes = k.row_floats * sizeof(float);
  const auto* table = static_cast<const std::byte*>(k.from);
  auto* batch = static_cast<std::byte*>(k.to);
  const auto next = [&](size_t entry) { return table + k.index[entry] * row_bytes; };
  if (is_streamed(k)) {
    for_runs(k, next, [&](size_t entry, size_t row, size_t rows) {
      kernels::stream_copy(batch + entry * row_bytes, table + row * row_bytes, rows * row_bytes);
    });
    kernels::finish_streaming();
  } else {
    for_runs(k, next, [&](size_t entry, size_t row, size_t rows) {
      std::memcpy(batch + entry * row_bytes, table + row * row_bytes, rows * row_bytes);
    });
  }
}

void gather_add(const Kernel& k) {
  const auto* table = static_cast<const float*>(k.from);
  auto* batch = static_cast<float*>(k.to);
  const auto next = [&](size_t entry) {
    return reinterpret_cast<const std::byte*>(table + k.index[entry] * k.row_floats);
  };
  for_runs(k, next, [&](size_t entry, size_t row, size_t rows) {
    add_floats(batch + entry * k.row_floats, table + row * k.row_floats, rows * k.row_floats);
  });
}

void scatter(const Kernel& k) {
  const size_t row_bytes = k.row_floats * sizeof(float);
  const auto* batch = static_cast<const std::byte*>(k.from);
  auto* table = static_cast<std::byte*>(k.to);
  if (is_streamed(k)) {  // the table's lines are not read: what comes next is the batch's
    const auto next = [&](size_t entry) { return batch + entry * row_bytes; };
    for_runs(k, next, [&](size_t entry, size_t row, size_t rows) {
      kernels::stream_copy(table + row * row_bytes, batch + entry * row_bytes, rows * row_bytes);
    });
    kernels::finish_streaming();
  } else {
    const auto next = [&](size_t entry) { return table + k.index[entry] * row_bytes; };
    for_runs(k, next, [&](size_t entry, size_t row, size_t rows) {
      std::memcpy(table + row * row_bytes, batch + entry * row_bytes, rows * row_bytes);
    });
  }
}

void scatter_add(const Kernel& k) {
  const auto* batch = static_cast<const float*>(k.from);
  auto* table = static_cast<float*>(k.to);
  const auto next = [&](size_t entry) {
    return reinterpret_cast<const std::byte*>(table + k.index[entry] * k.row_floats);
  };
  for_runs(k, next, [&](size_t entry, size_t row, size_t rows) {
    add_floats(table + row * k.row_floats, batch + entry * k.row_floats, rows * k.row_floats);
  });
}

// A chunk is converted into the cache before it is encoded.
void encode(const Kernel& k) {
  const bool as_it_is = k.from_dtype == kernels::DType::kF32 && k.factor == 1;
  std::vector<float> converted(as_it_is ? 0 : std::min(k.count, k.chunk_elements));
  const auto* gradient = static_cast<const std::byte*>(k.from);
  auto* slot = static_cast<std::byte*>(k.to);
  kernels::Rounding rounding = k.rounding;
  for (size_t at = 0; at < k.count; at += k.chunk_elements) {
    const size_t elements = std::min(k.chunk_elements, k.count - at);
    const auto* x = reinterpret_cast<const float*>(gradient);
    if (!as_it_is) {
      kernels::convert_scaled(gradient, k.from_dtype, k.factor, converted.data(),
                              kernels::DType::kF32, elements);
      x = converted.data();
    }
    float* const residual = k.residual == nullptr ? nullptr : k.residual + at;
    kernels::encode(x, residual, k.to_dtype, rounding, slot, elements);
    gradient += elements * kernels::bytes_of(k.from_dtype);
    slot += k.chunk_bytes;
    rounding.element += elements;
  }
}

}  // namespace

void run_on_host(const Kernel& k) {
  switch (k.kind) {
    case Kernel::Kind::kGather:
      return gather(k);
    case Kernel::Kind::kScatter:
      return scatter(k);
    case Kernel::Kind::kScatterAdd:
      return scatter_add(k);
    case Kernel::Kind::kGatherAdd:
      return gather_add(k);
    case Kernel::Kind::kAddScaled:
      return add_scaled_floats(static_cast<float*>(k.to), k.factor,
                               static_cast<const float*>(k.from), k.count);
    case Kernel::Kind::kFill:
      std::fill_n(static_cast<float*>(k.to), k.count, k.factor);
      return;
    case Kernel::Kind::kConvert:
      return kernels::convert_scaled(k.from, k.from_dtype, k.factor, k.to, k.to_dtype, k.count);
    case Kernel::Kind::kEncode:
      return encode(k);
    case Kernel::Kind::kCopy:
      std::memcpy(k.to, k.from, k.count);
      return;
    case Kernel::Kind::kPoisonIf: {
      auto* failed = static_cast<uint32_t*>(const_cast<void*>(k.from));
      if (std::atomic_ref(*failed).load(std::memory_order_acquire) != 0) poison(k.to, k.count);
      return;
    }
  }
}

}  // namespace phub
