#include "worker/gradient_coder.h"

#include <algorithm>
#include <cstring>

#include "kernels/convert_scaled.h"
#include "kernels/encode.h"
#include "transport/error.h"

namespace phub {
namespace {

using kernels::DType;

DType format_of(const JobSpec& spec, const KeySpec& key) {
  const auto format = kernels::parse_format(gradient_format(spec, key));
  if (!format) {
    fail(ErrorCode::kInternal, "the server's answer has an unknown format '{}'",
         gradient_format(spec, key));
  }
  return *format;
}

}  // namespace

bool has_coded_keys(const JobSpec& spec) {
  return std::ranges::any_of(spec.keys, [&spec](const KeySpec& key) {
    return gradient_memory_format(spec, key) != gradient_format(spec, key);
  });
}

bool saves_residuals(const JobSpec& spec) {
  const bool box_has_none = spec.optimizer == "none" && spec.consistency == "bsp";
  return has_coded_keys(spec) && !box_has_none;
}

GradientCoder::GradientCoder(const JoinReply& reply)
    : random_{.stochastic = reply.spec.rounding == "stochastic",
              .job = rounding_seed(reply.spec.name),
              .rank = reply.rank} {
  std::vector<size_t> elements;
  for (const KeySpec& key : reply.spec.keys) {
    formats_.push_back(format_of(reply.spec, key));
    elements.push_back(kernels::is_plain(formats_.back()) ? 0 : key.elements);
    residual_elements_ += elements.back();
  }
  gradients_ = KeyArrays(elements);
  residuals_ = KeyArrays(elements);
}

void GradientCoder::encode(Session& session, size_t key, uint64_t round, const void* gradient,
                           DType dtype, float scale) {
  const bool as_it_is = dtype == DType::kF32 && scale == 1;
  std::vector<float> scaled;  // of a chunk
  const std::span<std::byte> slots = session.gradient(key);
  session.for_each_chunk(key, [&](const ChunkLayout& chunk, size_t slot) {
    const auto* from =
        static_cast<const std::byte*>(gradient) + chunk.key_element * kernels::bytes_of(dtype);
    if (!as_it_is) {
      scaled.resize(chunk.elements);
      kernels::convert_scaled(from, dtype, scale, scaled.data(), DType::kF32, chunk.elements);
      from = reinterpret_cast<const std::byte*>(scaled.data());
    }
    kernels::encode(reinterpret_cast<const float*>(from),
                    residuals_[key].data() + chunk.key_element, formats_[key],
                    {.stochastic = random_.stochastic,
                     .job = random_.job,
                     .rank = random_.rank,
                     .round = round,
                     .element = chunk.offset},
                    slots.data() + slot, chunk.elements);
  });
}

std::vector<std::byte> GradientCoder::residuals() const {
  std::vector<std::byte> all;
  all.reserve(residual_bytes());
  for (size_t key = 0; key < residuals_.keys(); ++key) {
    const auto bytes = std::as_bytes(residuals_[key]);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

void GradientCoder::restore(std::span<const std::byte> residuals) {
  if (residuals.size() != residual_bytes()) {
    fail(ErrorCode::kInvalid, "the saved residuals of this rank have {} bytes, and its keys {}",
         residuals.size(), residual_bytes());
  }
  for (size_t key = 0; key < residuals_.keys(); ++key) {
    const auto to = std::as_writable_bytes(residuals_[key]);
    if (to.empty()) continue;
    std::memcpy(to.data(), residuals.data(), to.size());
    residuals = residuals.subspan(to.size());
  }
}

}  // namespace phub
