#include "worker/memory/magnitude.h"

#include <cmath>
#include <limits>

#include "kernels/encode.h"

namespace phub {
namespace {

// In f32: where the elements lie if they are that, else in `scratch`.
const float* as_f32(const std::byte* from, kernels::DType format, size_t elements,
                    std::vector<float>& scratch) {
  if (format == kernels::DType::kF32) return reinterpret_cast<const float*>(from);
  scratch.resize(elements);
  if (kernels::is_plain(format)) {
    kernels::convert(from, format, scratch.data(), kernels::DType::kF32, elements);
  } else {
    kernels::decode(from, format, scratch.data(), elements);
  }
  return scratch.data();
}

double norm(const std::byte* from, kernels::DType format, size_t elements,
            std::vector<float>& scratch) {
  return std::sqrt(kernels::sum_of_squares(as_f32(from, format, elements, scratch), elements));
}

double norm_of_rows(const std::byte* slot, const kernels::SlotShape& shape) {
  double sum = 0;
  kernels::for_each_row(slot, shape, [&](size_t, const float* elements) {
    sum += kernels::sum_of_squares(elements, shape.columns);
  });
  return std::sqrt(sum);
}

double norm_of_factors(const std::byte* slot, const kernels::SlotShape& shape) {
  const kernels::PairsOfSlot pairs = kernels::pairs_of(slot, shape);
  double sum = 0;
  for (size_t pair = 0; pair < pairs.count; ++pair) {
    sum += std::sqrt(kernels::sum_of_squares(pairs.left + pair * shape.rows(), shape.rows()) *
                     kernels::sum_of_squares(pairs.right + pair * shape.columns, shape.columns));
  }
  return sum;
}

double norm_of_compact(const std::byte* slot, const kernels::SlotShape& shape) {
  const bool of_factors = shape.form == kernels::SlotForm::kFactors ||
                          (shape.form == kernels::SlotForm::kEither &&
                           (kernels::row_count(slot) & kernels::kPairs) != 0);
  return of_factors ? norm_of_factors(slot, shape) : norm_of_rows(slot, shape);
}

}  // namespace

kernels::SlotShape compact_shape(const KeySpec& key, const ChunkLayout& chunk) {
  const auto fold =
      kernels::parse_fold(value_type_of(key), key.operation).value_or(kernels::Fold());
  const bool of_factors = is_factors(key);
  return {.elements = chunk.elements,
          .form = of_factors           ? kernels::SlotForm::kFactors
                  : key.rank_limit > 0 ? kernels::SlotForm::kEither
                                       : kernels::SlotForm::kRows,
          .columns = key.shape[1],
          .limit = key.rank_limit > 0 ? key.rank_limit : key.rows_limit,
          .fold = fold};
}

void relative_magnitudes(const Session& session, size_t key, const KeyBytes& gradient,
                         const KeyBytes& parameters, std::vector<float>& out) {
  constexpr float kLargest = std::numeric_limits<float>::infinity();
  std::vector<float> scratch;
  out.clear();
  session.for_each_chunk(key, [&](const ChunkLayout& chunk, size_t slot) {
    const bool in_slots = gradient.in_slots || !kernels::is_plain(gradient.format);
    const size_t at = !in_slots ? chunk.key_element * kernels::bytes_of(gradient.format) : slot;
    double magnitude =
        gradient.compact
            ? norm_of_compact(gradient.data + slot, compact_shape(*gradient.compact, chunk))
            : norm(gradient.data + at, gradient.format, chunk.elements, scratch);
    if (parameters.data != nullptr && magnitude > 0) {
      magnitude /= norm(parameters.data + chunk.key_element * kernels::bytes_of(parameters.format),
                        parameters.format, chunk.elements, scratch);
    }
    out.push_back(std::isnan(magnitude) ? kLargest : static_cast<float>(magnitude));
  });
}

}  // namespace phub
