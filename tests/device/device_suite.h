// What every device promises (worker/device/device.h), as one suite of tests over any of them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "transport/error.h"
#include "worker/device/device.h"

namespace phub {

struct DeviceFactory {
  std::string name;
  std::function<std::unique_ptr<Device>(size_t budget_bytes)> make;
  std::function<std::string()> missing;  // why there is none; empty if there is one

  friend void PrintTo(  // NOLINT(readability-identifier-naming): GoogleTest looks for it
      const DeviceFactory& factory, std::ostream* out) {
    *out << factory.name;
  }
};

// A stream that does nothing behind close() until open(): keeps work from beginning, without time.
class StreamGate {
 public:
  ~StreamGate() { open(); }
  void close(Stream& stream) {
    stream.call([opened = opened_] { opened.wait(); });
  }
  void open() {
    if (!is_open_) open_.set_value();
    is_open_ = true;
  }

 private:
  std::promise<void> open_;
  std::shared_future<void> opened_ = open_.get_future().share();
  bool is_open_ = false;
};

class DeviceSuite : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr size_t kBudget = 8 << 20;

  void SetUp() override;
  void TearDown() override;

  DeviceMemory memory(std::span<const float> values);  // holds them
  DeviceMemory memory(size_t bytes) { return {*device_, bytes, "test"}; }
  std::vector<float> floats(const void* memory, size_t elements);
  std::vector<uint8_t> bytes(const void* memory, size_t bytes);
  std::vector<float> random_floats(size_t elements);
  std::vector<uint32_t> random_rows(size_t rows, size_t table_rows, bool distinct);
  size_t random(size_t least, size_t most);

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::mt19937_64 engine_{20240717};
};

// The code of the error that this throws, and its text in `what`.
ErrorCode code_of(const std::function<void()>& call, std::string* what = nullptr);

// Poison: bytes of 0xFF.
bool is_poisoned(std::span<const uint8_t> bytes);

}  // namespace phub
