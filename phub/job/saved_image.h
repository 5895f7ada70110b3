// An image of state that moves between two boxes in pieces, a sequence of bytes that both boxes
// count alike: a checkpoint of one box's part of a job (the f32 arrays in the box's layout, with
// those of shelves, then the clocks, and the steps of shelves), or the box's part of the state of
// keys, or of a branch that comes from files (transport/control/shard_messages.h).
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
  // `memory` has its bytes, and outlives this. `in_one`: its pieces do not end where an array does,
  // as the arrays are contiguous in the other box.
  explicit SavedImage(std::vector<std::span<std::byte>> memory, bool in_one = false)
      : memory_(std::move(memory)), in_one_(in_one) {}

  void append(const SavedImage& more) {
    memory_.insert(memory_.end(), more.memory_.begin(), more.memory_.end());
  }
  uint64_t bytes() const {
    uint64_t bytes = 0;
    for (const auto& one : memory_) bytes += one.size();
    return bytes;
  }
  // The bytes from `offset` on, at most `most`; fewer if another array begins before, none behind
  // the last.
  std::span<std::byte> piece(uint64_t offset, uint64_t most) const {
    for (const auto& one : memory_) {
      if (offset < one.size()) {
        return one.subspan(offset, std::min<uint64_t>(most, one.size() - offset));
      }
      offset -= one.size();
    }
    return {};
  }
  // The number of bytes in the piece from `offset` on, for both boxes; 0: there is none.
  uint64_t piece_bytes(uint64_t offset, uint64_t most) const {
    if (!in_one_) return piece(offset, most).size();
    return std::min(most, bytes() - std::min(bytes(), offset));
  }
  // Copies the bytes from `offset` on. REQUIRES: there are so many.
  void read(uint64_t offset, std::span<std::byte> into) const {
    visit(offset, into.size(), [&into](std::span<std::byte> part) {
      std::ranges::copy(part, into.begin());
      into = into.subspan(part.size());
    });
  }
  void write(uint64_t offset, std::span<const std::byte> from) const {
    visit(offset, from.size(), [&from](std::span<std::byte> part) {
      std::ranges::copy(from.first(part.size()), part.begin());
      from = from.subspan(part.size());
    });
  }

 private:
  template <typename Visit>
  void visit(uint64_t offset, uint64_t bytes, const Visit& visit) const {
    for (const auto& one : memory_) {
      if (bytes == 0) return;
      if (offset >= one.size()) {
        offset -= one.size();
        continue;
      }
      const auto part = one.subspan(offset, std::min<uint64_t>(bytes, one.size() - offset));
      visit(part);
      bytes -= part.size();
      offset = 0;
    }
  }

  std::vector<std::span<std::byte>> memory_;
  bool in_one_ = false;
};

}  // namespace phub
