// Workers, a switch that adds, and a box, in virtual time: packets are lost, doubled and overtake
// each other; the switch forgets, dies and is too small; workers are late and are replaced. What is
// sent directly, and results, come over links that lose nothing, as over TCP.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "tests/transport/adder.h"
#include "transport/switch/receiver.h"
#include "transport/switch/sender.h"

namespace phub::test {

struct SwitchScene {
  uint64_t seed = 1;
  uint32_t workers = 3;
  uint16_t slots = 4;  // that the workers use
  std::vector<uint32_t> elements = {700, 1, 256, 1025};
  uint32_t rounds = 4;
  double loss = 0, twice = 0, late = 0;  // of packets: share that is lost, comes twice, is slow
  // The switch, after so long, and again after that and 100 ms (parts are repeated every 32 ms or
  // sooner).
  std::optional<uint64_t> forgets_ns;
  // From when to when it is no switch that adds; `silent`: then nothing comes through at all.
  uint64_t dead_from_ns = 0, dead_to_ns = 0;
  bool silent = false;
  std::optional<uint64_t> replaced_ns;  // a worker, every so often
  uint64_t straggler_ns = 0;            // worker 0 begins so late
  uint64_t give_up_ns = 4'000'000'000;
  bool tries_again = true;  // a new generation when a round is complete
};

struct SwitchOutcome {
  uint64_t closed_by_switch = 0, closed_directly = 0;
  uint32_t generations = 0;
  uint64_t packets = 0, repeats = 0;
  std::string problem;  // empty: every result was right, and counted everyone once
};

// Runs the scene to its end, and holds every result to the sum of the slots (kernels/) that the
// workers encoded, and to the reference's.
SwitchOutcome play(const SwitchScene& scene, Adder& adder);

}  // namespace phub::test
