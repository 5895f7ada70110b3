#include "tests/oracle/coded.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>

#include "tests/kernels/slots.h"
#include "transport/error.h"

namespace phub {
namespace {

constexpr uint64_t kAlignment = 32;  // of keys, elements

// FNV-1a.
uint64_t number_of(std::string_view job) {
  uint64_t hash = 14695981039346656037u;
  for (const char letter : job) hash = (hash ^ static_cast<uint8_t>(letter)) * 1099511628211u;
  return hash;
}

// "f32*2,int8": f32 in rounds 1 and 2, and then int8.
bool has_schedule(const std::string& format) { return format.find(',') != std::string::npos; }

kernels::DType format_in(const JobSpec& spec, uint32_t key, uint64_t round) {
  std::istringstream phases(gradient_format(spec, spec.keys[key]));
  std::string phase;
  for (uint64_t end = 0; std::getline(phases, phase, ',');) {
    const size_t star = phase.find('*');
    if (star == std::string::npos) break;
    end += std::stoull(phase.substr(star + 1));
    phase.resize(star);
    if (round <= end) break;
  }
  return *kernels::parse_format(phase);
}

}  // namespace

std::vector<ChunkPlace> chunks_of(const JobSpec& spec) {
  std::vector<ChunkPlace> out;
  uint64_t begin = 0;
  for (uint32_t key = 0; key < spec.keys.size(); ++key) {
    const KeySpec& of = spec.keys[key];
    const uint64_t elements = of.elements;
    const uint64_t most = has_tiles(of) ? of.tile_rows * of.shape[1] : spec.chunk_elements;
    PHUB_CHECK(most > 0);
    for (uint64_t at = 0; at < elements; at += most) {
      const auto size = static_cast<uint32_t>(std::min(elements - at, most));
      out.push_back({key, at, size, begin + at});
      if (of.format == "factors") {
        out.back().factors = {size / of.shape[1], of.shape[1], of.rank_limit};
      }
      if (of.format == "rows") {
        out.back().rows = {size / of.shape[1], of.shape[1], of.rows_limit, of.rank_limit};
      }
    }
    begin += (elements + kAlignment - 1) / kAlignment * kAlignment;
  }
  return out;
}

uint64_t sent_bytes(const JobSpec& spec, const ChunkPlace& place) {
  if (place.factors.pairs > 0) return place.factors.floats() * sizeof(float);
  if (place.rows.columns > 0) return place.rows.bytes();
  return place.elements * kernels::bytes_of(memory_dtype(spec, place.key));
}

bool is_coded(const JobSpec& spec, uint32_t key) {
  if (is_compact(spec.keys[key])) return false;
  const std::string& format = gradient_format(spec, spec.keys[key]);
  return has_schedule(format) || !kernels::is_plain(*kernels::parse_format(format));
}

reference::DType memory_dtype(const JobSpec& spec, uint32_t key) {
  if (is_coded(spec, key) || is_compact(spec.keys[key])) return reference::DType::kF32;
  if (spec.weights == Weights::kYes) return reference::DType::kF32;
  return *kernels::parse_dtype(gradient_format(spec, spec.keys[key]));
}

bool is_int32(const JobSpec& spec, uint32_t key) {
  return !is_compact(spec.keys[key]) && gradient_format(spec, spec.keys[key]) == kInt32;
}

std::vector<std::byte> encode_coded(const JobSpec& spec, const ChunkPlace& chunk, uint32_t rank,
                                    uint64_t round, std::span<const float> gradient,
                                    std::span<float> residual) {
  const auto format = format_in(spec, chunk.key, round);
  std::vector<std::byte> slot(kernels::slot_bytes(format, chunk.elements));
  if (kernels::is_plain(format)) {  // of a schedule: nothing stays behind, unless it is no number
    bool finite = true;
    for (uint32_t i = 0; i < chunk.elements; ++i) {
      const float x = gradient[i] + residual[i];
      std::memcpy(slot.data() + i * sizeof x, &x, sizeof x);
      finite = finite && std::isfinite(x);
    }
    if (finite) std::ranges::fill(residual, 0.0f);
    return slot;
  }
  reference::encode(gradient, residual, format,
                    {.stochastic = spec.rounding == "stochastic",
                     .job = number_of(spec.name),
                     .rank = rank,
                     .round = round,
                     .element = chunk.job_element},
                    slot.data());
  return slot;
}

std::vector<float> send_coded(const JobSpec& spec, const ChunkPlace& chunk, uint32_t rank,
                              uint64_t round, std::span<const float> gradient,
                              std::span<float> residual) {
  const auto format = format_in(spec, chunk.key, round);
  const auto slot = encode_coded(spec, chunk, rank, round, gradient, residual);
  if (kernels::is_plain(format)) {
    std::vector<float> sent(chunk.elements);
    std::memcpy(sent.data(), slot.data(), slot.size());
    return sent;
  }
  return reference::decode(slot.data(), format, chunk.elements);
}

void move_view(const JobSpec& spec, const ChunkPlace& chunk, uint64_t round,
               std::span<const float> parameters, std::span<float> view) {
  const auto format = *kernels::parse_format(spec.parameter_dtype);
  if (kernels::is_plain(format)) return;
  std::vector<float> difference(chunk.elements);
  for (uint32_t i = 0; i < chunk.elements; ++i) difference[i] = parameters[i] - view[i];
  std::vector<std::byte> slot(kernels::slot_bytes(format, chunk.elements));
  reference::encode(difference, {}, format,
                    {.stochastic = spec.rounding == "stochastic",
                     .job = number_of(spec.name),
                     .rank = 0xffff'ffff'ffff'ffff,
                     .round = round,
                     .element = chunk.job_element},
                    slot.data());
  const std::vector<float> sent = reference::decode(slot.data(), format, chunk.elements);
  for (uint32_t i = 0; i < chunk.elements; ++i) view[i] = view[i] + sent[i];
}

void move_view(const JobSpec& spec, uint32_t key, uint64_t round, std::span<const float> parameters,
               std::span<float> view) {
  for (const ChunkPlace& chunk : chunks_of(spec)) {
    if (chunk.key != key) continue;
    move_view(spec, chunk, round, parameters.subspan(chunk.begin, chunk.elements),
              view.subspan(chunk.begin, chunk.elements));
  }
}

std::vector<float> CodedRank::send(uint32_t key, uint64_t round, std::span<const float> gradient) {
  std::vector<float>& residual = residuals_[key];
  residual.resize(gradient.size());
  std::vector<float> sent;
  for (const ChunkPlace& chunk : chunks_of(spec_)) {
    if (chunk.key != key) continue;
    const std::vector<float> part =
        send_coded(spec_, chunk, rank_, round, gradient.subspan(chunk.begin, chunk.elements),
                   std::span(residual).subspan(chunk.begin, chunk.elements));
    sent.insert(sent.end(), part.begin(), part.end());
  }
  return sent;
}

}  // namespace phub
