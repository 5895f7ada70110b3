// Device memory for accesses outside the sequence, and the buffers there that are in use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>

#include "worker/device/arena.h"

namespace phub::geeps {

// The place of a buffer does not depend on what is still being released. Guarded by the cache's
// lock.
class ReservedMemory {
 public:
  void begin(size_t bytes) { arena_.emplace(bytes); }
  Arena& arena() { return *arena_; }  // REQUIRES: begin() was called

  void begin_release(size_t offset) { releasing_[offset] = arena_->release(offset).value(); }
  void end_release(size_t offset) { releasing_.erase(offset); }
  bool is_free(size_t offset, size_t bytes) const {  // nothing there is being released
    return std::ranges::none_of(releasing_, [&](const auto& each) {
      return each.first < offset + bytes && offset < each.first + each.second;
    });
  }

 private:
  std::optional<Arena> arena_;
  std::map<size_t, size_t> releasing_;  // offset -> bytes
};

}  // namespace phub::geeps
