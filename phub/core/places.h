// The places in memory of each branch's f32 arrays, for a core's chunks (branch_orders.h).
//
// Every place has memory of its own for all arrays. Two places exchange their arrays of a chunk by
// exchanging that memory, so nothing is copied: each chunk knows whose memory its places use. But
// ranks may get the parameters directly from the memory of place 0. Then the parameters of place 0
// always stay in its own memory, and are exchanged as values.
//
// The core's thread. Nothing allocates after construction.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/state8.h"
#include "phub/core/chunk_table.h"
#include "phub/core/job_parameters.h"

namespace phub {

class Places {
 public:
  enum Array : uint8_t { kParameters, kState0, kState1 };
  static constexpr std::array kArrays = {kParameters, kState0, kState1};

  Places(const JobArrays& arrays, const ChunkTable& table);
  // The bytes that it holds beside itself; `places` includes docks.
  static constexpr uint64_t bytes(uint64_t chunks, uint64_t places) {
    return chunks * places * sizeof(uint16_t);
  }

  // The chunk's elements in the branch that runs, and at any place; null if there is no such array.
  float* running(Array array, const CoreChunk& chunk) const { return at(0, array, chunk); }
  float* at(uint32_t place, Array array, const CoreChunk& chunk) const {
    const bool own = homes_.empty() || (array == kParameters && parameters_are_results_);
    float* const all = memory(own ? place : homes_[first_home(chunk) + place], array);
    return all ? all + offset_of(array, chunk) : nullptr;
  }
  bool has(Array array) const { return running_[array] != nullptr || has_8_bits(array); }
  // Whether the array has 8 bits per element. There is no other branch then.
  bool has_8_bits(Array array) const { return array > 0 && state8_[array - 1u]; }
  kernels::State8 state8(Array array, const CoreChunk& chunk) const {
    return state8_[array - 1u].from(chunk.offset, chunk.id);
  }
  // Copies the chunk's elements in the branch that runs, as f32. Those that a piece of the state
  // lacks are zero.
  void get(Array array, const CoreChunk& chunk, float* to) const;
  void set(Array array, const CoreChunk& chunk, const float* from) const;
  // Makes of such elements what get() has after set().
  void round(Array array, const CoreChunk& chunk, float* elements) const {
    if (has_pieces(array)) {
      std::fill(elements + elements_of(array, chunk), elements + chunk.elements, 0.0f);
    }
    if (has_8_bits(array)) {
      kernels::round_state(elements, chunk.elements, state8_[array - 1u].is_signed);
    }
  }
  size_t each() const { return each_; }  // arrays of a shelf

  // Ranks get the parameters from where they lie.
  bool parameters_are_results() const { return parameters_are_results_; }

  // Exchanges the chunk of the running branch with that at the place. Returns how many bytes it
  // read and wrote.
  uint64_t exchange(uint32_t place, const CoreChunk& chunk);

 private:
  bool has_pieces(Array array) const { return array > 0 && !pieces_.empty(); }
  uint64_t offset_of(Array array, const CoreChunk& chunk) const {
    return has_pieces(array) ? pieces_[chunk.id].offset[array - 1u] : chunk.offset;
  }
  uint32_t elements_of(Array array, const CoreChunk& chunk) const {
    return has_pieces(array) ? pieces_[chunk.id].elements[array - 1u] : chunk.elements;
  }
  size_t first_home(const CoreChunk& chunk) const { return table_.index_of(chunk) * places_; }
  float* memory(size_t home, Array array) const {
    if (home == 0) return running_[array];
    return array < each_ ? shelves_.arrays[(home - 1) * each_ + array] : nullptr;
  }

  const ChunkTable& table_;
  const std::array<float*, kArrays.size()> running_;
  const std::array<kernels::State8, 2> state8_;
  const std::span<const StatePiece> pieces_;  // there is no other branch if there are some
  const ShelfArrays shelves_;
  const size_t each_;
  const size_t places_;
  const bool parameters_are_results_;
  std::vector<uint16_t> homes_;  // [chunk][place]: whose memory it uses; empty: its own
};

}  // namespace phub
