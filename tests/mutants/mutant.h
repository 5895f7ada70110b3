// The switches of the mutants that tests/mutants/run compiles in together: PHUB_MUTANT is the
// number of the one that is on, PHUB_MUTANTS_REACHED a file with a byte for each mutant, which is 1
// once its place ran.
#pragma once
#ifdef __cplusplus
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <type_traits>

namespace phub_mutant {

inline constexpr int kNumbers = 1 << 22;  // so long is the file

inline int selected() {
  const char* number = std::getenv("PHUB_MUTANT");
  return number == nullptr ? -1 : std::atoi(number);
}

inline char* map_reached() {
  const char* path = std::getenv("PHUB_MUTANTS_REACHED");
  const int fd = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* bytes = mmap(nullptr, kNumbers, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return bytes == MAP_FAILED ? nullptr : static_cast<char*>(bytes);
}

// Each shared library has its own; all processes of a test share the file.
inline const int kSelected = selected();
inline char* const kReached = map_reached();

}  // namespace phub_mutant

// What the compiler computes is computed without mutants.
constexpr bool phub_mutant_on(int number) {
  if (std::is_constant_evaluated()) return false;
  if (phub_mutant::kReached != nullptr) phub_mutant::kReached[number] = 1;
  return number == phub_mutant::kSelected;
}
#else  // the program of a network card
#define phub_mutant_on(number) 0
#endif
