#include "tests/device/device_suite.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace phub {

void DeviceSuite::SetUp() {
  const std::string missing = GetParam().missing();
  if (!missing.empty()) GTEST_SKIP() << missing;
  device_ = GetParam().make(kBudget);
  stream_ = device_->make_stream("test");
}

void DeviceSuite::TearDown() {
  stream_.reset();
  device_.reset();
}

DeviceMemory DeviceSuite::memory(std::span<const float> values) {
  DeviceMemory memory(*device_, values.size_bytes(), "test");
  device_->write(memory.data(), values.data(), values.size_bytes());
  return memory;
}

std::vector<float> DeviceSuite::floats(const void* memory, size_t elements) {
  std::vector<float> values(elements);
  device_->read(values.data(), memory, elements * sizeof(float));
  return values;
}

std::vector<uint8_t> DeviceSuite::bytes(const void* memory, size_t bytes) {
  std::vector<uint8_t> values(bytes);
  device_->read(values.data(), memory, bytes);
  return values;
}

size_t DeviceSuite::random(size_t least, size_t most) {
  return std::uniform_int_distribution<size_t>(least, most)(engine_);
}

std::vector<float> DeviceSuite::random_floats(size_t elements) {
  std::normal_distribution<float> normal;
  std::vector<float> values(elements);
  for (float& value : values) value = normal(engine_);
  return values;
}

std::vector<uint32_t> DeviceSuite::random_rows(size_t rows, size_t table_rows, bool distinct) {
  std::vector<uint32_t> all(table_rows);
  std::iota(all.begin(), all.end(), 0u);
  if (!distinct) {
    std::vector<uint32_t> chosen(rows);
    for (uint32_t& row : chosen) row = all[random(0, table_rows - 1)];
    return chosen;
  }
  // Runs and single rows: some neighbours stay together.
  for (size_t i = 0; i < table_rows; ++i) {
    if (random(0, 2) == 0) std::swap(all[i], all[random(0, table_rows - 1)]);
  }
  all.resize(rows);
  return all;
}

ErrorCode code_of(const std::function<void()>& call, std::string* what) {
  try {
    call();
  } catch (const Error& e) {
    if (what != nullptr) *what = e.what();
    return e.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::kInternal;
}

bool is_poisoned(std::span<const uint8_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0xFF; });
}

}  // namespace phub
