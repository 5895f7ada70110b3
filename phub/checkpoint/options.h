// The options of a server's checkpoints: the times and the place.
#pragma once

#include <cstdint>
#include <string>

namespace phub {

class Files;

struct CheckpointOptions {
  std::string folder;      // empty: none are written
  uint64_t every = 100;    // rounds
  uint32_t keep = 3;       // checkpoints of each job
  Files* files = nullptr;  // null: those of the operating system
};

}  // namespace phub
