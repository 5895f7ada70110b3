// The arithmetic of layers on a device: matrix products, operations (operations.h), and copies from
// and to the application. Calls are enqueued in order; only download() waits.
#pragma once

#include <cstddef>
#include <memory>

#include "worker/examples/geeps/operations.h"

namespace phub {
class Stream;
}

namespace phub::examples {

// c (rows × columns) = a (rows × depth) · b (depth × columns), row-major. A transposed factor lies
// in memory as its transpose.
struct Product {
  size_t rows, columns, depth;
  bool transpose_a = false, transpose_b = false;
  bool add = false;  // adds to the content of c
};

class Math {
 public:
  virtual ~Math() = default;

  virtual void multiply(const Product& product, const float* a, const float* b, float* c) = 0;
  // Runs the operation for every row and column.
  virtual void run(size_t rows, size_t columns, const Operation& operation) = 0;
  // They copy between any memory of the application and that of the device.
  virtual void upload(const float* from, float* to, size_t count) = 0;
  virtual void download(const float* from, float* to, size_t count) = 0;
};

// In the calling thread, in plain loops: the same bits every time.
std::unique_ptr<Math> make_host_math();
// On a stream of the CUDA device of this number, with cuBLAS. Throws Error(kUnavailable) in a build
// without CUDA.
std::unique_ptr<Math> make_cuda_math(Stream& stream, int ordinal);

}  // namespace phub::examples
