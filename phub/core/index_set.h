// Sets of small numbers, as bits in words of 64.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace phub {

constexpr uint64_t bit_words(uint64_t end) { return (end + 63) / 64; }

// Calls visit(number) for each bit of a set's `word`, ascending.
template <typename Visit>
void for_each_bit(uint64_t bits, uint32_t word, const Visit& visit) {
  for (; bits != 0; bits &= bits - 1) {
    visit(word * 64 + static_cast<uint32_t>(__builtin_ctzll(bits)));
  }
}

// A set that yields its lowest. Nothing allocates after construction.
class IndexSet {
 public:
  explicit IndexSet(size_t end) : words_(bit_words(end)), summary_(bit_words(words_.size())) {}

  // The bytes that a set holds, itself included.
  static constexpr uint64_t bytes(uint64_t end) {
    const uint64_t words = bit_words(end);
    return sizeof(IndexSet) + (words + bit_words(words)) * sizeof(uint64_t);
  }

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  bool contains(uint32_t i) const { return ((words_[i / 64] >> (i % 64)) & 1) != 0; }
  void insert(uint32_t i) {
    const uint64_t bit = uint64_t{1} << (i % 64);
    size_ += (words_[i / 64] & bit) == 0;
    words_[i / 64] |= bit;
    summary_[i / 4096] |= uint64_t{1} << (i / 64 % 64);
  }
  void erase(uint32_t i) {
    const uint64_t bit = uint64_t{1} << (i % 64);
    size_ -= (words_[i / 64] & bit) != 0;
    words_[i / 64] &= ~bit;
    if (words_[i / 64] == 0) summary_[i / 4096] &= ~(uint64_t{1} << (i / 64 % 64));
  }
  // REQUIRES: !empty().
  uint32_t lowest() const {
    uint32_t s = 0;
    while (summary_[s] == 0) ++s;
    const uint32_t word = s * 64 + static_cast<uint32_t>(__builtin_ctzll(summary_[s]));
    return word * 64 + static_cast<uint32_t>(__builtin_ctzll(words_[word]));
  }
  void clear() {
    std::ranges::fill(words_, 0);
    std::ranges::fill(summary_, 0);
    size_ = 0;
  }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint64_t> summary_;  // a bit per word: whether it has any
  size_t size_ = 0;
};

}  // namespace phub
