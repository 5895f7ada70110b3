#include "worker/device_coder.h"

#include <algorithm>
#include <utility>

#include "kernels/encode.h"
#include "transport/error.h"

namespace phub {
namespace {

using kernels::DType;

bool is_coded(const JobSpec& spec, const KeySpec& key) {
  if (is_compact(key)) return false;
  const auto format = kernels::parse_format(gradient_format(spec, key));
  return format && !kernels::is_plain(*format);
}

// By key; empty: not here, or there is no room for all of them.
std::vector<DeviceMemory> residuals_on(Device& device, const Worker& worker) {
  const JobSpec& spec = worker.spec();
  std::vector<DeviceMemory> residuals(worker.keys());
  try {
    for (size_t key = 0; key < residuals.size(); ++key) {
      const KeySpec& of = spec.keys[key];
      if (!worker.may_encode(key)) continue;
      if (!device.encodes(*kernels::parse_format(gradient_format(spec, of)))) continue;
      residuals[key] = DeviceMemory(device, of.elements * sizeof(float), "residuals");
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kFull) throw;
    return std::vector<DeviceMemory>(worker.keys());
  }
  return residuals;
}

}  // namespace

DeviceCoder::DeviceCoder(Worker& worker, Device& device)
    : worker_(worker),
      device_(device),
      seed_(rounding_seed(worker.spec().name)),
      keys_(worker.keys()) {
  std::vector<DeviceMemory> residuals = residuals_on(device, worker);
  for (size_t key = 0; key < keys_.size(); ++key) {
    if (residuals[key].bytes() == 0) continue;
    worker.register_memory(key, {});
    Key& of = keys_[key];
    of.format = *kernels::parse_format(gradient_format(worker.spec(), worker.spec().keys[key]));
    of.slots = worker.begin_encoding(key);
    device.write(residuals[key].data(), of.slots.residual.data(), residuals[key].bytes());
    of.residual = std::move(residuals[key]);
  }
}

DeviceCoder::~DeviceCoder() {
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

size_t DeviceCoder::residual_bytes(const JobSpec& spec) {
  size_t bytes = 0;
  for (const KeySpec& key : spec.keys) {
    if (is_coded(spec, key)) bytes += Arena::charge(key.elements * sizeof(float));
  }
  return bytes;
}

DeviceCoder::Slots DeviceCoder::slots(size_t key, Worker::Elements elements) const {
  const Key& of = keys_[key];
  const uint64_t chunk = of.slots.chunk_elements;
  const uint64_t first = elements.begin / chunk;
  const uint64_t rest = elements.end % chunk;
  return {first * of.slots.chunk_bytes, (elements.end / chunk - first) * of.slots.chunk_bytes +
                                            (rest > 0 ? kernels::slot_bytes(of.format, rest) : 0)};
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
