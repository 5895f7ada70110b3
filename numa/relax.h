// A pause for a thread that spins.
#pragma once

namespace phub::numa {

// Lets the other thread of the same CPU run and the memory that is looked at change: tens of
// nanoseconds. On a processor without such an instruction it does nothing.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` takes no time on most of them
#endif
}

}  // namespace phub::numa
