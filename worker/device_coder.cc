#include "worker/device_coder.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <utility>

#include "kernels/encode.h"
#include "transport/error.h"

namespace phub {
namespace {

using kernels::DType;

// A key's that a device may encode; nullopt: it may not.
std::optional<DType> format_on_device(const Worker& worker, size_t key) {
  if (!worker.may_encode(key)) return std::nullopt;
  const auto format =
      kernels::parse_format(gradient_format(worker.spec(), worker.spec().keys[key]));
  return format && Device::may_encode(*format) ? format : std::nullopt;
}

// Whether the device encodes as kernels::encode does, in a trial of a few chunks with values of all
// sizes: a GPU, a driver or a compiler that nobody has tried may not.
bool encodes_alike(Device& device, DType format, bool stochastic, std::byte* scratch) {
  constexpr size_t kElements = 1000, kChunk = 96;
  ChunkedSlots of{.format = format, .chunk_elements = kChunk};
  of.chunk_bytes = kernels::slot_bytes(format, kChunk);
  of.rounding = {.stochastic = stochastic, .job = 1, .rank = 2, .round = 3, .element = 4};
  std::vector<float> gradient(kElements), residual(kElements);
  std::minstd_rand random(static_cast<uint32_t>(format) + 1);
  for (size_t i = 0; i < kElements; ++i) {
    const float size = std::ldexp(1.0f, static_cast<int>(i / kChunk * 25) - 125);
    gradient[i] = static_cast<float>(static_cast<int>(random() % 2001) - 1000) * size;
    residual[i] = i % 5 == 0 ? 0 : static_cast<float>(random() % 999) * -0.01f * size;
  }
  std::vector<std::byte> slots((kElements + kChunk - 1) / kChunk * of.chunk_bytes);
  auto* const from = reinterpret_cast<float*>(scratch);
  auto* const rest = from + kElements;
  float* const to = rest + kElements;
  device.write(from, gradient.data(), kElements * sizeof(float));
  device.write(rest, residual.data(), kElements * sizeof(float));
  device.write(to, slots.data(), slots.size());
  const auto stream = device.make_stream("phub trial");
  stream->encode(from, DType::kF32, 1, rest, of, to, kElements);
  stream->synchronize();
  std::vector<std::byte> slots_there(slots.size());
  std::vector<float> residual_there(kElements);
  device.read(slots_there.data(), to, slots.size());
  device.read(residual_there.data(), rest, kElements * sizeof(float));
  for (size_t at = 0; at < kElements; at += kChunk) {
    const size_t count = std::min(kChunk, kElements - at);
    kernels::encode(gradient.data() + at, residual.data() + at, format, of.rounding,
                    slots.data() + at / kChunk * of.chunk_bytes, count);
    of.rounding.element += count;
  }
  return slots == slots_there && std::ranges::equal(std::as_bytes(std::span(residual)),
                                                    std::as_bytes(std::span(residual_there)));
}

// By key; empty: not here, or there is no room for all of them.
std::vector<DeviceMemory> residuals_on(Device& device, const Worker& worker,
                                       const DeviceMemory& scratch) {
  std::vector<DeviceMemory> residuals(worker.keys());
  std::map<DType, bool> alike;
  try {
    for (size_t key = 0; key < residuals.size(); ++key) {
      const auto format = format_on_device(worker, key);
      if (!format) continue;
      if (!alike.contains(*format)) {
        alike[*format] = encodes_alike(device, *format, worker.spec().rounding == "stochastic",
                                       static_cast<std::byte*>(scratch.data()));
      }
      if (!alike[*format]) continue;
      residuals[key] =
          DeviceMemory(device, worker.spec().keys[key].elements * sizeof(float), "residuals");
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kFull) throw;
    return std::vector<DeviceMemory>(worker.keys());
  }
  return residuals;
}

}  // namespace

DeviceCoder::DeviceCoder(Worker& worker, Device& device, const DeviceMemory& scratch)
    : worker_(worker),
      device_(device),
      seed_(rounding_seed(worker.spec().name)),
      keys_(worker.keys()) {
  std::vector<DeviceMemory> residuals = residuals_on(device, worker, scratch);
  try {
    for (size_t key = 0; key < keys_.size(); ++key) {
      if (residuals[key].bytes() == 0) continue;
      worker.register_memory(key, {});
      Key& of = keys_[key];
      of.format = *format_on_device(worker, key);
      of.slots = worker.begin_encoding(key);
      of.residual = std::move(residuals[key]);
      device.write(of.residual.data(), of.slots.residual.data(), of.residual.bytes());
    }
  } catch (...) {
    is_lost_ = true;
    give_all_back();
    throw;
  }
}

DeviceCoder::~DeviceCoder() { give_all_back(); }

void DeviceCoder::give_all_back() {
  for (size_t key = 0; key < keys_.size(); ++key) {
    if (encodes(key)) give_back(key);
  }
}

void DeviceCoder::give_back(size_t key) {
  const std::span<float> residual = keys_[key].slots.residual;
  try {
    if (!is_lost_) device_.read(residual.data(), keys_[key].residual.data(), residual.size_bytes());
  } catch (const Error&) {
    is_lost_ = true;
  }
  if (is_lost_) std::ranges::fill(residual, 0.0f);
  worker_.end_encoding(key);
}

size_t DeviceCoder::residual_bytes(const Worker& worker) {
  size_t bytes = 0;
  for (size_t key = 0; key < worker.keys(); ++key) {
    if (!format_on_device(worker, key)) continue;
    bytes += Arena::charge(worker.spec().keys[key].elements * sizeof(float));
  }
  return bytes;
}

DeviceCoder::Slots DeviceCoder::slots(size_t key, Worker::Elements elements) const {
  const Key& of = keys_[key];
  const uint64_t chunk = of.slots.chunk_elements;
  const uint64_t first = elements.begin / chunk;
  if (elements.begin == elements.end) return {first * of.slots.chunk_bytes, 0};
  const uint64_t last = (elements.end - 1) / chunk;  // which nothing follows: it has no padding
  return {first * of.slots.chunk_bytes,
          (last - first) * of.slots.chunk_bytes +
              kernels::slot_bytes(of.format, elements.end - last * chunk)};
}

uint64_t DeviceCoder::elements_in(size_t key, size_t bytes) const {
  const CodedSlots& of = keys_[key].slots;
  return std::max<uint64_t>(bytes / of.chunk_bytes, 1) * of.chunk_elements;
}

void DeviceCoder::encode(Stream& stream, size_t key, Worker::Elements elements,
                         const void* gradient, DType dtype, float scale, uint64_t round,
                         void* to) const {
  const Key& of = keys_[key];
  stream.encode(gradient, dtype, scale, of.residual.floats() + elements.begin,
                {.format = of.format,
                 .chunk_elements = of.slots.chunk_elements,
                 .chunk_bytes = of.slots.chunk_bytes,
                 .rounding = {.stochastic = worker_.spec().rounding == "stochastic",
                              .job = seed_,
                              .rank = worker_.rank(),
                              .round = round,
                              .element = of.slots.first_element + elements.begin}},
                to, elements.end - elements.begin);
}

}  // namespace phub
