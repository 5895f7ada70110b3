// The initial parameters of a job while a rank sends them: in f32, each chunk's in parts that fit
// into its slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "transport/layout.h"
#include "transport/transport.h"

namespace phub {

class InitialParameters {
 public:
  // `needed`: this rank is the one that sends them.
  explicit InitialParameters(bool needed) : needed_(needed) {}

  bool needed() const { return needed_; }  // they are to be sent
  bool sending() const { return !of_key_.empty(); }

  // `of_key(key)` returns those of a key, whose memory is used until forget().
  void begin(size_t keys, const std::function<const float*(size_t key)>& of_key) {
    std::vector<const float*> all;
    for (size_t k = 0; k < keys; ++k) all.push_back(of_key(k));
    of_key_ = std::move(all);
  }
  // Writes a part of a chunk into its slot. REQUIRES: sending().
  void stage(WorkerLink& link, const ChunkLayout& chunk, uint32_t part) const {
    const auto [first, count] = initial_part(chunk.elements, chunk.slot_bytes, part);
    const float* const from = of_key_[chunk.key] + chunk.key_element + first;
    link.write_gradients(chunk.gradient_offset, std::as_bytes(std::span(from, count)));
  }
  void all_begun() { needed_ = false; }
  void forget() { of_key_.clear(); }

 private:
  bool needed_;
  std::vector<const float*> of_key_;  // empty: they are not being sent
};

}  // namespace phub
