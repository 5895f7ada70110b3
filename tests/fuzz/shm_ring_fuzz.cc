// Rings whose other end writes anything at any time: the input is a list of what the liar stores
// and of what the endpoint does in between.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "transport/error.h"
#include "transport/shm/endpoint.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

constexpr uint32_t kEntries = 8;
constexpr uint32_t kPairs = 2;

struct alignas(kShmLine) Memory {
  ShmRing ring;
  std::array<std::atomic<uint32_t>, kEntries> entries;
  std::array<uint32_t, 32> canary;
};

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  template <typename T>
  T take() {
    T value = {};
    const size_t count = std::min(sizeof(T), size_);
    std::memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {  // NOLINT: its name
  static std::array<Memory, kPairs> in, out;
  static ShmEndpoint endpoint(1, kPairs);
  for (auto* side : {&in, &out}) {
    for (Memory& memory : *side) {
      std::memset(static_cast<void*>(&memory), 0, sizeof(memory));
      memory.canary.fill(0xc0ffee);
    }
  }
  for (uint32_t qp = 0; qp < kPairs; ++qp) {
    endpoint.open({.rank = qp}, ShmConsumer(&in[qp].ring, kEntries),
                  ShmProducer(&out[qp].ring, kEntries), -1);
  }
  std::array<bool, kPairs> silent = {};
  for (Input input(data, size); !input.empty();) {
    const auto op = input.take<uint8_t>();
    const uint32_t qp = (op >> 7) % kPairs;
    switch (op & 15) {
      case 0:
        in[qp].ring.tail = input.take<uint32_t>();
        break;
      case 1:
        in[qp].ring.tail += input.take<uint8_t>() % 10;
        break;
      case 2:
        out[qp].ring.head = input.take<uint32_t>();
        break;
      case 3:
        out[qp].ring.head += input.take<uint8_t>() % 10;
        break;
      case 4:
        out[qp].ring.wake_at = input.take<uint64_t>();
        break;
      case 5:
        out[qp].ring.wake_at = kShmArmed | (out[qp].ring.tail + input.take<uint8_t>());
        break;
      case 6:
        in[qp].ring.wake_at = input.take<uint64_t>();
        break;
      case 7:
        in[qp].entries[op >> 4 & 7] = input.take<uint32_t>();
        break;
      case 8:
        in[qp].ring.head = input.take<uint32_t>();
        break;
      case 9: {
        const std::array<uint32_t, kPairs> wanted = {input.take<uint32_t>(), input.take<uint8_t>()};
        endpoint.arm(wanted);
        break;
      }
      case 10:
        endpoint.disarm();
        break;
      case 11: {
        const bool posted = endpoint.post({.rank = qp}, {0, 0, 0, op});
        PHUB_CHECK(!posted || !silent[qp]);
        break;
      }
      case 12:
        endpoint.flush();
        break;
      default: {
        std::array<Arrival, 32> arrivals;
        const size_t taken = endpoint.poll(std::span(arrivals).first(1 + (op >> 4)));
        PHUB_CHECK(taken <= 1u + (op >> 4));
        for (size_t i = 0; i < taken; ++i) {
          PHUB_CHECK(arrivals[i].rank < kPairs && !silent[arrivals[i].rank]);
          if (!arrivals[i].ok) silent[arrivals[i].rank] = true;
        }
      }
    }
  }
  for (uint32_t qp = 0; qp < kPairs; ++qp) endpoint.close({.rank = qp});
  for (auto* side : {&in, &out}) {
    for (const Memory& memory : *side) {
      for (const uint32_t word : memory.canary) PHUB_CHECK(word == 0xc0ffee);
    }
  }
  return 0;
}
