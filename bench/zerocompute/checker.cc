#include "bench/zerocompute/checker.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

#include "bench/zerocompute/gradients.h"
#include "kernels/trust.h"
#include "transport/error.h"

namespace phub {
namespace {

// Elements that are computed and compared at a time: they stay in the first-level cache.
constexpr size_t kBlock = 1024;

float as_float(const std::byte* at, kernels::DType dtype) {
  float value = 0;
  kernels::convert(at, dtype, &value, kernels::DType::kF32, 1);
  return value;
}

// `expected` and `found` hold n results each; the first of them is element `first`.
Mismatch compare(const std::byte* expected, const std::byte* found, uint64_t first, size_t n,
                 kernels::DType dtype) {
  const size_t width = kernels::bytes_of(dtype);
  Mismatch result;
  if (std::memcmp(expected, found, n * width) == 0) return result;
  for (size_t i = 0; i < n; ++i) {
    const std::byte* want = expected + i * width;
    const std::byte* have = found + i * width;
    if (std::memcmp(want, have, width) == 0) continue;
    if (result.count++ == 0) {
      result.element = first + i;
      result.expected = as_float(want, dtype);
      result.found = as_float(have, dtype);
    }
  }
  return result;
}

// Parameters and the optimizer's state, of the model's elements each.
size_t parameter_arrays(const CheckerOptions& options) {
  if (!options.computes || options.optimizer == kernels::Optimizer::kNone) return 0;
  return 1 + kernels::state_arrays(options.optimizer, options.hyper);
}

size_t sent_floats(const CheckerOptions& options) {
  if (!options.computes || !SentSums::needed(options.format, options.keys)) return 0;
  return SentSums::floats(options.elements, options.ranks, options.format);
}

bool has_view(const CheckerOptions& options) { return !kernels::is_plain(options.difference); }

}  // namespace

size_t Checker::reference_bytes(const CheckerOptions& options) {
  const size_t arrays = parameter_arrays(options) + (has_view(options) ? 1 : 0);
  return (arrays * options.elements + sent_floats(options)) * sizeof(float);
}

Checker::Checker(const CheckerOptions& options, std::span<std::byte> memory) : options_(options) {
  PHUB_CHECK(memory.size() >= reference_bytes(options));
  auto* floats = reinterpret_cast<float*>(memory.data());
  const size_t arrays = parameter_arrays(options);
  if (arrays > 0) params_ = floats;
  if (arrays > 1) state0_ = params_ + options.elements;
  if (arrays > 2) state1_ = params_ + 2 * options.elements;
  float* rest = floats + arrays * options.elements;
  if (arrays > 0 && kernels::adapts(options.optimizer)) {
    trust_chunks_.emplace(options.keys, options.chunk_elements);
  }
  if (has_view(options)) {
    PHUB_CHECK(params_ != nullptr && options.result_dtype == kernels::DType::kF32);
    view_.emplace(options.difference, options.keys, options.chunk_elements, rest);
    rest += options.elements;
  }
  if (sent_floats(options) == 0) return;
  sent_.emplace(SentSums::Options{.ranks = options.ranks,
                                  .format = options.format,
                                  .groups = options.groups,
                                  .pattern_first = options.pattern_first,
                                  .keys = options.keys,
                                  .chunk_elements = options.chunk_elements},
                rest);
}

void Checker::sums_of(uint64_t round, uint64_t first, size_t n, float* out) const {
  if (sent_) {
    std::copy_n(sent_->sums() + first, n, out);
  } else {
    sum_of_gradients(options_.ranks, round, options_.pattern_first + first, n, out);
  }
}

void Checker::advance_chunks(uint64_t round, uint64_t first, uint64_t n) {
  if (sent_) sent_->advance(round, first, n);
  if (trust_chunks_) measure(round, first, n);
  if (!view_) return;
  view_->chunks().visit(first, n, [&](const ModelChunk& chunk) {
    for (size_t done = 0; done < chunk.elements; done += kBlock) {
      advance(round, chunk.first + done, std::min(kBlock, chunk.elements - done));
    }
    view_->advance(round, chunk, params_);
  });
}

void Checker::measure(uint64_t round, uint64_t first, uint64_t n) {
  const kernels::Step step = kernels::make_step(options_.optimizer, options_.hyper, round);
  std::vector<float> sums(trust_chunks_->largest()), scratch(sums.size());
  std::map<uint64_t, kernels::KeyNorms> squares;
  trust_.clear();
  trust_chunks_->visit(first, n, [&](const ModelChunk& chunk) {
    const uint64_t at = chunk.first;
    sums_of(round, at, chunk.elements, sums.data());
    const kernels::KeyNorms part =
        kernels::measure(step, sums.data(), params_ + at, state0_ + at,
                         state1_ ? state1_ + at : nullptr, chunk.elements, scratch.data());
    kernels::KeyNorms& of_key = squares[at - chunk.begin];
    of_key = {of_key.parameters + part.parameters, of_key.update + part.update};
  });
  for (const auto& [key, of_key] : squares) {
    trust_[key] =
        kernels::trust_ratio(step, {std::sqrt(of_key.parameters), std::sqrt(of_key.update)});
  }
}

void Checker::advance(uint64_t round, uint64_t first, size_t n) {
  if (params_ == nullptr) return;
  std::array<float, kBlock> sums;
  sums_of(round, first, n, sums.data());
  kernels::Step step = kernels::make_step(options_.optimizer, options_.hyper, round);
  if (trust_chunks_) step.trust = std::prev(trust_.upper_bound(first))->second;
  kernels::optimize(step, sums.data(), params_ + first, state0_ ? state0_ + first : nullptr,
                    state1_ ? state1_ + first : nullptr, n, nullptr, kernels::DType::kF32,
                    kernels::Store::kCached);
}

void Checker::expect(uint64_t round, uint64_t first, size_t n, void* out) const {
  const kernels::DType dtype = options_.result_dtype;
  if (!options_.computes) {
    std::memset(out, 0, n * kernels::bytes_of(dtype));
  } else if (params_ != nullptr) {
    kernels::convert((view_ ? view_->values() : params_) + first, kernels::DType::kF32, out, dtype,
                     n);
  } else {
    std::array<float, kBlock> sums;
    sums_of(round, first, n, sums.data());
    kernels::convert(sums.data(), kernels::DType::kF32, out, dtype, n);
  }
}

Mismatch Checker::advance_and_check(uint64_t round, uint64_t first, size_t n, const void* results) {
  const size_t width = kernels::bytes_of(options_.result_dtype);
  Mismatch total;
  for (size_t done = 0; done < n; done += kBlock) {
    const size_t count = std::min(kBlock, n - done);
    if (!view_) advance(round, first + done, count);
    total.add(
        check(round, first + done, count, static_cast<const std::byte*>(results) + done * width));
  }
  return total;
}

Mismatch Checker::check(uint64_t round, uint64_t first, size_t n, const void* results) const {
  const size_t width = kernels::bytes_of(options_.result_dtype);
  std::array<float, kBlock> expected;
  Mismatch total;
  for (size_t done = 0; done < n; done += kBlock) {
    const size_t count = std::min(kBlock, n - done);
    expect(round, first + done, count, expected.data());
    total.add(compare(reinterpret_cast<const std::byte*>(expected.data()),
                      static_cast<const std::byte*>(results) + done * width, first + done, count,
                      options_.result_dtype));
  }
  return total;
}

}  // namespace phub
