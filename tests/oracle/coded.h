// What is sent of a rank's gradients in coded formats, as the box decodes it, and what is left of
// them: the scalar reference of slots (tests/kernels/slots.h), chunk by chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tests/oracle/reference.h"
#include "transport/control/job_spec.h"

namespace phub {

struct ChunkPlace {
  uint32_t key = 0;
  uint64_t begin = 0;  // within the key, elements
  uint32_t elements = 0;
  uint64_t job_element = 0;         // its first one, where every key begins at a multiple of 32
  reference::Factors factors = {};  // that are sent of it, if they are
  reference::Rows rows = {};        // likewise
  // A slot that holds these has none of them.
  bool is_empty(const void* slot) const {
    return (factors.pairs > 0 && factors.count(slot) == 0) ||
           (rows.columns > 0 && rows.count(slot) == 0 && !rows.has_pairs(slot));
  }
  bool is_compact() const { return factors.pairs > 0 || rows.columns > 0; }
};
// Numbered as in the plan: key by key. REQUIRES: the spec says how many rows tiles have.
std::vector<ChunkPlace> chunks_of(const JobSpec& spec);
// What a rank sends of a chunk before it is coded.
uint64_t sent_bytes(const JobSpec& spec, const ChunkPlace& place);

// In some rounds, if its formats go by a schedule.
bool is_coded(const JobSpec& spec, uint32_t key);
// Slots are added as integers of a common scale, not as what each of them decodes to.
bool is_int32(const JobSpec& spec, uint32_t key);
// The format of a key's gradients in the memory of workers.
reference::DType memory_dtype(const JobSpec& spec, uint32_t key);

// The slot of a chunk that `rank` pushes, and what the box decodes of it. REQUIRES: the key is
// coded; the residual has as many elements as the gradient.
std::vector<std::byte> encode_coded(const JobSpec& spec, const ChunkPlace& chunk, uint32_t rank,
                                    uint64_t round, std::span<const float> gradient,
                                    std::span<float> residual);
std::vector<float> send_coded(const JobSpec& spec, const ChunkPlace& chunk, uint32_t rank,
                              uint64_t round, std::span<const float> gradient,
                              std::span<float> residual);

// What ranks have of a chunk's parameters after a round, if results come back as differences; else
// nothing happens.
void move_view(const JobSpec& spec, const ChunkPlace& chunk, uint64_t round,
               std::span<const float> parameters, std::span<float> view);
// The same of a whole key.
void move_view(const JobSpec& spec, uint32_t key, uint64_t round, std::span<const float> parameters,
               std::span<float> view);

// A rank and its residuals.
class CodedRank {
 public:
  // The spec outlives it.
  CodedRank(const JobSpec& spec, uint32_t rank) : spec_(spec), rank_(rank) {}

  // The whole key.
  std::vector<float> send(uint32_t key, uint64_t round, std::span<const float> gradient);

 private:
  const JobSpec& spec_;
  const uint32_t rank_;
  std::map<uint32_t, std::vector<float>> residuals_;  // by key
};

}  // namespace phub
