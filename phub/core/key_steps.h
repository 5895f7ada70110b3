// The keys of a gated job whose step needs all of their gradient (kernels/whole_key.h): who makes
// it, and what the cores need to apply it.
//
// Every core says when it has summed a chunk of such a key. The core that sums the last one makes
// the key's direction, in place of the sums, and its new state, beside the old one; the other cores
// go on with other keys meanwhile. That core then closes the gate (round_gate.h) for its chunks, so
// the decision comes after all directions. If the round is not skipped, each core applies the
// direction to its chunks, and replaces their state. So a skipped round leaves everything as it
// was.
//
// In some chunks of a key no rank may take part: the only one was lost before it sent them. Their
// gradient is zero then, and they are not stepped.
//
// It is made with the job by the control thread; a core that has the job calls each function.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/whole_key.h"
#include "phub/core/hyper.h"
#include "phub/core/job_parameters.h"

namespace phub {

class KeySteps {
 public:
  using Settings = HyperView;

  // A chunk of the job, in the order of keys and of a key's elements.
  struct Chunk {
    uint32_t key = 0;
    uint32_t elements = 0;
    uint32_t settings = 0;  // the class of its key
    uint64_t offset = 0;    // in the job's arrays, elements
  };
  // `keys`: by key of the job. The arrays have state pieces, and sums.
  KeySteps(std::vector<kernels::WholeKey> keys, std::vector<Chunk> chunks, const JobArrays& arrays,
           uint32_t cores);
  // The bytes that it holds, its scratch included.
  static uint64_t bytes(std::span<const kernels::WholeKey> keys, uint64_t chunks, uint64_t cores);

  // Whether the chunk's key has such a step.
  bool has(uint32_t chunk) const {
    return keys_[chunks_[chunk].key].whole.rule != kernels::KeyRule::kElements;
  }

  // The core has summed the chunk, whose optimizer's step in this round has the number `step`.
  // `unused`: no rank has sent a gradient. The key makes no step if all of its chunks are so; else
  // their gradient is zero. REQUIRES: has(chunk); once for each chunk and round, and before the
  // core closes the gate.
  void close(uint32_t core, uint32_t chunk, uint64_t round, uint64_t step, bool unused,
             const Settings& settings);
  // Makes the directions of keys that have chunks which the round leaves out. REQUIRES: all cores
  // have closed the round, and it is not decided.
  void complete(uint32_t core, uint64_t round, const Settings& settings);

  // How the chunk is stepped. REQUIRES: has(chunk); the round is decided.
  struct Part {
    bool unused = false;  // not at all
    kernels::KeyStep step;
    const float* direction = nullptr;
    std::span<const float> new_state;
    float* state = nullptr;
  };
  Part part_of(uint32_t chunk) const;

 private:
  struct Key {
    kernels::WholeKey whole;
    uint32_t first = 0, chunks = 0;
    bool unused = false;
    kernels::KeyStep step;
  };
  void make_step(uint32_t core, uint32_t key, uint64_t round, const Settings& settings);

  const std::vector<Chunk> chunks_;
  const JobArrays arrays_;
  std::vector<Key> keys_;
  std::vector<uint64_t> steps_;  // by chunk, of the round that is being closed; 0: it is unused
  const std::unique_ptr<std::atomic<uint32_t>[]> open_;  // by key, chunks that are not summed
  std::vector<std::vector<float>> scratch_;              // by core
};

}  // namespace phub
