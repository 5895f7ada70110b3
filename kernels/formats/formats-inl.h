// The table of formats.
#if defined(PHUB_KERNELS_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PHUB_KERNELS_FORMATS_INL_H_
#undef PHUB_KERNELS_FORMATS_INL_H_
#else
#define PHUB_KERNELS_FORMATS_INL_H_
#endif

#include <tuple>

#include "kernels/formats/bf16-inl.h"
#include "kernels/formats/f16-inl.h"
#include "kernels/formats/f32-inl.h"
#include "kernels/formats/fp8-inl.h"
#include "kernels/formats/int32-inl.h"
#include "kernels/formats/int4-inl.h"
#include "kernels/formats/int8-inl.h"
#include "kernels/formats/topk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace phub::kernels::HWY_NAMESPACE {

// The order is that of enum DType. Every format has kType. A plain one has a type T of its
// elements, load() and store() of a vector of f32, stream_two() of two, and kExponent, the bits of
// T that are all set in a NaN or infinity. A scaled one has
// the members that scaled-inl.h lists.
using PlainFormats = std::tuple<F32, Bf16, F16>;
static_assert(std::tuple_size_v<PlainFormats> == kPlainFormats);
using CodedFormats =
    std::tuple<Fp8E4M3, Fp8E5M2, Int32, Int8, Int4, TopK<DType::kTopK>, TopK<DType::kTopK10>,
               TopK<DType::kTopK100>, TopK<DType::kTopK1000>, TopK<DType::kTopKInt4>,
               TopK<DType::kTopK10Int4>, TopK<DType::kTopK100Int4>, TopK<DType::kTopK1000Int4>,
               TopK<DType::kTopKInt2>, TopK<DType::kTopK10Int2>, TopK<DType::kTopK100Int2>,
               TopK<DType::kTopK1000Int2>>;
using Formats = decltype(std::tuple_cat(PlainFormats(), CodedFormats()));
static_assert(std::tuple_size_v<Formats> == kFormats.size());

}  // namespace phub::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
