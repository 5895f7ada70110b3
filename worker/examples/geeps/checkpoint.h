// A training's state in a file, which is replaced as a whole and checked when it is read.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace phub::examples {

struct Checkpoint {
  std::string of;      // the model, data and share that were trained
  uint64_t clock = 0;  // the next one
  std::vector<float> parameters, state;
  std::vector<float> optimizer;  // by key: its arrays of state, one after another
};

// Replaces the file, by one that has this name until it is complete. It is on disk when this
// returns; until then the old one remains. Throws Error(kInternal).
std::string unfinished(const std::string& path);
void save(const std::string& path, const Checkpoint& checkpoint);
// Throws Error: kNotFound, no such file; kInvalid, not a complete checkpoint; kMismatch, a
// checkpoint of something else than `of`.
Checkpoint load(const std::string& path, const std::string& of);

// FNV-1a, 64 bits.
uint64_t digest(std::span<const std::byte> bytes);

}  // namespace phub::examples
