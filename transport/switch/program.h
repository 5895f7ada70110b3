// Loads the program of the switch that adds (program.bpf.c) into the kernel, and attaches it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/switch/shared.h"

namespace phub {

// One thread at a time.
class SwitchProgram {
 public:
  // Has so many slots, in two sets. Throws Error: kUnavailable, this build or this host has no
  // libbpf, or the kernel refuses the program; kInvalid, the slots are not from 1 to
  // kMostSwitchSlots.
  explicit SwitchProgram(uint32_t slots);
  ~SwitchProgram();

  // From now on parts of worker i are taken from ports[i] alone. REQUIRES: at most kSwitchWorkers;
  // each the index of an interface.
  void set_ports(std::span<const uint32_t> ports);
  // Adds the packets that come in on these interfaces of this network namespace, from worker 0, 1,
  // and so on, until this object or the process ends. Throws Error: kInvalid, too many of them, or
  // one twice; kNotFound, there is no such interface; kUnavailable, the kernel refuses.
  void attach(std::span<const std::string> interfaces);

  // The number of parts by their outcome: by SwitchVerdict, and kSwitchForged.
  std::array<uint64_t, kSwitchCounters> counters() const;
  // Makes all slots as they were in the beginning.
  void forget();

  // Runs the program on a frame as if it had come in on interface 1 (lo), and changes the frame as
  // the program does: BPF_PROG_TEST_RUN. Returns XDP_PASS or XDP_DROP. Throws Error(kInternal).
  uint32_t run(std::span<std::byte> frame);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace phub
