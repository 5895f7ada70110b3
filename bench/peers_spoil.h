// Makes a peer compute something else on purpose, so that a test can see whether anybody notices.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>

namespace phub {

// Adds one to the first element of what rank PHUB_PEERS_SPOIL contributes, in every round.
inline void spoil_if_asked(uint32_t rank, float* gradient) {
  const char* asked = std::getenv("PHUB_PEERS_SPOIL");
  if (asked != nullptr && fmt::format("{}", rank) == asked) gradient[0] += 1;
}

}  // namespace phub
