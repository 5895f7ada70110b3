// A rank's part of a measurement: makes gradients, exchanges them with the server, and checks the
// results. run.h drives it, for processes of one machine or for a rank by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/zerocompute/checker.h"
#include "bench/zerocompute/model_chunks.h"
#include "phub/plan/models.h"
#include "worker/worker.h"

namespace phub {

// A measurement: a row of the table.
struct CaseSpec {
  KeyTable table;
  uint32_t workers = 1;
  kernels::DType dtype = kernels::DType::kF32;    // the format of the parameters that come back
  kernels::DType format = kernels::DType::kF32;   // the format of the gradients on the wire
  kernels::DType results = kernels::DType::kF32;  // on the wire: dtype, or differences
  CheckerOptions checker;
  std::string copy;      // as in ZerocomputeOptions
  WorkerOptions worker;  // server and job; the rank is set by each process
};

class Rank {
 public:
  // Joins the job. `reference` is the checker's memory, which ranks of one machine may share.
  Rank(const CaseSpec& spec, uint32_t rank, std::span<std::byte> reference);

  Worker& worker() { return worker_; }
  const std::vector<KeySpec>& keys() const { return keys_; }

  // Writes this round's gradients, all of them, so that no cache holds old ones.
  void fill(uint64_t round);
  // The measured part: pushes all keys and waits for all of them. Returns when all were pushed.
  int64_t exchange();
  // Advances part `part` of `parts` of the reference to `round` and compares it. REQUIRES: this
  // part is advanced by one rank per round.
  void check_part(uint64_t round, uint64_t part, uint64_t parts);
  // Compares the first and last element of every chunk. REQUIRES: every part stands at `round`.
  void check_edges(uint64_t round);

  uint64_t checked() const { return checked_; }  // elements, all rounds
  uint64_t wrong() const { return wrong_; }
  const std::string& wrong_text() const { return wrong_text_; }  // the first wrong element

 private:
  // This round's gradient of a key that is sent as factors or rows; else all are empty.
  struct Compact {
    std::vector<float> left, right;
    std::vector<int64_t> rows;
    std::vector<float> elements;  // the elements of these rows
  };
  void fill_compact(size_t key, uint64_t round);
  void push(size_t key);
  uint32_t chunk_elements() const { return spec_.worker.spec.chunk_elements; }
  kernels::DType gradient_dtype() const;  // in memory
  std::byte* gradient(size_t key);
  const std::byte* results(size_t key) const;
  void note(uint64_t round, size_t key, uint64_t compared, const Mismatch& mismatch);

  const CaseSpec& spec_;
  const uint32_t rank_;
  const size_t width_;
  std::vector<std::byte> own_gradients_, own_results_;  // empty: the library's
  Worker worker_;                                       // ends before them
  const std::vector<KeySpec> keys_;                     // as the job has them
  Checker checker_;
  const ModelChunks chunks_;
  std::vector<uint64_t> key_first_;  // elements, as the chunks count them
  std::vector<Compact> compact_;     // by key
  uint64_t checked_ = 0, wrong_ = 0;
  std::string wrong_text_;
};

}  // namespace phub
