#include "worker/memory/gradient_coder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/convert_scaled.h"
#include "kernels/encode.h"
#include "transport/error.h"

namespace phub {
namespace {

using kernels::DType;

DType format_named(std::string_view name) {
  const auto format = kernels::parse_format(name);
  if (!format) fail(ErrorCode::kInternal, "the server's answer has an unknown format '{}'", name);
  return *format;
}

DType format_of(const JobSpec& spec, const KeySpec& key) {
  const std::string& format = gradient_format(spec, key);
  return is_compact(key) || is_schedule(format) ? DType::kF32 : format_named(format);
}

// kernels::encode() for a round in f32: the sum goes as it is, and the residual with it.
void add_residual(const float* gradient, float* residual, float* slot, size_t elements) {
  bool finite = true;
  for (size_t i = 0; i < elements; ++i) {
    slot[i] = gradient[i] + residual[i];
    finite &= std::isfinite(slot[i]);
  }
  if (finite) std::fill_n(residual, elements, 0.0f);
}

}  // namespace

bool has_coded_keys(const JobSpec& spec) { return coded_elements(spec) > 0; }

bool saves_residuals(const JobSpec& spec) {
  const bool box_has_none = spec.optimizer == "none" && spec.consistency == "bsp";
  return has_coded_keys(spec) && !box_has_none;
}

void check_carries(const JobSpec& spec) {
  if (spec.consistency == "bsp") {
    fail(ErrorCode::kInvalid,
         "carry_over leaves gradients to later rounds, and job '{}' is in lock-step, where a round "
         "has all of them: its consistency must be ssp or async",
         spec.name);
  }
  if (folds(spec)) {
    fail(ErrorCode::kInvalid,
         "carry_over adds gradients of several rounds, and job '{}' is of values with operations "
         "(optimizer 'fold'): leave it out",
         spec.name);
  }
  for (const KeySpec& key : spec.keys) {
    if (is_compact(key)) {
      fail(ErrorCode::kInvalid,
           "carry_over adds gradients of several rounds, but key '{}' sends a limited number of "
           "{}: leave carry_over out, or send its gradient as it is",
           key.name, key.format);
    }
    const DType format = format_of(spec, key);
    if (format == DType::kF32 || !kernels::is_plain(format)) continue;
    fail(ErrorCode::kInvalid,
         "carry_over adds gradients of several rounds, and those of key '{}' are {}: it must be "
         "f32 or a coded format",
         key.name, kernels::name_of(format));
  }
}

GradientCoder::GradientCoder(const JoinReply& reply, bool carries)
    : random_{.stochastic = reply.spec.rounding == "stochastic",
              .job = rounding_seed(reply.spec.name),
              .rank = reply.rank},
      carries_(carries),
      schedules_(reply.spec),
      by_caller_(reply.spec.keys.size()) {
  if (carries) check_carries(reply.spec);
  if (carries && reply.epoch > 0) {
    // A round that is made once more would carry over other chunks than the box has of it.
    fail(ErrorCode::kInvalid,
         "carry_over: the server saves job '{}', and gradients that are carried over would be lost "
         "or count twice when it goes on from a checkpoint; leave carry_over or --checkpoints out",
         reply.spec.name);
  }
  std::vector<size_t> coded, all;
  for (const KeySpec& key : reply.spec.keys) {
    const size_t at = formats_.size();
    formats_.push_back(format_of(reply.spec, key));
    const bool weighs = reply.spec.weights == Weights::kYes && !is_compact(key);
    by_chunks_.push_back(is_coded(at) || weighs ? 1 : 0);
    coded.push_back(codes(at) ? key.elements : 0);
    all.push_back(carries || is_coded(at) ? key.elements : 0);
    residual_elements_ += all.back();
  }
  gradients_ = KeyArrays(coded);
  residuals_ = KeyArrays(all);
}

DType GradientCoder::format(size_t key, uint64_t round) const {
  const FormatSchedule* const schedule = schedules_.of(key);
  return schedule ? format_named(schedule->at(round).name) : formats_[key];
}

bool GradientCoder::carry(size_t key, const ChunkLayout& chunk, const std::byte* slot) {
  float* const residual = residuals_[key].data() + chunk.key_element;
  if (!is_coded(key)) {  // the residual is in it
    std::memcpy(residual, slot, chunk.elements * sizeof(float));
    return true;
  }
  decoded_.resize(chunk.elements);
  kernels::decode(slot, formats_[key], decoded_.data(), chunk.elements);
  if (!std::ranges::all_of(decoded_, [](float x) { return std::isfinite(x); })) return false;
  for (uint32_t i = 0; i < chunk.elements; ++i) residual[i] += decoded_[i];
  return true;
}

void GradientCoder::add_carried(size_t key, std::span<std::byte> slots) {
  auto* const gradient = reinterpret_cast<float*>(slots.data());
  const std::span<float> residual = residuals_[key];
  for (size_t i = 0; i < residual.size(); ++i) {
    gradient[i] += residual[i];
    residual[i] = 0;
  }
}

void GradientCoder::encode(Session& session, size_t key, uint64_t round, const void* gradient,
                           DType dtype, float scale) {
  const bool as_it_is = dtype == DType::kF32 && scale == 1;
  const DType to = format(key, round);
  std::vector<float> scaled;  // of a chunk
  const std::span<std::byte> slots = session.gradient(key);
  session.for_each_chunk(key, [&](const ChunkLayout& chunk, size_t slot) {
    if (!session.writes(chunk)) return;  // it is null, and what is left of those before stays
    const auto* from =
        static_cast<const std::byte*>(gradient) + chunk.key_element * kernels::bytes_of(dtype);
    if (!as_it_is) {
      scaled.resize(chunk.elements);
      kernels::convert_scaled(from, dtype, scale, scaled.data(), DType::kF32, chunk.elements);
      from = reinterpret_cast<const std::byte*>(scaled.data());
    }
    const auto* const elements = reinterpret_cast<const float*>(from);
    std::byte* const into = slots.data() + slot;
    if (!is_coded(key)) {
      return kernels::convert(elements, DType::kF32, into, to, chunk.elements);
    }
    float* const residual = residuals_[key].data() + chunk.key_element;
    if (to == DType::kF32) {
      return add_residual(elements, residual, reinterpret_cast<float*>(into), chunk.elements);
    }
    kernels::encode(elements, residual, to,
                    {.stochastic = random_.stochastic,
                     .job = random_.job,
                     .rank = random_.rank,
                     .round = round,
                     .element = chunk.offset},
                    into, chunk.elements);
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
