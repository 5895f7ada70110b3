// Streams that wait for the host.
#include <gmock/gmock.h>

#include "tests/device/device_suite.h"

namespace phub {
namespace {

using ::testing::HasSubstr;

TEST_P(DeviceSuite, AStreamWaitsUntilItsSignalIsRaised) {
  const auto signals = device_->make_signals(3);
  const auto event = device_->make_event();
  const DeviceMemory values = memory(std::vector<float>{1.0f});
  stream_->wait(*signals, 1, 0);  // what it is at first
  stream_->fill(values.floats(), 2.0f, 1);
  stream_->record(*event);
  event->wait();
  stream_->wait(*signals, 1, 2);
  stream_->fill(values.floats(), 3.0f, 1);
  stream_->record(*event);
  signals->raise(0, 5);
  signals->raise(1, 1);
  signals->raise(2, 5);
  EXPECT_FALSE(event->done());
  EXPECT_EQ(floats(values.data(), 1)[0], 2.0f);
  signals->raise(1, 2);
  event->wait();
  EXPECT_EQ(floats(values.data(), 1)[0], 3.0f);
}

TEST_P(DeviceSuite, SignalsCountBeyondTheLastNumber) {
  const auto signals = device_->make_signals(1);
  const auto event = device_->make_event();
  for (uint64_t number = 0; number < (uint64_t{1} << 32); number += (1u << 30) - 1) {
    signals->raise(0, static_cast<uint32_t>(number));
  }
  signals->raise(0, 0xFFFFFFFF);
  stream_->wait(*signals, 0, 0xFFFFFFFF);
  stream_->synchronize();
  stream_->wait(*signals, 0, 1);
  stream_->record(*event);
  EXPECT_FALSE(event->done());
  signals->raise(0, 1);
  event->wait();
}

TEST_P(DeviceSuite, SignalsThatFailEndAllWaitsAndPoison) {
  const auto signals = device_->make_signals(2);
  const DeviceMemory before = memory(std::vector<float>{1.0f, 2.0f});
  const DeviceMemory after = memory(std::vector<float>{1.0f, 2.0f, 3.0f});
  stream_->poison_if_failed(*signals, before.data(), before.bytes());
  stream_->synchronize();
  stream_->wait(*signals, 1, 7);
  stream_->poison_if_failed(*signals, after.data(), 2 * sizeof(float));
  const auto other = device_->make_stream("other");
  signals->fail();
  stream_->synchronize();
  EXPECT_EQ(floats(before.data(), 2), (std::vector<float>{1.0f, 2.0f}));
  EXPECT_TRUE(is_poisoned(bytes(after.data(), 2 * sizeof(float))));
  EXPECT_EQ(floats(after.floats() + 2, 1)[0], 3.0f);
  other->wait(*signals, 0, 100);  // later ones, too
  other->synchronize();
  signals->raise(0, 1);
  other->wait(*signals, 0, 100);
  other->synchronize();
}

TEST_P(DeviceSuite, SignalsAreOfOneDevice) {
  const auto signals = device_->make_signals(2);
  std::string what;
  EXPECT_EQ(code_of([&] { stream_->wait(*signals, 2, 0); }, &what), ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("wait for signal 2 of 2"));
  const auto other = GetParam().make(4096);
  const auto others = other->make_stream("other");
  EXPECT_EQ(code_of([&] { others->wait(*signals, 0, 0); }, &what), ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("signals of another device"));
  const DeviceMemory memory(*other, 4, "test");
  EXPECT_EQ(code_of([&] { others->poison_if_failed(*signals, memory.data(), 4); }),
            ErrorCode::kInvalid);
}

}  // namespace
}  // namespace phub
