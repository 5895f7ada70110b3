// When and where a server writes checkpoints of its jobs.
#pragma once

#include <cstdint>
#include <string>

namespace phub {

class Files;

struct CheckpointOptions {
  std::string folder;      // empty: none are written
  uint64_t every = 100;    // rounds
  uint32_t keep = 3;       // of each job
  Files* files = nullptr;  // null: those of the operating system
};

}  // namespace phub
