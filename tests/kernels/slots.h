// What slots of coded formats must hold, one element at a time, from the definitions in encode.h:
// the counterpart of tests/oracle/reference.h. It takes types and sizes from kernels/ and shares no
// code with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/encode.h"
#include "kernels/kernels.h"

namespace phub::reference {

inline constexpr kernels::DType kCoded[] = {
    kernels::DType::kFp8E4M3,      kernels::DType::kFp8E5M2,     kernels::DType::kInt32,
    kernels::DType::kInt8,         kernels::DType::kInt4,        kernels::DType::kTopK,
    kernels::DType::kTopK10,       kernels::DType::kTopK100,     kernels::DType::kTopK1000,
    kernels::DType::kTopKInt4,     kernels::DType::kTopK10Int4,  kernels::DType::kTopK100Int4,
    kernels::DType::kTopK1000Int4, kernels::DType::kTopKInt2,    kernels::DType::kTopK10Int2,
    kernels::DType::kTopK100Int2,  kernels::DType::kTopK1000Int2};

// The value of one code, before it is scaled. int4: the lower four bits of `code`. int32: NaN for
// one that is out of bounds.
float value_of_code(kernels::DType type, uint32_t code);

// Of a chunk whose largest magnitude is given. Scaled formats only.
float scale_of(kernels::DType type, float largest);

// The code of x / scale, and the random 24 bits that decide, if it is stochastic (else nullptr).
uint32_t code_of(kernels::DType type, float x, float scale, const uint32_t* upper24);

// The 32 random bits of the element that is `i` behind the chunk's first.
uint32_t random_of(const kernels::Rounding& rounding, size_t i);

// As kernels::encode does; the residual may be empty.
bool encode(std::span<const float> gradient, std::span<float> residual, kernels::DType type,
            const kernels::Rounding& rounding, void* slot);

std::vector<float> decode(const void* slot, kernels::DType type, size_t elements);

// As kernels::sum does.
bool sum_coded(std::span<const void* const> slots, kernels::DType type, float factor, float* out,
               size_t elements);
bool is_finite(const void* slot, kernels::DType type, size_t elements);

}  // namespace phub::reference
