// Frames as a worker sends them by hand: of all sizes, also none, in batches of any number.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <random>
#include <span>
#include <vector>

#include "tests/transport/link_test.h"
#include "transport/tcp/format.h"

namespace phub {

// `behind` the frames: their payloads; near: where each payload is in the worker's memory.
inline std::vector<std::byte> batch_of(std::span<const TcpFrame> frames,
                                       std::span<const std::byte> behind) {
  const TcpBatch batch = {.more = static_cast<uint32_t>(frames.size()) - 1, .first = frames[0]};
  std::vector<std::byte> bytes = make_message(batch, std::as_bytes(frames.subspan(1)));
  bytes.insert(bytes.end(), behind.begin(), behind.end());
  return bytes;
}

class TcpFramesTest : public LinkTest {
 protected:
  // Sends frames of `data` to the queue of rank 1, cut where nobody expects it. `near`: the data is
  // in the worker's memory, else it is sent.
  void expect_whole(std::span<const std::byte> data, bool near,
                    const std::function<void(std::span<const std::byte>)>& send) {
    constexpr size_t kFrames = 300;
    std::vector<TcpFrame> frames;
    std::vector<std::byte> stream, expected(data.size());
    while (frames.size() < kFrames) {
      const size_t first = frames.size();
      const size_t count = random_() % 2 == 0 ? 1 : 1 + random_() % kTcpMaxBatch;
      std::vector<uint64_t> sources;
      std::vector<std::byte> payloads;
      for (size_t i = 0; i < count; ++i) {
        const uint32_t bytes = random_() % 3 == 0 ? 0 : static_cast<uint32_t>(random_() % 60);
        const uint64_t at = random_() % (data.size() - bytes + 1);
        const auto payload = data.subspan(random_() % (data.size() - bytes + 1), bytes);
        frames.push_back({static_cast<uint32_t>(frames.size()), bytes, at});
        sources.push_back(bytes == 0 ? ~uint64_t{0}  // of none: any
                                     : static_cast<uint64_t>(payload.data() - data.data()));
        payloads.insert(payloads.end(), payload.begin(), payload.end());
        std::ranges::copy(payload, expected.begin() + static_cast<ptrdiff_t>(at));
      }
      std::ranges::copy(
          batch_of(std::span(frames).subspan(first),
                   near ? std::as_bytes(std::span(sources)) : std::span<const std::byte>(payloads)),
          std::back_inserter(stream));
    }
    std::vector<Arrival> come;
    for (std::span<const std::byte> rest = stream; !rest.empty();) {
      const size_t piece = std::min<size_t>(rest.size(), 1 + random_() % 40);
      send(rest.first(piece));
      rest = rest.subspan(piece);
      std::array<Arrival, 2> few;
      const size_t taken = box_->endpoint(0).poll(few);
      come.insert(come.end(), few.begin(), few.begin() + static_cast<ptrdiff_t>(taken));
    }
    std::ranges::copy(poll(box_->endpoint(0), frames.size() - come.size()),
                      std::back_inserter(come));
    ASSERT_EQ(come.size(), frames.size()) << "PHUB_SEED=" << seed_;
    for (size_t i = 0; i < frames.size(); ++i) {
      ASSERT_TRUE(come[i].ok && come[i].rank == 1);
      ASSERT_EQ(come[i].imm, i);
      ASSERT_EQ(come[i].bytes, frames[i].bytes);  // what the core compares with its chunk
      ASSERT_EQ(come[i].offset, frames[i].remote_offset);
    }
    EXPECT_TRUE(std::ranges::equal(box_->slots(1), expected)) << "PHUB_SEED=" << seed_;
  }
};

}  // namespace phub
