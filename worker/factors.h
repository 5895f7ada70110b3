// Matrices whose gradients are sent as sufficient factors: for a fully connected layer, each
// sample's input and the error of its output, whose outer product is the sample's gradient. With K
// samples of a rank, that is K · (rows + columns) elements in place of rows · columns (Xing et al.,
// Distributed Machine Learning via Sufficient Factor Broadcasting, 2015; Zhang et al., Poseidon,
// 2015, section 4.3.1).
//
// Every rank has a key of the job for each matrix, in which only it sends; the server passes it on
// to all ranks, which add up the outer products themselves, in the order of the ranks and of their
// samples. (If the server makes the steps, Worker::push_factors() sends it factors, and it
// multiplies.) All have the same bits, those of kernels/products.h. A rank sends K · (rows +
// columns) elements, and receives as many of each rank. A rank that is lost, or has left, has no
// samples in the rounds that it did not push to.
//
//   std::vector<phub::FactorMatrix> matrices = {{"fc6", 4096, 9216, 32}};
//   phub::add_factor_keys(options.spec, matrices);   // a job without an optimizer, of sums
//   phub::Worker worker(options);
//   phub::Factors factors(worker, matrices);
//   ... errors of the output into factors.left(0), inputs into factors.right(0), 32 of each ...
//   factors.push(0, 32);
//   uint64_t samples = factors.wait(0, gradient);    // adds those of all ranks
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "worker/worker.h"

namespace phub {

struct FactorMatrix {
  std::string name;
  uint64_t rows = 0, columns = 0;
  uint32_t samples = 0;  // the most samples of a rank in a round: its key has room for so many
};

// Adds the keys to those of the job, "NAME/factors/RANK" for max_ranks ranks. Throws
// Error(kInvalid): the job's optimizer is not none, its reduction not sum, its rounds not in
// lock-step, its results not f32, it has a grad_scale, or excludes values that are not finite; a
// matrix has no rows, columns or samples. REQUIRES: the spec's ranks are set; set_hyper() does not
// set a grad_scale.
void add_factor_keys(JobSpec& spec, std::span<const FactorMatrix> matrices);

// Calls for one matrix must be in the order push, wait; those for different ones may be on
// different threads.
class Factors {
 public:
  // Throws Error(kNotFound): the job does not have their keys; Error(kMismatch): of another size.
  // REQUIRES: the worker outlives this.
  Factors(Worker& worker, std::span<const FactorMatrix> matrices);

  // This rank's factors, sample after sample: of `rows` elements each, and of `columns`. Memory of
  // the worker, lent from push() to wait().
  std::span<float> left(size_t matrix);
  std::span<float> right(size_t matrix);

  // Sends the first `samples` of both. Throws Error(kInvalid): there is no room for so many.
  void push(size_t matrix, uint32_t samples, int32_t priority = 0);
  // Waits for the factors of all ranks, and adds their outer products to `gradient`, which has rows
  // · columns elements, row after row; where no rank has samples it is not used. Returns how many
  // samples these were of. Throws Error.
  uint64_t wait(size_t matrix, float* gradient);

 private:
  struct Matrix {
    FactorMatrix of;
    std::vector<size_t> keys;  // by rank
  };
  std::span<float> own(const Matrix& matrix);

  Worker& worker_;
  std::vector<Matrix> matrices_;
};

}  // namespace phub
