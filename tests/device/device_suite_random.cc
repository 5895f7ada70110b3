// Random work on several streams, ordered by events only where it must be, against flat arrays.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tests/device/device_suite.h"
#include "tests/seeds.h"

namespace phub {
namespace {

constexpr size_t kBuffers = 6;
constexpr size_t kStreams = 4;
constexpr size_t kRows = 64;
constexpr size_t kRowFloats = 37;
constexpr size_t kFloats = kRows * kRowFloats;
constexpr size_t kBytes = kFloats * sizeof(float);

// Who wrote and who read a buffer last: what the next work on it has to wait for.
struct Buffer {
  DeviceMemory memory;
  HostMemory host;  // the buffer's other half; copies go between the two
  std::vector<float> expected, host_expected;
  std::array<std::unique_ptr<Event>, kStreams> used;  // the last use, by stream
};

TEST_P(DeviceSuite, RandomWorkOnSeveralStreamsEqualsTheSameInOneThread) {
  std::array<Buffer, kBuffers> buffers;
  std::array<std::unique_ptr<Stream>, kStreams> streams;
  for (size_t i = 0; i < kStreams; ++i) streams[i] = device_->make_stream(fmt::format("s{}", i));
  for (Buffer& buffer : buffers) {
    buffer.expected = random_floats(kFloats);
    buffer.memory = memory(buffer.expected);
    buffer.host = HostMemory(*device_, kBytes, "host");
    buffer.host_expected.assign(kFloats, 0.0f);
    for (auto& event : buffer.used) event = device_->make_event();
  }
  std::vector<std::vector<uint32_t>> rows;
  std::vector<RowIndex> indexes;
  for (int i = 0; i < 4; ++i) {
    rows.push_back(random_rows(random(1, kRows), kRows, true));
    indexes.emplace_back(*device_, rows.back());
  }

  for (uint64_t step = 0; step < phub::testing::scaled(1000); ++step) {
    const size_t s = random(0, kStreams - 1);
    Stream& stream = *streams[s];
    Buffer& to = buffers[random(0, kBuffers - 1)];
    Buffer& from = buffers[random(0, kBuffers - 1)];
    for (Buffer* buffer : {&to, &from}) {
      for (const auto& event : buffer->used) stream.wait(*event);
    }
    const size_t which = random(0, indexes.size() - 1);
    const RowIndex& index = indexes[which];
    const Rows table{to.memory.floats(), kRows, kRowFloats};
    const size_t kind = random(0, &to == &from ? 3 : 7);
    if (kind == 0) {
      stream.copy_to_host(to.host.data(), to.memory.data(), kBytes);
      to.host_expected = to.expected;
    } else if (kind == 1) {
      stream.copy_to_device(to.memory.data(), to.host.data(), kBytes);
      to.expected = to.host_expected;
    } else if (kind == 2) {
      stream.fill(to.memory.floats(), static_cast<float>(step), kFloats / 2);
      std::fill_n(to.expected.begin(), kFloats / 2, static_cast<float>(step));
    } else if (kind == 3) {
      stream.call([] {});
    } else if (kind == 4) {
      stream.gather({from.memory.floats(), kRows, kRowFloats}, index, to.memory.floats());
      for (size_t i = 0; i < rows[which].size(); ++i) {
        std::copy_n(from.expected.begin() + rows[which][i] * kRowFloats, kRowFloats,
                    to.expected.begin() + i * kRowFloats);
      }
    } else if (kind == 5) {
      stream.scatter(from.memory.floats(), index, table);
      for (size_t i = 0; i < rows[which].size(); ++i) {
        std::copy_n(from.expected.begin() + i * kRowFloats, kRowFloats,
                    to.expected.begin() + rows[which][i] * kRowFloats);
      }
    } else if (kind == 6) {
      stream.add_scaled(0.25f, from.memory.floats(), to.memory.floats(), kFloats);
      for (size_t i = 0; i < kFloats; ++i) {
        const float product = 0.25f * from.expected[i];
        to.expected[i] += product;
      }
    } else {
      stream.copy_on_device(to.memory.data(), from.memory.data(), kBytes);
      to.expected = from.expected;
    }
    stream.record(*to.used[s]);
    stream.record(*from.used[s]);
  }
  for (const auto& stream : streams) stream->synchronize();
  for (size_t i = 0; i < kBuffers; ++i) {
    EXPECT_EQ(floats(buffers[i].memory.data(), kFloats), buffers[i].expected) << i;
    EXPECT_TRUE(std::equal(buffers[i].host_expected.begin(), buffers[i].host_expected.end(),
                           buffers[i].host.floats().begin()))
        << i;
  }
}

}  // namespace
}  // namespace phub
