// What comes to a box and to a worker of a switch that adds, from anywhere; and what a switch makes
// of parts that nobody would send.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/fuzz/input.h"
#include "transport/error.h"
#include "transport/switch/receiver.h"
#include "transport/switch/sender.h"
#include "transport/switch/slot.h"

using namespace phub;  // NOLINT: a fuzz target

namespace {

class Uplink : public SwitchOwner {
 public:
  void fill(uint64_t chunk, uint32_t first, int exponent, std::span<int32_t> codes) override {
    PHUB_CHECK(chunk < 3 && first < 600 && exponent >= -9 && codes.size() == kSwitchElements);
  }
  void send(const SwitchPacket& packet) override { PHUB_CHECK(packet.header.slot < 2); }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  testing::Input input(std::span(data, size));
  SwitchReceiver box({.workers = 3, .generation = 2, .slots = 2, .elements = {300, 1, 600}});
  Uplink uplink;
  SwitchSender worker({.worker = 1, .workers = 3, .generation = 2, .slots = 2, .max_chunks = 6},
                      uplink);
  std::vector<SwitchSlot> slots(4);
  for (uint64_t handle = 0; handle < 3; ++handle) {
    worker.push({.handle = handle,
                 .chunk = static_cast<uint32_t>(handle),
                 .elements = 200,
                 .exponent = static_cast<int16_t>(handle - 9)},
                0);
  }
  while (!input.empty()) {
    SwitchPacket packet{};
    packet.header = input.take<SwitchHeader>();
    // What is wrong at once ends everything: mostly it is right.
    const auto right = input.take();
    if (right & 1) packet.header.magic = kSwitchMagic;
    if (right & 2) packet.header.generation = 2;
    if (right & 4) packet.header.workers = 3;
    if (right & 8) packet.header.slot &= 1;
    if (right & 16) packet.header.turn &= 3;
    if (right & 32) packet.header.chunk &= 1;
    if (right & 64) packet.header.round = 1;
    packet.codes[0] = input.take<int32_t>();
    const auto answer = box.receive(std::as_bytes(std::span(&packet, 1)));
    if (answer.closed) {
      PHUB_CHECK(!box.ended() && box.closed(answer.header.chunk));
      PHUB_CHECK(!box.sums(answer.header.chunk).empty());
      box.begin_next(answer.header.chunk);
    }
    worker.receive(packet.header, 1);
    worker.poll(input.take() * 10'000'000u);
    SwitchSlot& slot = slots[packet.header.slot % 2 * 2 + packet.header.turn % 2];
    switch_take(&slot, &packet.header, packet.codes);
    PHUB_CHECK((slot.arrived & ~slot.workers) == 0);
  }
  return 0;
}
