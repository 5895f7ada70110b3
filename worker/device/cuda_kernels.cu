// The kernels of a parameter cache. Grids stride over elements, or over rows with as many
// neighbouring threads for each as it has values, up to a warp. A row moves in float4 where its
// table and size allow.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <vector>

#include "worker/device/cuda_kernels.h"
#include "worker/device/poison.h"

namespace phub {
namespace {

using kernels::DType;

constexpr unsigned kThreads = 256;
constexpr size_t kMaxBlocks = 4096;  // enough for every GPU; threads stride over the rest
constexpr size_t kPoisonThreads = 32 * kThreads;

// Answers with the error of this launch, not with one that the application has not asked for yet.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), size_t threads, cudaStream_t stream,
                   Arguments... arguments) {
  const size_t blocks = std::clamp((threads + kThreads - 1) / kThreads, size_t{1}, kMaxBlocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

__device__ size_t first() { return blockIdx.x * size_t{blockDim.x} + threadIdx.x; }
__device__ size_t stride() { return gridDim.x * size_t{blockDim.x}; }

__device__ void add_to(float& to, float from) { to = __fadd_rn(to, from); }
__device__ void add_to(float4& to, float4 from) {
  to = {__fadd_rn(to.x, from.x), __fadd_rn(to.y, from.y), __fadd_rn(to.z, from.z),
        __fadd_rn(to.w, from.w)};
}

// 2^lane_bits threads per row.
template <Kernel::Kind kKind, class Value>
__global__ void move_rows(const Value* from, Value* to, const uint32_t* index, size_t rows,
                          size_t row_values, unsigned lane_bits) {
  const size_t lane = first() & ((size_t{1} << lane_bits) - 1);
  for (size_t row = first() >> lane_bits; row < rows; row += stride() >> lane_bits) {
    const size_t in_batch = row * row_values;
    const size_t in_table = index[row] * row_values;
    for (size_t i = lane; i < row_values; i += size_t{1} << lane_bits) {
      if constexpr (kKind == Kernel::Kind::kGather) to[in_batch + i] = from[in_table + i];
      if constexpr (kKind == Kernel::Kind::kScatter) to[in_table + i] = from[in_batch + i];
      if constexpr (kKind == Kernel::Kind::kScatterAdd)
        add_to(to[in_table + i], from[in_batch + i]);
      if constexpr (kKind == Kernel::Kind::kGatherAdd) add_to(to[in_batch + i], from[in_table + i]);
    }
  }
}

template <Kernel::Kind kKind, class Value>
cudaError_t launch_rows_of(const Kernel& k, cudaStream_t stream) {
  const size_t row_values = k.row_floats * sizeof(float) / sizeof(Value);
  unsigned lane_bits = 0;
  while (lane_bits < 5 && (size_t{1} << lane_bits) < row_values) ++lane_bits;
  return launch(move_rows<kKind, Value>, k.count << lane_bits, stream,
                static_cast<const Value*>(k.from), static_cast<Value*>(k.to), k.index, k.count,
                row_values, lane_bits);
}

template <Kernel::Kind kKind>
cudaError_t launch_rows(const Kernel& k, cudaStream_t stream) {
  const auto addresses = reinterpret_cast<uintptr_t>(k.from) | reinterpret_cast<uintptr_t>(k.to);
  const bool in_fours = k.row_floats % 4 == 0 && addresses % sizeof(float4) == 0;
  return in_fours ? launch_rows_of<kKind, float4>(k, stream)
                  : launch_rows_of<kKind, float>(k, stream);
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
__global__ void convert(const From* from, float factor, To* to, size_t elements) {
  for (size_t i = first(); i < elements; i += stride()) {
    store(__fmul_rn(load(from + i), factor), to + i);  // exact if the factor is 1
  }
}

// `flag` is in host memory: few threads read it.
__global__ void poison_if(const volatile unsigned* flag, unsigned char* to, size_t bytes) {
  if (first() >= bytes || *flag == 0) return;
  for (size_t i = first(); i < bytes; i += stride()) to[i] = kPoison;
}

template <class From>
cudaError_t launch_convert(const Kernel& k, cudaStream_t stream) {
  const auto* from = static_cast<const From*>(k.from);
  switch (k.to_dtype) {
    case DType::kF32:
      return launch(convert<From, float>, k.count, stream, from, k.factor,
                    static_cast<float*>(k.to), k.count);
    case DType::kBF16:
      return launch(convert<From, __nv_bfloat16>, k.count, stream, from, k.factor,
                    static_cast<__nv_bfloat16*>(k.to), k.count);
    case DType::kF16:
      return launch(convert<From, __half>, k.count, stream, from, k.factor,
                    static_cast<__half*>(k.to), k.count);
    default:  // only plain formats are converted
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_convert(const Kernel& k, cudaStream_t stream) {
  switch (k.from_dtype) {
    case DType::kF32:
      return launch_convert<float>(k, stream);
    case DType::kBF16:
      return launch_convert<__nv_bfloat16>(k, stream);
    case DType::kF16:
      return launch_convert<__half>(k, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

__device__ uint64_t nanoseconds_now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void sleep_for(uint64_t nanoseconds) {
  if (first() > 0) return;
  const uint64_t end = nanoseconds_now() + nanoseconds;
  while (nanoseconds_now() < end) __nanosleep(1000);
}

}  // namespace

int launch_on_cuda(const Kernel& k, cudaStream_t stream) {
  auto* to = static_cast<float*>(k.to);
  switch (k.kind) {
    case Kernel::Kind::kGather:
      return launch_rows<Kernel::Kind::kGather>(k, stream);
    case Kernel::Kind::kScatter:
      return launch_rows<Kernel::Kind::kScatter>(k, stream);
    case Kernel::Kind::kScatterAdd:
      return launch_rows<Kernel::Kind::kScatterAdd>(k, stream);
    case Kernel::Kind::kGatherAdd:
      return launch_rows<Kernel::Kind::kGatherAdd>(k, stream);
    case Kernel::Kind::kAddScaled:
      return launch(add_scaled, k.count, stream, k.factor, static_cast<const float*>(k.from), to,
                    k.count);
    case Kernel::Kind::kFill:
      return launch(fill, k.count, stream, k.factor, to, k.count);
    case Kernel::Kind::kConvert:
      return launch_convert(k, stream);
    case Kernel::Kind::kEncode:
      return launch_encode(k, stream);
    case Kernel::Kind::kPoisonIf:
      return launch(poison_if, std::min(k.count, kPoisonThreads), stream,
                    static_cast<const unsigned*>(k.from), static_cast<unsigned char*>(k.to),
                    k.count);
    case Kernel::Kind::kCopy:
      break;
  }
  return cudaErrorInvalidValue;
}

int launch_sleep(uint64_t nanoseconds, cudaStream_t stream) {
  return launch(sleep_for, 1, stream, nanoseconds);
}

int load_on_cuda(cudaStream_t stream) {
  using Kind = Kernel::Kind;
  constexpr DType kFormats[] = {DType::kF32, DType::kBF16, DType::kF16};
  constexpr DType kScaled[] = {DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt32, DType::kInt8,
                               DType::kInt4};
  std::vector<Kernel> kernels = {
      {.kind = Kind::kAddScaled}, {.kind = Kind::kFill}, {.kind = Kind::kPoisonIf}};
  for (const Kind kind : {Kind::kGather, Kind::kScatter, Kind::kScatterAdd, Kind::kGatherAdd}) {
    for (const size_t row_floats : {1, 4}) {
      kernels.push_back({.kind = kind, .row_floats = row_floats});
    }
  }
  for (const DType from : kFormats) {
    for (const DType to : kFormats) {
      kernels.push_back({.kind = Kind::kConvert, .from_dtype = from, .to_dtype = to});
    }
    for (const DType to : kScaled) {
      kernels.push_back({.kind = Kind::kEncode, .from_dtype = from, .to_dtype = to});
    }
  }
  int result = launch_sleep(0, stream);
  for (const Kernel& kernel : kernels) {
    if (result == cudaSuccess) result = launch_on_cuda(kernel, stream);
  }
  return result;
}

}  // namespace phub
