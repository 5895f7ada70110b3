// In which order chunks go that wait for room in a queue, or for the budget of a NIC (Poseidon,
// section 4.3.3).
#pragma once

#include <cstdint>
#include <string_view>

namespace phub {

enum class SendOrder : uint8_t {
  kPriority,   // by the sum of KeySpec::priority and the push's priority
  kFifo,       // in the order of the pushes
  kRandom,     // in an order that job, rank and round decide
  kMagnitude,  // the largest gradient first, relative to its parameters, chunk by chunk
};

// "priority", "fifo", "random", "magnitude". Throws Error(kInvalid).
SendOrder parse_send_order(std::string_view word);

// SplitMix64: the value of a number in the shuffled order of a job.
constexpr uint64_t shuffled(uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return number ^ (number >> 31);
}

}  // namespace phub
