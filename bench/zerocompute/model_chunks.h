// The chunks of a model, whose elements count through all keys, without padding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/job_spec.h"

namespace phub {

struct ModelChunk {
  uint64_t first;
  size_t elements;
};

class ModelChunks {
 public:
  ModelChunks(std::span<const KeySpec> keys, uint32_t chunk_elements) {
    for (const KeySpec& key : keys) {
      for (uint64_t done = 0; done < key.elements; done += chunk_elements) {
        const uint64_t count = std::min<uint64_t>(chunk_elements, key.elements - done);
        chunks_.push_back({elements_ + done, count});
        largest_ = std::max<size_t>(largest_, count);
      }
      elements_ += key.elements;
    }
  }

  size_t size() const { return chunks_.size(); }
  const ModelChunk& operator[](size_t chunk) const { return chunks_[chunk]; }
  uint64_t elements() const { return elements_; }
  size_t largest() const { return largest_; }

  // Those that begin in [first, first + n).
  template <typename Visit>
  void visit(uint64_t first, uint64_t n, Visit visit) const {
    auto at = std::ranges::lower_bound(chunks_, first, {}, &ModelChunk::first);
    for (; at != chunks_.end() && at->first < first + n; ++at) visit(*at);
  }

 private:
  std::vector<ModelChunk> chunks_;
  uint64_t elements_ = 0;
  size_t largest_ = 0;
};

}  // namespace phub
