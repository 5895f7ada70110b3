// The scaled formats (kernels/encode.h) on CUDA: the arithmetic of kernels/encode.cc,
// rounding-inl.h and formats/, operation by operation, each rounded once. A block encodes a chunk,
// which it reads twice; grids stride over chunks. Sparse ones are left to the host.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "worker/device/cuda_kernels.h"

namespace phub {
namespace {

using kernels::DType;

constexpr unsigned kThreads = 256;
constexpr size_t kMaxBlocks = 4096;
constexpr int kInfinityBits = 0x7F800000;
constexpr int kFractionBits = 23;

__device__ float load(const float* from) { return *from; }
__device__ float load(const __nv_bfloat16* from) { return __bfloat162float(*from); }
__device__ float load(const __half* from) { return __half2float(*from); }

// The two ways to round, and the random numbers of one.
struct Rounder {
  bool stochastic;
  uint32_t element, low, high;

  __device__ static uint32_t mix(uint32_t h) {
    h = (h ^ h >> 16) * 0x7FEB352Du;
    h = (h ^ h >> 15) * 0x846CA68Bu;
    return h ^ h >> 16;
  }
  __device__ uint32_t random(size_t i) const {
    return mix(mix((element + static_cast<uint32_t>(i)) ^ low) ^ high);
  }
  // A whole number; |v| < 2^22.
  __device__ float stochastically(float v, size_t i) const {
    const float below = floorf(v);
    const float u = __fmul_rn(static_cast<float>(random(i) >> 8), 0x1p-24f);
    return __fadd_rn(below, u < __fsub_rn(v, below) ? 1.0f : 0.0f);
  }
  __device__ float whole(float v, size_t i) const {
    constexpr float kWholes = 0x1.8p23f;
    if (stochastic) return stochastically(v, i);
    return __fsub_rn(__fadd_rn(v, kWholes), kWholes);
  }
};

Rounder rounder_of(const kernels::Rounding& rounding) {
  constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
  const auto mix64 = [](uint64_t h) {
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9;
    h = (h ^ h >> 27) * 0x94D049BB133111EB;
    return h ^ h >> 31;
  };
  uint64_t key = mix64(rounding.job + kStep);
  key = mix64(key + rounding.rank + kStep);
  key = mix64(key + rounding.round + kStep);
  return {rounding.stochastic, static_cast<uint32_t>(rounding.element), static_cast<uint32_t>(key),
          static_cast<uint32_t>(key >> 32)};
}

struct Quantized {
  int code;
  float value;  // before it is scaled
};

__device__ float smallest_power(float largest, float most) {
  constexpr uint32_t kFraction = 0x7FFFFF;
  const uint32_t bits = __float_as_uint(most);
  const uint32_t power = (__float_as_uint(largest) + kFraction - (bits & kFraction)) & ~kFraction;
  const uint32_t down = (bits & ~kFraction) - (127u << kFractionBits);
  return power <= down ? 0 : __uint_as_float(power - down);
}

// A format has kLargest, kMostExponent, scale() and quantize() as on the host; kBits of a code.
template <int kMost, int kMostExponentOf, int kBitsOf>
struct WholeMultiples {
  static constexpr float kLargest = kMost;
  static constexpr int kMostExponent = kMostExponentOf;
  static constexpr int kBits = kBitsOf;
  __device__ static float scale(float largest) { return __fdiv_rn(largest, kLargest); }
  __device__ static Quantized quantize(float v, const Rounder& rounder, size_t i) {
    const float value = rounder.whole(v, i);
    return {__float2int_rn(value), value};
  }
};
using Int8 = WholeMultiples<127, 121, 8>;
using Int4 = WholeMultiples<7, 125, 4>;
struct Int32 : WholeMultiples<4'194'303, 106, 32> {
  __device__ static float scale(float largest) { return smallest_power(largest, kLargest); }
};

template <int kFraction, int kLowest, int kHighest>
struct Fp8 {
  static constexpr float kLargest = 1.75f * (1 << kHighest);
  static constexpr int kMostExponent = 127 - kHighest;
  static constexpr int kBits = 8;
  __device__ static float scale(float largest) { return smallest_power(largest, kLargest); }
  __device__ static Quantized quantize(float v, const Rounder& rounder, size_t i) {
    constexpr int kLowestBits = (127 + kLowest) << kFractionBits;
    const int bits = __float_as_int(v);
    const int sign = bits & INT32_MIN;
    const int exponent = max(bits & kInfinityBits, kLowestBits);
    int units;
    float value;
    if (rounder.stochastic) {
      const int per_unit = ((254 + kFraction) << kFractionBits) - exponent;
      const int unit = (exponent - (kFraction << kFractionBits)) | sign;
      const float whole = rounder.stochastically(__fmul_rn(fabsf(v), __int_as_float(per_unit)), i);
      units = __float2int_rn(whole);
      value = __fmul_rn(whole, __int_as_float(unit));
    } else {
      const int wholes = (exponent + ((kFractionBits - kFraction) << kFractionBits)) | sign;
      const float sum = __fadd_rn(v, __int_as_float(wholes));
      units = __float_as_int(sum) - wholes;
      value = __fsub_rn(sum, __int_as_float(wholes));
    }
    const int code = ((exponent - kLowestBits) >> (kFractionBits - kFraction)) + units;
    const int sign_bit = static_cast<int>(static_cast<uint32_t>(sign) >> 24);
    return {code | sign_bit, __int_as_float(__float_as_int(value) | sign)};
  }
};
using Fp8E4M3 = Fp8<3, -6, 8>;
using Fp8E5M2 = Fp8<2, -14, 15>;

// The scale of a chunk whose largest magnitude is given.
template <class Format>
__device__ float scale_of(float largest) {
  const float most = __int_as_float((Format::kMostExponent + 127) << kFractionBits);
  constexpr float kSmallestNormal = 0x1p-126f;
  if (largest == 0) return 0;
  return fminf(fmaxf(Format::scale(largest), kSmallestNormal), most);
}

// A chunk: its elements, its residual (null: none) and its slot.
template <class From, class Format>
struct Chunk {
  const From* from;
  float factor;
  float* residual;
  unsigned char* slot;
  size_t elements;
  Rounder rounder;

  __device__ float x(size_t i) const {
    const float gradient = __fmul_rn(load(from + i), factor);  // exact if the factor is 1
    return residual == nullptr ? gradient : __fadd_rn(gradient, residual[i]);
  }
  __device__ int code(size_t i, float scale, float inverse) const {
    const float in = x(i);
    const float y = fminf(fmaxf(__fmul_rn(in, inverse), -Format::kLargest), Format::kLargest);
    const Quantized q = Format::quantize(y, rounder, i);
    if (residual != nullptr) residual[i] = __fsub_rn(in, __fmul_rn(q.value, scale));
    return q.code;
  }
  // A word of codes: those of several elements, zeros behind the last.
  __device__ uint32_t word(size_t w, float scale, float inverse) const {
    constexpr int kCodes = 32 / Format::kBits;
    constexpr uint32_t kMask = ~0u >> (32 - Format::kBits);
    uint32_t word = 0;
    for (int c = 0; c < kCodes; ++c) {
      const size_t i = w * kCodes + c;
      if (i >= elements) break;
      const auto code_of = static_cast<uint32_t>(code(i, scale, inverse));
      word |= (code_of & kMask) << (c * Format::kBits);
    }
    return word;
  }
};

// All threads of the block call it.
template <class From, class Format>
__device__ void encode_chunk(const Chunk<From, Format>& chunk, int& largest) {
  __syncthreads();  // the chunk before is done
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  int mine = 0;
  for (size_t i = threadIdx.x; i < chunk.elements; i += blockDim.x) {
    mine = max(mine, __float_as_int(chunk.x(i)) & 0x7FFFFFFF);
  }
  atomicMax(&largest, mine);
  __syncthreads();
  const bool finite = largest < kInfinityBits;
  const float scale = finite ? scale_of<Format>(__int_as_float(largest)) : 0;
  const float inverse = scale == 0 ? 0 : __fdiv_rn(1, scale);
  auto* const words = reinterpret_cast<uint32_t*>(chunk.slot);
  const size_t count = (chunk.elements * Format::kBits + 31) / 32;
  for (size_t w = threadIdx.x; w < count; w += blockDim.x) {
    words[w] = finite ? chunk.word(w, scale, inverse) : 0;
  }
  if (threadIdx.x == 0) words[count] = finite ? __float_as_uint(scale) : 0x7FC00000u;
}

template <class From, class Format>
__global__ void encode(const From* from, float factor, float* residual, unsigned char* slots,
                       size_t elements, size_t chunk_elements, size_t chunk_bytes,
                       Rounder rounder) {
  __shared__ int largest;
  for (size_t c = blockIdx.x; c * chunk_elements < elements; c += gridDim.x) {
    const size_t begin = c * chunk_elements;
    Rounder of_chunk = rounder;
    of_chunk.element += static_cast<uint32_t>(begin);
    encode_chunk<From, Format>(
        {from + begin, factor, residual == nullptr ? nullptr : residual + begin,
         slots + c * chunk_bytes, min(chunk_elements, elements - begin), of_chunk},
        largest);
  }
}

template <class From, class Format>
cudaError_t launch_from(const Kernel& k, cudaStream_t stream) {
  const size_t chunks = k.count == 0 ? 1 : (k.count + k.chunk_elements - 1) / k.chunk_elements;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(chunks, kMaxBlocks)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, encode<From, Format>, static_cast<const From*>(k.from),
                            k.factor, k.residual, static_cast<unsigned char*>(k.to), k.count,
                            k.chunk_elements, k.chunk_bytes, rounder_of(k.rounding));
}

template <class Format>
cudaError_t launch_format(const Kernel& k, cudaStream_t stream) {
  switch (k.from_dtype) {
    case DType::kF32:
      return launch_from<float, Format>(k, stream);
    case DType::kBF16:
      return launch_from<__nv_bfloat16, Format>(k, stream);
    case DType::kF16:
      return launch_from<__half, Format>(k, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

int launch_encode(const Kernel& k, cudaStream_t stream) {
  switch (k.to_dtype) {
    case DType::kFp8E4M3:
      return launch_format<Fp8E4M3>(k, stream);
    case DType::kFp8E5M2:
      return launch_format<Fp8E5M2>(k, stream);
    case DType::kInt32:
      return launch_format<Int32>(k, stream);
    case DType::kInt8:
      return launch_format<Int8>(k, stream);
    case DType::kInt4:
      return launch_format<Int4>(k, stream);
    default:  // plain formats are converted, and sparse ones are not encoded here
      return cudaErrorInvalidValue;
  }
}

}  // namespace phub
