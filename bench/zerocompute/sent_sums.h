// The sums of gradients that are not sent as plain elements: each rank sends them coded with the
// residuals that it keeps, as factors, or as rows. Coded ones are encoded and decoded by kernels/,
// whose own tests hold it to a scalar reference; outer products and rows are added up here, in
// integers that are exact in f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/zerocompute/model_chunks.h"
#include "kernels/kernels.h"
#include "transport/control/job_spec.h"
#include "transport/control/rank_tree.h"

namespace phub {

// Its memory is the caller's, as a Checker's is. Elements count through the whole model, key after
// key, without padding.
class SentSums {
 public:
  struct Options {
    uint32_t ranks = 1;
    kernels::DType format = kernels::DType::kF32;  // the format of keys that are sent neither way
    std::string groups;                            // the job's order of additions
    uint64_t pattern_first = 0;                    // in the pattern of gradients.h
    std::vector<KeySpec> keys;                     // as the job has them: with their tiles
    uint32_t chunk_elements = 8192;
  };
  // Whether the sums of gradients.h are not those that are sent.
  static bool needed(kernels::DType format, std::span<const KeySpec> keys);
  // Floats: the sums, and for a coded format the residuals of all ranks.
  static size_t floats(uint64_t elements, uint32_t ranks, kernels::DType format) {
    return elements * (kernels::is_plain(format) ? 1 : 1 + ranks);
  }

  // REQUIRES: `memory` is zeroed and has as many floats as floats() says.
  SentSums(const Options& options, float* memory);

  // Computes the sums of the chunks that begin in [first, first + n). REQUIRES: they are of the
  // round before.
  void advance(uint64_t round, uint64_t first, uint64_t n);
  const float* sums() const { return sums_; }

 private:
  void advance(uint64_t round, const ModelChunk& chunk);
  void add_products(uint64_t round, const ModelChunk& chunk);
  void add_rows(uint64_t round, const ModelChunk& chunk);
  void draw_rows(uint64_t round, uint32_t key);
  void add_coded(uint64_t round, const ModelChunk& chunk);
  void add_slots(uint32_t level, RankRange ranks, float* out, size_t n) const;

  uint32_t ranks_;
  kernels::DType format_;
  RankTree tree_;
  uint64_t pattern_first_;
  std::vector<KeySpec> keys_;
  ModelChunks chunks_;
  float* sums_;
  float* residuals_;  // rank after rank
  std::vector<float> gradient_;
  std::vector<std::byte> slots_;  // the slots of a chunk, one for each rank
  std::vector<const void*> slot_of_rank_;
  size_t slot_stride_ = 0;
  // The rows that each rank sends of a key in a round, which were drawn last.
  std::vector<std::vector<int64_t>> rows_;
  uint64_t rows_round_ = 0;  // 0: none were
  uint32_t rows_key_ = 0;
};

}  // namespace phub
