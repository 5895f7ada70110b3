// Marks memory that must not be read, with a pattern and, under AddressSanitizer, as inaccessible.
#pragma once

#include <cstddef>
#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace phub {

inline constexpr int kPoison = 0xFF;  // NaN in f32, bf16 and f16
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kCanForbid = true;
#else
inline constexpr bool kCanForbid = false;
#endif

inline void poison(void* memory, size_t bytes) { std::memset(memory, kPoison, bytes); }

// With AddressSanitizer, any later access stops the program. Up to 7 bytes at an unaligned
// beginning stay accessible.
inline void forbid([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(memory, bytes);
#endif
}

inline void permit([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(memory, bytes);
#endif
}

}  // namespace phub
