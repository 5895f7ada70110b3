// The suite's tests of memory: budget, poison, copies.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "tests/device/device_suite.h"

namespace phub {
namespace {

using ::testing::HasSubstr;

TEST_P(DeviceSuite, TheBudgetIsExactAndAnExcessIsExplained) {
  const DeviceMemory first(*device_, kBudget - 4096, "first");
  const DeviceMemory last(*device_, 4096, "last");
  EXPECT_EQ(device_->stats().used_bytes, kBudget);
  std::string what;
  EXPECT_EQ(code_of([&] { device_->allocate(100, "one more"); }, &what), ErrorCode::kFull);
  EXPECT_THAT(what, HasSubstr("100 bytes for 'one more'"));
  EXPECT_THAT(what, HasSubstr("8388608 of 8388608 bytes are in use"));
}

TEST_P(DeviceSuite, ReleasedMemoryIsUsedAgain) {
  for (int i = 0; i < 3; ++i) {
    const DeviceMemory all = memory(kBudget);
    EXPECT_EQ(device_->stats().used_bytes, kBudget);
  }
  EXPECT_EQ(device_->stats().used_bytes, 0u);
  EXPECT_EQ(device_->stats().peak_bytes, kBudget);
}

TEST_P(DeviceSuite, AGapThatIsTooSmallIsNotEnough) {
  void* first = device_->allocate(kBudget / 4, "first");
  const DeviceMemory second = memory(kBudget / 2);
  device_->release(first);
  std::string what;
  EXPECT_EQ(code_of([&] { device_->allocate(kBudget / 2, "third"); }, &what), ErrorCode::kFull);
  EXPECT_THAT(what, HasSubstr("the largest free part has 2097152"));
}

TEST_P(DeviceSuite, ReleasingTwiceOrWhatIsNotOursIsAnError) {
  void* mine = device_->allocate(1000, "mine");
  auto* inside = static_cast<std::byte*>(mine) + 256;
  std::string what;
  EXPECT_EQ(code_of([&] { device_->release(inside); }, &what), ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("not the beginning of an allocation"));
  device_->release(mine);
  EXPECT_EQ(code_of([&] { device_->release(mine); }, &what), ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("released already"));
  int foreign = 0;
  EXPECT_EQ(code_of([&] { device_->release(&foreign); }, &what), ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("not memory of this device"));
  EXPECT_EQ(code_of([&] { device_->release_host(&foreign); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { device_->unpin_host(&foreign); }), ErrorCode::kInvalid);
  device_->release(nullptr);
  device_->release_host(nullptr);
}

TEST_P(DeviceSuite, NewMemoryIsPoisonedEvenWhereOtherMemoryWas) {
  for (int i = 0; i < 2; ++i) {
    const DeviceMemory all = memory(1 << 20);
    EXPECT_TRUE(is_poisoned(bytes(all.data(), all.bytes())));
    EXPECT_TRUE(std::isnan(floats(all.data(), 1)[0]));
    stream_->fill(all.floats(), 1.0f, all.bytes() / sizeof(float));
    stream_->synchronize();
    EXPECT_FALSE(is_poisoned(bytes(all.data(), all.bytes())));
  }
}

TEST_P(DeviceSuite, ReleasedMemoryIsRefused) {
  void* gone = device_->allocate(1000, "gone");
  device_->release(gone);
  std::array<std::byte, 16> out{};
  EXPECT_EQ(code_of([&] { device_->read(out.data(), gone, out.size()); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { device_->write(gone, out.data(), out.size()); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { stream_->fill(static_cast<float*>(gone), 0, 4); }), ErrorCode::kInvalid);
}

TEST_P(DeviceSuite, NothingIsNothing) {
  EXPECT_EQ(device_->allocate(0, "nothing"), nullptr);
  EXPECT_EQ(device_->allocate_host(0, "nothing"), nullptr);
  stream_->copy_to_device(nullptr, nullptr, 0);
  stream_->fill(nullptr, 0, 0);
  const RowIndex none(*device_, {});
  stream_->gather({nullptr, 0, 128}, none, nullptr);
  stream_->synchronize();
  EXPECT_EQ(device_->stats().copies + device_->stats().kernels, 0u);
}

TEST_P(DeviceSuite, CopiesGoBothWays) {
  const std::vector<float> values = random_floats(100003);
  const size_t size = values.size() * sizeof(float);
  const HostMemory there(*device_, size, "there");
  const HostMemory back(*device_, size, "back");
  EXPECT_EQ(back.floats()[0], 0.0f);
  EXPECT_EQ(device_->stats().host_bytes, 2 * size);
  std::copy(values.begin(), values.end(), there.floats().begin());
  const DeviceMemory a = memory(size);
  const DeviceMemory b = memory(size);
  stream_->copy_to_device(a.data(), there.data(), size);
  stream_->copy_on_device(b.data(), a.data(), size);
  stream_->copy_to_host(back.data(), b.data(), size);
  stream_->synchronize();
  EXPECT_TRUE(std::equal(values.begin(), values.end(), back.floats().begin()));
  const DeviceStats stats = device_->stats();
  EXPECT_EQ(stats.bytes_to_device, size);
  EXPECT_EQ(stats.bytes_to_host, size);
  EXPECT_EQ(stats.copies, 2u);
  EXPECT_EQ(stats.kernels, 1u);
}

TEST_P(DeviceSuite, CopiesNeedPinnedMemoryOfTheHost) {
  std::vector<float> mine(1024, 3.0f);
  const size_t size = mine.size() * sizeof(float);
  const DeviceMemory there = memory(size);
  std::string what;
  EXPECT_EQ(code_of([&] { stream_->copy_to_device(there.data(), mine.data(), size); }, &what),
            ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("not pinned"));
  device_->pin_host(mine.data(), size, HostUse::kReadWrite, "mine");
  EXPECT_EQ(code_of([&] { device_->pin_host(mine.data() + 8, 4, HostUse::kRead, "again"); }),
            ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { device_->release_host(mine.data()); }), ErrorCode::kInvalid);
  stream_->copy_to_device(there.data(), mine.data(), size);
  stream_->synchronize();
  EXPECT_EQ(floats(there.data(), mine.size()), mine);
  EXPECT_EQ(code_of([&] { stream_->copy_to_device(there.data(), mine.data() + 1, size); }),
            ErrorCode::kInvalid);
  device_->unpin_host(mine.data());
  EXPECT_EQ(code_of([&] { stream_->copy_to_host(mine.data(), there.data(), size); }),
            ErrorCode::kInvalid);
}

TEST_P(DeviceSuite, WhatIsPinnedForReadingIsNotWritten) {
  std::vector<float> mine(1024, 3.0f);
  const size_t size = mine.size() * sizeof(float);
  const DeviceMemory there = memory(size);
  std::string what;
  {
    const PinnedMemory pinned(*device_, mine.data(), size, HostUse::kRead, "mine");
    stream_->copy_to_device(there.data(), mine.data(), size);
    EXPECT_EQ(code_of([&] { stream_->copy_to_host(mine.data(), there.data(), size); }, &what),
              ErrorCode::kInvalid);
    EXPECT_THAT(what, HasSubstr("pinned for reading only"));
    stream_->synchronize();
    EXPECT_EQ(device_->stats().host_bytes, size);
  }
  EXPECT_EQ(floats(there.data(), mine.size()), mine);
  EXPECT_EQ(device_->stats().host_bytes, 0u);
}

TEST_P(DeviceSuite, RangesEndWithTheirAllocation) {
  const DeviceMemory a = memory(1000);
  const DeviceMemory b = memory(1000);
  const HostMemory host(*device_, 4096, "host");
  std::string what;
  EXPECT_EQ(code_of([&] { stream_->copy_to_device(a.data(), host.data(), 1001); }, &what),
            ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("not inside one allocation"));
  EXPECT_EQ(code_of([&] { stream_->copy_to_host(host.data(), host.data(), 8); }),
            ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { stream_->fill(a.floats() + 1, 0, 250); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { stream_->fill(a.floats(), 0, SIZE_MAX / 2); }), ErrorCode::kInvalid);
  EXPECT_EQ(code_of([&] { stream_->copy_on_device(a.data(), a.floats() + 1, 8); }, &what),
            ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("overlap"));
  stream_->synchronize();
  EXPECT_TRUE(is_poisoned(bytes(a.data(), 1000)));
  EXPECT_TRUE(is_poisoned(bytes(b.data(), 1000)));
}

}  // namespace
}  // namespace phub
