// The kernels of a parameter cache. Grids stride over rows or elements; a row is copied in float4
// where its table and size allow it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "worker/device/cuda_kernels.h"

namespace phub {
namespace {

using kernels::DType;

constexpr unsigned kThreads = 256;
constexpr size_t kMaxBlocks = 4096;  // enough for every GPU; threads stride over the rest

unsigned blocks(size_t threads) {
  const size_t wanted = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
}

__device__ size_t first() { return blockIdx.x * size_t{blockDim.x} + threadIdx.x; }
__device__ size_t stride() { return gridDim.x * size_t{blockDim.x}; }

__device__ void add_to(float& to, float from) { to = __fadd_rn(to, from); }
__device__ void add_to(float4& to, float4 from) {
  to = {__fadd_rn(to.x, from.x), __fadd_rn(to.y, from.y), __fadd_rn(to.z, from.z),
        __fadd_rn(to.w, from.w)};
}

// One thread per value of a batch: neighbours in a row are neighbours in a warp.
template <Kernel::Kind kKind, class Value>
__global__ void move_rows(const Value* from, Value* to, const uint32_t* index, size_t rows,
                          size_t row_values) {
  const size_t values = rows * row_values;
  for (size_t i = first(); i < values; i += stride()) {
    const size_t row = i / row_values;
    const size_t in_table = index[row] * row_values + (i - row * row_values);
    if constexpr (kKind == Kernel::Kind::kGather) to[i] = from[in_table];
    if constexpr (kKind == Kernel::Kind::kScatter) to[in_table] = from[i];
    if constexpr (kKind == Kernel::Kind::kScatterAdd) add_to(to[in_table], from[i]);
  }
}

template <Kernel::Kind kKind>
void launch_rows(const Kernel& k, cudaStream_t stream) {
  const auto addresses = reinterpret_cast<uintptr_t>(k.from) | reinterpret_cast<uintptr_t>(k.to);
  if (k.row_floats % 4 == 0 && addresses % sizeof(float4) == 0) {
    const size_t values = k.row_floats / 4;
    move_rows<kKind><<<blocks(k.count * values), kThreads, 0, stream>>>(
        static_cast<const float4*>(k.from), static_cast<float4*>(k.to), k.index, k.count, values);
  } else {
    move_rows<kKind><<<blocks(k.count * k.row_floats), kThreads, 0, stream>>>(
        static_cast<const float*>(k.from), static_cast<float*>(k.to), k.index, k.count,
        k.row_floats);
  }
}

__global__ void add_scaled(float factor, const float* from, float* to, size_t elements) {
  for (size_t i = first(); i < elements; i += stride()) {
    to[i] = __fadd_rn(to[i], __fmul_rn(factor, from[i]));
  }
}

__global__ void fill(float value, float* to, size_t elements) {
  for (size_t i = first(); i < elements; i += stride()) to[i] = value;
}

__device__ float load(const float* from) { return *from; }
__device__ float load(const __nv_bfloat16* from) { return __bfloat162float(*from); }
__device__ float load(const __half* from) { return __half2float(*from); }

// Every NaN is the same one, as on the host: positive, quiet, no payload.
__device__ void store(float value, float* to) {
  *to = isnan(value) ? __uint_as_float(0x7FC00000u) : value;
}
__device__ void store(float value, __nv_bfloat16* to) {
  *to = isnan(value) ? __ushort_as_bfloat16(0x7FC0) : __float2bfloat16_rn(value);
}
__device__ void store(float value, __half* to) {
  *to = isnan(value) ? __ushort_as_half(0x7E00) : __float2half_rn(value);
}

template <class From, class To>
__global__ void convert(const From* from, To* to, size_t elements) {
  for (size_t i = first(); i < elements; i += stride()) store(load(from + i), to + i);
}

template <class From>
void launch_convert(const Kernel& k, cudaStream_t stream) {
  const auto* from = static_cast<const From*>(k.from);
  const unsigned grid = blocks(k.count);
  switch (k.to_dtype) {
    case DType::kF32:
      convert<<<grid, kThreads, 0, stream>>>(from, static_cast<float*>(k.to), k.count);
      return;
    case DType::kBF16:
      convert<<<grid, kThreads, 0, stream>>>(from, static_cast<__nv_bfloat16*>(k.to), k.count);
      return;
    case DType::kF16:
      convert<<<grid, kThreads, 0, stream>>>(from, static_cast<__half*>(k.to), k.count);
      return;
  }
}

__device__ uint64_t nanoseconds_now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void sleep_for(uint64_t nanoseconds) {
  const uint64_t end = nanoseconds_now() + nanoseconds;
  while (nanoseconds_now() < end) __nanosleep(1000);
}

}  // namespace

int launch_on_cuda(const Kernel& k, cudaStream_t stream) {
  switch (k.kind) {
    case Kernel::Kind::kGather:
      launch_rows<Kernel::Kind::kGather>(k, stream);
      break;
    case Kernel::Kind::kScatter:
      launch_rows<Kernel::Kind::kScatter>(k, stream);
      break;
    case Kernel::Kind::kScatterAdd:
      launch_rows<Kernel::Kind::kScatterAdd>(k, stream);
      break;
    case Kernel::Kind::kAddScaled:
      add_scaled<<<blocks(k.count), kThreads, 0, stream>>>(
          k.factor, static_cast<const float*>(k.from), static_cast<float*>(k.to), k.count);
      break;
    case Kernel::Kind::kFill:
      fill<<<blocks(k.count), kThreads, 0, stream>>>(k.factor, static_cast<float*>(k.to), k.count);
      break;
    case Kernel::Kind::kConvert:
      if (k.from_dtype == DType::kF32) launch_convert<float>(k, stream);
      if (k.from_dtype == DType::kBF16) launch_convert<__nv_bfloat16>(k, stream);
      if (k.from_dtype == DType::kF16) launch_convert<__half>(k, stream);
      break;
    case Kernel::Kind::kCopy:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

int launch_sleep(uint64_t nanoseconds, cudaStream_t stream) {
  sleep_for<<<1, 1, 0, stream>>>(nanoseconds);
  return cudaGetLastError();
}

}  // namespace phub
