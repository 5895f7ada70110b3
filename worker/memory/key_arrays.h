// f32 memory for keys: zero, each key beginning on a page. No page is touched yet, so that pages
// come from the NUMA node of the thread that writes them first.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace phub {

class KeyArrays {
 public:
  KeyArrays() = default;
  explicit KeyArrays(std::span<const size_t> elements);  // by key; throws Error(kFull)

  size_t keys() const { return keys_.size(); }
  std::span<float> operator[](size_t key) const { return keys_[key]; }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Unmap> data_;
  std::vector<std::span<float>> keys_;
};

}  // namespace phub
