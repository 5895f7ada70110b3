#include "worker/factors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/products.h"
#include "transport/error.h"

namespace phub {
namespace {

// The last element of a key: how many samples it has.
constexpr uint64_t kCountElements = 1;

uint64_t elements_of(const FactorMatrix& matrix) {
  return matrix.samples * (matrix.rows + matrix.columns) + kCountElements;
}

std::string key_of(const FactorMatrix& matrix, uint32_t rank) {
  return fmt::format("{}/factors/{}", matrix.name, rank);
}

uint32_t ranks_in(const JobSpec& spec) { return std::max(spec.max_ranks, spec.world_size); }

void check_whole_sums(const JobSpec& spec) {
  const bool fits =
      spec.optimizer == "none" && spec.reduction == "sum" && spec.consistency == "bsp";
  if (!fits) {
    fail(ErrorCode::kInvalid,
         "factors are passed on as they are: the job needs optimizer none, reduction sum and "
         "consistency bsp, and has {}, {} and {}",
         spec.optimizer, spec.reduction, spec.consistency);
  }
  const auto scales = [](const auto& values) { return values.contains("grad_scale"); };
  if (scales(spec.hyper) || std::ranges::any_of(spec.schedule, scales, &HyperChange::values)) {
    fail(ErrorCode::kInvalid,
         "factors are passed on as they are: the job cannot have a grad_scale; scale the gradient");
  }
  if (spec.parameter_dtype != "f32" || spec.on_nonfinite == "exclude") {
    fail(ErrorCode::kInvalid,
         "factors are passed on as they are: the job needs parameter_dtype f32, and not "
         "on_nonfinite exclude, and has {} and {}",
         spec.parameter_dtype, spec.on_nonfinite);
  }
}

void check_matrix(const FactorMatrix& matrix) {
  constexpr uint32_t kMostSamples = 1 << 24;  // that an f32 counts
  const bool has_room = matrix.rows > 0 && matrix.columns > 0 && matrix.samples > 0;
  const bool fits = has_room && matrix.rows <= kMaxElements && matrix.columns <= kMaxElements &&
                    matrix.samples <= kMostSamples &&
                    matrix.samples <= kMaxElements / (matrix.rows + matrix.columns);
  if (fits) return;
  fail(ErrorCode::kInvalid, "factors of '{}': {} samples of {} x {} are none, or too many",
       matrix.name, matrix.samples, matrix.rows, matrix.columns);
}

}  // namespace

void add_factor_keys(JobSpec& spec, std::span<const FactorMatrix> matrices) {
  check_whole_sums(spec);
  for (const FactorMatrix& matrix : matrices) {
    check_matrix(matrix);
    for (uint32_t rank = 0; rank < ranks_in(spec); ++rank) {
      spec.keys.push_back(
          {.name = key_of(matrix, rank), .elements = elements_of(matrix), .format = "f32"});
    }
  }
}

Factors::Factors(Worker& worker, std::span<const FactorMatrix> matrices) : worker_(worker) {
  check_whole_sums(worker.spec());
  for (const FactorMatrix& matrix : matrices) {
    check_matrix(matrix);
    Matrix& to = matrices_.emplace_back(Matrix{.of = matrix, .keys = {}});
    for (uint32_t rank = 0; rank < ranks_in(worker.spec()); ++rank) {
      const size_t key = to.keys.emplace_back(worker.key(key_of(matrix, rank)));
      const uint64_t elements = worker.spec().keys[key].elements;
      if (elements == elements_of(matrix)) continue;
      fail(ErrorCode::kMismatch, "key '{}' has {} elements, and the factors {}",
           key_of(matrix, rank), elements, elements_of(matrix));
    }
  }
}

std::span<float> Factors::own(const Matrix& matrix) {
  return worker_.gradient(matrix.keys[worker_.rank()]);
}

std::span<float> Factors::left(size_t matrix) {
  const Matrix& m = matrices_.at(matrix);
  return own(m).first(m.of.samples * m.of.rows);
}

std::span<float> Factors::right(size_t matrix) {
  const Matrix& m = matrices_.at(matrix);
  return own(m).subspan(m.of.samples * m.of.rows, m.of.samples * m.of.columns);
}

void Factors::push(size_t matrix, uint32_t samples, int32_t priority) {
  const Matrix& m = matrices_.at(matrix);
  if (samples > m.of.samples) {
    fail(ErrorCode::kInvalid, "factors of '{}': {} samples, and there is room for {}", m.of.name,
         samples, m.of.samples);
  }
  own(m).back() = static_cast<float>(samples);
  for (uint32_t rank = 0; rank < m.keys.size(); ++rank) {
    worker_.push(m.keys[rank], {.priority = priority, .null = rank != worker_.rank()});
  }
}

uint64_t Factors::wait(size_t matrix, float* gradient) {
  const Matrix& m = matrices_.at(matrix);
  uint64_t all = 0;
  for (const size_t key : m.keys) {
    worker_.wait(key);
    const std::span<const float> factors = worker_.parameters(key);
    const float count = factors.back();
    if (!(count >= 0 && count <= static_cast<float>(m.of.samples)) || count != std::floor(count)) {
      fail(ErrorCode::kInvalid, "key '{}' has factors of {} samples, and room for {}",
           worker_.spec().keys[key].name, count, m.of.samples);
    }
    const auto samples = static_cast<size_t>(count);
    if (samples == 0) continue;
    kernels::add_products(factors.data(), factors.data() + m.of.samples * m.of.rows, samples,
                          m.of.rows, m.of.columns, gradient);
    all += samples;
  }
  return all;
}

}  // namespace phub
