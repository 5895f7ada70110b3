#include "worker/examples/geeps/cuda_operations.h"

namespace phub::examples {
namespace {

constexpr size_t kThreads = 256;
constexpr size_t kMaxBlocks = 4096;  // threads stride over the rest

template <typename Apply>
__global__ void for_each(Apply apply, size_t count, size_t columns) {
  const size_t stride = gridDim.x * size_t{blockDim.x};
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    apply(i / columns, i % columns);
  }
}

}  // namespace

int launch_on_cuda(size_t rows, size_t columns, const Operation& operation, CUstream_st* stream) {
  const size_t count = rows * columns;
  if (count == 0) return static_cast<int>(cudaSuccess);
  const size_t blocks = (count + kThreads - 1) / kThreads;
  return std::visit(
      [&](const auto& apply) {
        for_each<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0,
                   stream>>>(apply, count, columns);
        return static_cast<int>(cudaGetLastError());
      },
      operation);
}

}  // namespace phub::examples
