// What the host device does beyond the contract: failing copies, bandwidth, poison, idleness.
#include "worker/device/host_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

#include "tests/device/device_suite.h"
#include "worker/device/poison.h"

namespace phub {
namespace host_device_test {

using ::testing::HasSubstr;
using Direction = HostDevice::Direction;

class HostDeviceTest : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = 1 << 16;

  std::unique_ptr<HostDevice> device_ =
      make_host_device({.name = "dev0", .budget_bytes = 4 << 20, .poison_copies = true});
  std::unique_ptr<Stream> stream_ = device_->make_stream("fetch");
  std::unique_ptr<Stream> other_ = device_->make_stream("compute");
  DeviceMemory memory_{*device_, kBytes, "memory"};
  HostMemory host_{*device_, kBytes, "host"};

  std::vector<uint8_t> bytes() {
    std::vector<uint8_t> values(kBytes);
    device_->read(values.data(), memory_.data(), kBytes);
    return values;
  }
};

TEST_F(HostDeviceTest, ACopyThatFailsMidwayIsReportedOnceWithItsOrigin) {
  const auto before = device_->make_event();
  const auto after = device_->make_event();
  stream_->copy_to_device(memory_.data(), host_.data(), kBytes);
  stream_->record(*before);
  device_->fail_copy(Direction::kToDevice, 1, 1000);
  bool ran = false;
  StreamGate gate;
  gate.close(*stream_);
  stream_->copy_to_device(memory_.data(), host_.data(), kBytes);
  stream_->copy_to_device(memory_.data(), host_.data(), kBytes);
  stream_->call([&] { ran = true; });
  stream_->record(*after);
  gate.open();

  std::string what;
  EXPECT_EQ(code_of([&] { after->wait(); }, &what), ErrorCode::kInternal);
  EXPECT_THAT(what, HasSubstr("dev0: stream 'fetch': copy of 65536 bytes to the device"));
  EXPECT_THAT(what, HasSubstr("failed after 1000 bytes"));
  EXPECT_FALSE(ran) << "what came behind it is dropped";
  EXPECT_TRUE(is_poisoned(bytes())) << "nothing half-written stays";

  before->wait();  // what came before it is well
  EXPECT_TRUE(before->done());
  EXPECT_EQ(code_of([&] { after->wait(); }, &what), ErrorCode::kUnavailable);
  EXPECT_THAT(what, HasSubstr("failed after 1000 bytes"));
  EXPECT_EQ(code_of([&] { (void)after->done(); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { stream_->synchronize(); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { stream_->call([] {}); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { stream_->record(*before); }), ErrorCode::kUnavailable);

  // Other streams go on, and so does a new one.
  other_->copy_to_device(memory_.data(), host_.data(), kBytes);
  other_->synchronize();
  EXPECT_EQ(bytes(), std::vector<uint8_t>(kBytes, 0));
  stream_ = device_->make_stream("fetch again");
  stream_->fill(memory_.floats(), 1.0f, 1);
  stream_->synchronize();
  EXPECT_EQ(code_of([&] { after->wait(); }), ErrorCode::kUnavailable) << "it never becomes good";
}

TEST_F(HostDeviceTest, AFailureStopsTheStreamsThatWaitForIt) {
  const auto fetched = device_->make_event();
  StreamGate gate;
  gate.close(*stream_);
  device_->fail_copy(Direction::kToHost, 0, 0);
  stream_->copy_to_host(host_.data(), memory_.data(), kBytes);
  stream_->record(*fetched);
  other_->wait(*fetched);
  bool ran = false;
  other_->call([&] { ran = true; });
  gate.open();
  std::string what;
  EXPECT_EQ(code_of([&] { other_->synchronize(); }, &what), ErrorCode::kInternal);
  EXPECT_THAT(what, HasSubstr("stream 'fetch': copy of 65536 bytes from the device"));
  EXPECT_FALSE(ran);
  EXPECT_EQ(code_of([&] { stream_->synchronize(); }), ErrorCode::kUnavailable) << "said already";
}

TEST_F(HostDeviceTest, AnEventFromBeforeTheFailureCanBeWaitedFor) {
  const auto before = device_->make_event();
  stream_->fill(memory_.floats(), 2.0f, 10);
  stream_->record(*before);
  device_->fail_copy(Direction::kToDevice, 0, 10);
  stream_->copy_to_device(memory_.floats() + 100, host_.data(), 100);
  EXPECT_EQ(code_of([&] { stream_->synchronize(); }), ErrorCode::kInternal);
  other_->wait(*before);
  other_->fill(memory_.floats(), 3.0f, 5);
  other_->synchronize();
}

TEST_F(HostDeviceTest, AStreamThatFailedCanBeDestroyed) {
  device_->fail_copy(Direction::kToDevice, 0, 10);
  StreamGate gate;
  gate.close(*stream_);
  for (int i = 0; i < 10; ++i) stream_->copy_to_device(memory_.data(), host_.data(), kBytes);
  gate.open();
  stream_.reset();
}

// Lower bounds only: a machine may always be slower.
TEST(HostDeviceSpeed, CopiesTakeTheirBandwidthAndLatency) {
  const auto device = make_host_device({.budget_bytes = 1 << 20,
                                        .copy_bytes_per_second = 100e6,
                                        .copy_latency = std::chrono::milliseconds(1)});
  const auto stream = device->make_stream("copies");
  const DeviceMemory memory(*device, 1 << 20, "memory");
  const HostMemory host(*device, 1 << 20, "host");
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) stream->copy_to_device(memory.data(), host.data(), 1 << 20);
  stream->synchronize();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took.count(), 3 * ((1 << 20) / 100e6 + 0.001));
}

TEST(HostDeviceSpeed, IdleCostsNoCpu) {
  const auto device = make_host_device({.budget_bytes = 4096});
  const auto stream = device->make_stream("idle");
  const DeviceMemory memory(*device, 4096, "memory");
  stream->fill(memory.floats(), 1.0f, 10);
  stream->synchronize();
  const std::clock_t begin = std::clock();  // of all threads of this process
  stream->work_for(std::chrono::milliseconds(200));
  stream->synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 0.1);
}

TEST(HostDeviceOptions, AreChecked) {
  std::string what;
  EXPECT_EQ(code_of([] { make_host_device({.budget_bytes = size_t{1} << 60}); }, &what),
            ErrorCode::kFull);
  EXPECT_THAT(what, HasSubstr("a budget of 1152921504606846976 bytes"));
  EXPECT_EQ(code_of([] { make_host_device({.budget_bytes = 1, .copy_bytes_per_second = -1}); }),
            ErrorCode::kInvalid);
  const auto none = make_host_device({.name = "none", .budget_bytes = 0});
  EXPECT_EQ(code_of([&] { none->allocate(1, "x"); }), ErrorCode::kFull);
}

// In builds with AddressSanitizer, memory that nobody should touch cannot be touched.
class HostDevicePoisonDeathTest : public HostDeviceTest {
 protected:
  void SetUp() override {
    if (!kCanForbid) GTEST_SKIP() << "built without AddressSanitizer";
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
};

TEST_F(HostDevicePoisonDeathTest, ReleasedMemory) {
  auto* gone = static_cast<volatile char*>(device_->allocate(4096, "gone"));
  device_->release(const_cast<char*>(gone));
  EXPECT_DEATH((void)gone[17], "use-after-poison");
}

TEST_F(HostDevicePoisonDeathTest, BehindAnAllocation) {
  const DeviceMemory odd(*device_, 1000, "odd");
  const auto* behind = static_cast<volatile char*>(odd.data()) + 1000;
  EXPECT_DEATH((void)*behind, "use-after-poison");
}

TEST(HostDeviceSlowPoisonDeathTest, TheDestinationOfACopyUntilItsEvent) {
  if (!kCanForbid) GTEST_SKIP() << "built without AddressSanitizer";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto read_too_early = [] {
    const auto device = make_host_device(
        {.budget_bytes = 4096, .copy_latency = std::chrono::seconds(20), .poison_copies = true});
    const auto stream = device->make_stream("copies");
    const DeviceMemory memory(*device, 4096, "memory");
    const HostMemory host(*device, 4096, "host");
    stream->copy_to_device(memory.data(), host.data(), 4096);
    const auto* byte = static_cast<volatile char*>(memory.data());
    while (true) (void)byte[100];  // until the copy begins
  };
  EXPECT_DEATH(read_too_early(), "use-after-poison");
}

}  // namespace host_device_test
}  // namespace phub
