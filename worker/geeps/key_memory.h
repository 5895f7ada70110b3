// f32 memory for keys: zero, each key at a page of its own, and no page touched yet, so that pages
// come from the NUMA node of the thread that writes there first.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace phub::geeps {

class KeyMemory {
 public:
  KeyMemory() = default;
  explicit KeyMemory(std::span<const size_t> elements);  // by key; throws Error(kFull)
  KeyMemory(KeyMemory&& other) noexcept;
  KeyMemory& operator=(KeyMemory&& other) noexcept;
  ~KeyMemory();

  size_t keys() const { return keys_.size(); }
  std::span<float> operator[](size_t key) const { return keys_[key]; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  std::vector<std::span<float>> keys_;
};

}  // namespace phub::geeps
