// What the programs that bench/peers compares phub with have in common.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>

#include "bench/zerocompute/measures.h"

namespace phub {

// A number of a command line or of the environment. False: there is none, or not from `least` to
// `most`.
inline bool parse(const char* text, uint64_t least, uint64_t most, uint64_t& value) {
  if (text == nullptr) return false;
  const char* end = text + std::strlen(text);
  const auto result = std::from_chars(text, end, value);
  return result.ec == std::errc() && result.ptr == end && value >= least && value <= most;
}

// Adds one to the first element of what rank PHUB_PEERS_SPOIL contributes, in every round: so a
// test can see whether anybody notices.
inline void spoil_if_asked(uint32_t rank, float* gradient) {
  const char* asked = std::getenv("PHUB_PEERS_SPOIL");
  if (asked != nullptr && fmt::format("{}", rank) == asked) gradient[0] += 1;
}

// Prints `line` with the times of the rounds, as bench/peers reads it.
inline void print_line(nlohmann::json line, std::span<const double> round_us) {
  const Summary us = summarize(round_us);
  line.update({{"min_us", us.min}, {"p50_us", us.p50}, {"p99_us", us.p99}, {"max_us", us.max}});
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

}  // namespace phub
