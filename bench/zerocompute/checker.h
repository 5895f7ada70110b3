// Computes the result of every round, and compares results with it bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "bench/zerocompute/model_chunks.h"
#include "bench/zerocompute/sent_sums.h"
#include "bench/zerocompute/view.h"
#include "kernels/kernels.h"

namespace phub {

// The job's computation on the gradients of gradients.h.
struct CheckerOptions {
  uint32_t ranks = 1;
  uint64_t elements = 0;
  kernels::Optimizer optimizer = kernels::Optimizer::kNone;
  kernels::Hyper hyper;
  kernels::DType result_dtype = kernels::DType::kF32;
  uint64_t pattern_first = 0;  // this job's first element in the pattern; each job has another
  bool computes = true;        // false: the job moves notifications only, its results stay zero
  // The gradients' format, of all keys that are sent as elements. If it is coded, or keys are sent
  // as factors or rows, the sums are those of the sent values.
  kernels::DType format = kernels::DType::kF32;
  std::string groups = {};  // the order of their additions
  // The format of differences, if results come back as these; result_dtype is f32 then.
  kernels::DType difference = kernels::DType::kF32;
  std::vector<KeySpec> keys;  // as the job has them: with their tiles
  uint32_t chunk_elements = 8192;
};

// The elements of a result that differ, and the first of them.
struct Mismatch {
  uint64_t count = 0;    // elements that differ
  uint64_t element = 0;  // the first of them
  float expected = 0;
  float found = 0;

  void add(const Mismatch& other) {
    if (count == 0) *this = {0, other.element, other.expected, other.found};
    count += other.count;
  }
};

// Follows the parameters of a job, starting from zeros. The memory of the reference is the
// caller's, so that several processes can share it; each element must be advanced by one of them
// per round. Copies of a Checker over the same memory are the same reference.
class Checker {
 public:
  // Bytes of reference memory: parameters and optimizer state in f32, nothing without optimizer;
  // for the sums of sent values the memory of SentSums; and if results come back as differences,
  // one for the ranks' view. (The tiles of keys do not matter.)
  static size_t reference_bytes(const CheckerOptions& options);

  // REQUIRES: `memory` is zeroed, aligned for floats, and as large as reference_bytes() says.
  Checker(const CheckerOptions& options, std::span<std::byte> memory);

  // Advances elements [first, first + n) of the reference to `round` and compares them with
  // `results`, which begins at element `first`. REQUIRES: they stand at round - 1, and
  // advance_chunks() was called for their chunks.
  Mismatch advance_and_check(uint64_t round, uint64_t first, size_t n, const void* results);

  // Advances the chunks that begin in [first, first + n), as far as these must be taken as a whole:
  // the sums of sent values, trust ratios, and differences. REQUIRES: whole keys, if
  // takes_whole_keys().
  void advance_chunks(uint64_t round, uint64_t first, uint64_t n);
  // The optimizer's steps go by norms of whole keys.
  bool takes_whole_keys() const { return trust_chunks_.has_value(); }

  // Compares again. REQUIRES: the elements stand at `round`.
  Mismatch check(uint64_t round, uint64_t first, size_t n, const void* results) const;

 private:
  void advance(uint64_t round, uint64_t first, size_t n);
  // Computes the trust ratios of the keys that begin in [first, first + n).
  void measure(uint64_t round, uint64_t first, uint64_t n);
  // The expected results of one block, in the result's format.
  void expect(uint64_t round, uint64_t first, size_t n, void* out) const;

  void sums_of(uint64_t round, uint64_t first, size_t n, float* out) const;

  CheckerOptions options_;
  std::optional<SentSums> sent_;
  std::optional<View> view_;
  std::optional<ModelChunks> trust_chunks_;
  std::map<uint64_t, float> trust_;  // by the first element of each key that was measured
  float* params_ = nullptr;
  float* state0_ = nullptr;
  float* state1_ = nullptr;
};

// Calls `visit(first, n)` for the first and last element of every chunk of every key; neighbouring
// ones of two chunks may come in one call. Elements count through the whole model.
template <typename Visit>
void for_each_chunk_edge(uint64_t key_first, uint64_t key_elements, uint32_t chunk_elements,
                         Visit visit) {
  for (uint64_t begin = 0; begin < key_elements; begin += chunk_elements) {
    const uint64_t end =
        begin + chunk_elements < key_elements ? begin + chunk_elements : key_elements;
    visit(key_first + begin, size_t{1});
    if (end - begin > 1) visit(key_first + end - 1, size_t{1});
  }
}

}  // namespace phub
