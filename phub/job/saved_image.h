// What a checkpoint has of one box's part of a job, as bytes one after another: the f32 arrays in
// the box's layout, then the clocks. It moves between two boxes in pieces, and both count its bytes
// alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace phub {

class SavedImage {
 public:
  SavedImage() = default;
  // Where its bytes lie; the memory outlives this.
  explicit SavedImage(std::vector<std::span<std::byte>> memory) : memory_(std::move(memory)) {}

  uint64_t bytes() const {
    uint64_t bytes = 0;
    for (const auto& one : memory_) bytes += one.size();
    return bytes;
  }
  // The bytes from `offset` on, `most` of them at most; fewer where another array begins, none
  // behind the last.
  std::span<std::byte> piece(uint64_t offset, uint64_t most) const {
    for (const auto& one : memory_) {
      if (offset < one.size()) {
        return one.subspan(offset, std::min<uint64_t>(most, one.size() - offset));
      }
      offset -= one.size();
    }
    return {};
  }

 private:
  std::vector<std::span<std::byte>> memory_;
};

}  // namespace phub
