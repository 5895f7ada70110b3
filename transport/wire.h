// The 32 bits that travel with every chunk. See README.md for the byte formats.
#pragma once

#include <cstdint>

namespace phub {

// The kind of message that an immediate announces. Every kind but kData has no payload of gradients
// behind it.
enum class ImmKind : uint32_t {
  kData = 0,  // to the box: this rank's gradient; to the worker: the chunk's result
  kNull = 1,  // to the box: this rank's gradient is zero: it took part, nothing was written
  // To the box: initial parameters, part `round` of them. To the worker: that part was taken out of
  // the slot; or, after a push, the gradient of the round was, and its result is to come.
  kInitial = 2,
  kControl = 3,  // to the worker: part of a verdict (verdict.h); to the box: it lacks this result
};

inline constexpr uint32_t kMaxChunksPerQueue = 1u << 22;
inline constexpr uint32_t kMaxRanks = 1024;

// chunk within its queue (22 bits) | low bits of the round (8) | kind (2)
struct Imm {
  uint32_t chunk = 0;
  uint32_t round = 0;  // only the low 8 bits travel
  ImmKind kind = ImmKind::kData;

  friend bool operator==(const Imm&, const Imm&) = default;
};
// The part of a round that travels.
constexpr uint32_t low8(uint64_t round) { return static_cast<uint32_t>(round & 0xff); }

constexpr uint32_t encode(Imm imm) {
  return (imm.chunk << 10) | (low8(imm.round) << 2) | static_cast<uint32_t>(imm.kind);
}
constexpr Imm decode(uint32_t bits) {
  return {bits >> 10, (bits >> 2) & 0xffu, static_cast<ImmKind>(bits & 3u)};
}

}  // namespace phub
