// Switches that add, for tests: what becomes of a part in one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "transport/switch/slot.h"

namespace phub::test {

// What a switch does with a part; the packet becomes what goes on.
class Adder {
 public:
  virtual ~Adder() = default;
  virtual SwitchVerdict take(SwitchPacket& packet) = 0;
  virtual void forget() = 0;
};

// The state machine that the program of the switch is compiled from.
class PlainAdder : public Adder {
 public:
  explicit PlainAdder(uint16_t slots) : count_(slots), slots_(2u * slots) {}
  SwitchVerdict take(SwitchPacket& packet) override {
    if (packet.header.slot >= count_) return kSwitchRefused;
    return switch_take(&slots_[switch_place(packet.header.slot, packet.header.turn)],
                       &packet.header, packet.codes);
  }
  void forget() override { std::fill(slots_.begin(), slots_.end(), SwitchSlot{}); }

 private:
  uint16_t count_;
  std::vector<SwitchSlot> slots_;
};

}  // namespace phub::test
