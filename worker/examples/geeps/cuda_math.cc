#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <memory>

#include "transport/error.h"
#include "worker/device/cuda_stream.h"
#include "worker/examples/geeps/cuda_operations.h"
#include "worker/examples/geeps/device_math.h"

namespace phub::examples {
namespace {

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  fail(ErrorCode::kInternal, "{}: {}", call, cudaGetErrorString(result));
}

void check(cublasStatus_t result, const char* call) {
  if (result == CUBLAS_STATUS_SUCCESS) return;
  fail(ErrorCode::kInternal, "{}: {}", call, cublasGetStatusString(result));
}

class CudaMath : public Math {
 public:
  CudaMath(CudaStream& stream, int ordinal) : ordinal_(ordinal), stream_(stream.handle()) {
    enter();
    cublasHandle_t handle = nullptr;
    check(cublasCreate(&handle), "cublasCreate");
    cublas_.reset(handle);
    check(cublasSetStream(handle, stream_), "cublasSetStream");
  }

  // cuBLAS has columns where we have rows: cᵀ = bᵀ · aᵀ.
  void multiply(const Product& p, const float* a, const float* b, float* c) override {
    enter();
    const float one = 1, before = p.add ? 1 : 0;
    const auto rows = static_cast<int>(p.rows), columns = static_cast<int>(p.columns),
               depth = static_cast<int>(p.depth);
    check(cublasSgemm(cublas_.get(), p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                      p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, columns, rows, depth, &one, b,
                      p.transpose_b ? depth : columns, a, p.transpose_a ? rows : depth, &before, c,
                      columns),
          "cublasSgemm");
  }

  void run(size_t rows, size_t columns, const Operation& operation) override {
    enter();
    check(static_cast<cudaError_t>(launch_on_cuda(rows, columns, operation, stream_)), "a kernel");
  }

  void upload(const float* from, float* to, size_t count) override {
    enter();
    check(cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
  }
  void download(const float* from, float* to, size_t count) override {
    enter();
    check(cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  struct Destroy {
    void operator()(cublasHandle_t handle) const { cublasDestroy(handle); }
  };

  // The thread's calls go to this device.
  void enter() const { check(cudaSetDevice(ordinal_), "cudaSetDevice"); }

  const int ordinal_;
  const cudaStream_t stream_;
  std::unique_ptr<cublasContext, Destroy> cublas_;
};

}  // namespace

std::unique_ptr<Math> make_cuda_math(Stream& stream, int ordinal) {
  return std::make_unique<CudaMath>(dynamic_cast<CudaStream&>(stream), ordinal);
}

}  // namespace phub::examples
