// Where the results of chunks arrive, and how a difference becomes a result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/encode.h"
#include "transport/layout.h"

namespace phub {

class Results {
 public:
  // If results come back as differences, that of `whole_round` comes whole all the same. `elements`
  // is the number in all results. With `adds`, differences are added here, of at most
  // `largest_chunk` elements; otherwise the transport does it.
  Results(const ResultFormat& format, uint64_t whole_round, uint64_t elements, bool adds,
          uint32_t largest_chunk)
      : format_(format), whole_round_(whole_round), elements_(elements) {
    if (!format_.difference || !adds) return;
    difference_ = kernels::parse_format(format_.difference->name);
    decoded_.resize(largest_chunk);
  }

  ResultPlace place(const ChunkLayout& chunk, uint64_t round) const {
    if (!format_.difference || round == whole_round_) {
      return result_place(format_, chunk.offset, chunk.elements);
    }
    return difference_place(format_, elements_, chunk.offset, chunk.elements);
  }
  bool adds(uint64_t round) const { return difference_ && round != whole_round_; }
  // Adds the chunk's difference, which has arrived, to its result. REQUIRES: adds(round).
  void add(std::span<std::byte> results, const ChunkLayout& chunk, uint64_t round) {
    auto* const view = reinterpret_cast<float*>(
        results.data() + result_place(format_, chunk.offset, chunk.elements).byte);
    kernels::add_decoded(results.data() + place(chunk, round).byte, *difference_, decoded_.data(),
                         view, chunk.elements);
  }

 private:
  const ResultFormat format_;
  const uint64_t whole_round_, elements_;
  std::optional<kernels::DType> difference_;  // its format, if it is added here
  std::vector<float> decoded_;                // room for the largest chunk
};

}  // namespace phub
