// The seeds of a random test: others in every run, so that what passes today is tried again
// elsewhere tomorrow. They are printed; PHUB_SEED=N runs that one alone. PHUB_TEST_SCALE multiplies
// how much such a test does: 20 before a release, 0.1 under sanitizers.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace phub::testing {

inline double test_scale() {
  const char* text = std::getenv("PHUB_TEST_SCALE");
  return text ? std::strtod(text, nullptr) : 1.0;
}

// At least one.
inline uint64_t scaled(uint64_t count) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(static_cast<double>(count) * test_scale()));
}

struct Seeds {
  uint64_t first = 1;
  uint64_t count = 1;

  uint64_t end() const { return first + count; }
};

inline Seeds fresh_seeds(uint64_t count) {
  Seeds seeds{.first = 1 + std::random_device{}() % 1'000'000'000, .count = count};
  if (const char* text = std::getenv("PHUB_SEED")) {
    seeds = {.first = std::strtoull(text, nullptr, 10), .count = 1};
  }
  std::printf("seeds %" PRIu64 "..%" PRIu64 "; PHUB_SEED=N runs one of them alone\n", seeds.first,
              seeds.end() - 1);
  std::fflush(stdout);
  return seeds;
}

}  // namespace phub::testing
