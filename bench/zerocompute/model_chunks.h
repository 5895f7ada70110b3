// The chunks of a model, whose elements count through all keys, without padding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/layout.h"

namespace phub {

struct ModelChunk {
  uint64_t first;
  size_t elements;
  uint32_t key;
  uint64_t begin;  // within the key
};

class ModelChunks {
 public:
  // REQUIRES: the server has said which tiles the keys have.
  ModelChunks(std::span<const KeySpec> keys, uint32_t chunk_elements) {
    for (uint32_t k = 0; k < keys.size(); ++k) {
      const KeySpec& key = keys[k];
      const uint64_t most = chunk_elements_of(key, chunk_elements);
      for (uint64_t done = 0; done < key.elements; done += most) {
        const uint64_t count = std::min(most, key.elements - done);
        chunks_.push_back({elements_ + done, count, k, done});
        largest_ = std::max<size_t>(largest_, count);
      }
      elements_ += key.elements;
    }
  }

  size_t size() const { return chunks_.size(); }
  const ModelChunk& operator[](size_t chunk) const { return chunks_[chunk]; }
  uint64_t elements() const { return elements_; }
  size_t largest() const { return largest_; }

  // Visits the chunks that begin in [first, first + n).
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
