#include "worker/geeps/packing.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace phub::geeps {
namespace {

// Calls use(phase) for every phase of the span.
template <class Use>
void for_phases(const Span& span, uint32_t phases, Use use) {
  for (uint32_t i = 0; i < span.length; ++i) {
    const uint32_t phase = span.first_phase + i;
    use(phase < phases ? phase : phase - phases);
  }
}

// Puts each span, in this order, into the lowest gap that is free in all of its phases. Nothing: it
// would be higher than `most`.
std::optional<Packing> first_fit(std::span<const Span> spans, uint32_t phases,
                                 std::span<const uint32_t> order, uint64_t most) {
  Packing packing;
  packing.offsets.resize(spans.size());
  std::vector<std::vector<uint32_t>> placed(phases);
  std::vector<uint32_t> seen_for(spans.size(), UINT32_MAX);
  std::vector<std::pair<uint64_t, uint64_t>> taken;  // begin and end
  for (const uint32_t at : order) {
    const Span& span = spans[at];
    taken.clear();
    for_phases(span, phases, [&](uint32_t phase) {
      for (const uint32_t other : placed[phase]) {
        if (std::exchange(seen_for[other], at) == at) continue;
        taken.emplace_back(packing.offsets[other], packing.offsets[other] + spans[other].bytes);
      }
    });
    std::sort(taken.begin(), taken.end());
    uint64_t offset = 0;
    for (const auto& [begin, end] : taken) {
      if (begin >= offset + span.bytes) break;
      offset = std::max(offset, end);
    }
    packing.offsets[at] = offset;
    packing.height = std::max(packing.height, offset + span.bytes);
    if (packing.height > most) return std::nullopt;
    for_phases(span, phases, [&](uint32_t phase) { placed[phase].push_back(at); });
  }
  return packing;
}

}  // namespace

std::vector<uint64_t> loads(std::span<const Span> spans, uint32_t phases) {
  std::vector<uint64_t> live(phases);
  for (const Span& span : spans) {
    for_phases(span, phases, [&](uint32_t phase) { live[phase] += span.bytes; });
  }
  return live;
}

Packing pack(std::span<const Span> spans, uint32_t phases) {
  return *pack(spans, phases, UINT64_MAX);
}

std::optional<Packing> pack(std::span<const Span> spans, uint32_t phases, uint64_t most) {
  if (spans.empty()) return Packing{};
  const std::vector<uint64_t> live = loads(spans, phases);
  const uint64_t least = *std::max_element(live.begin(), live.end());
  if (least > most) return std::nullopt;
  std::vector<uint32_t> order(spans.size());
  std::iota(order.begin(), order.end(), 0u);
  std::optional<Packing> best = first_fit(spans, phases, order, most);  // as they come

  const auto try_by = [&](auto larger) {
    if (best && best->height == least) return;
    std::stable_sort(order.begin(), order.end(), larger);
    std::optional<Packing> packing =
        first_fit(spans, phases, order, best ? best->height - 1 : most);
    if (packing) best = std::move(packing);
  };
  try_by([&](uint32_t a, uint32_t b) { return spans[a].bytes > spans[b].bytes; });
  try_by([&](uint32_t a, uint32_t b) {
    return spans[a].bytes * spans[a].length > spans[b].bytes * spans[b].length;
  });
  try_by([&](uint32_t a, uint32_t b) { return spans[a].length > spans[b].length; });
  // Those of the fullest phases first.
  const auto fullest = [&](const Span& span) {
    uint64_t most = 0;
    for_phases(span, phases, [&](uint32_t phase) { most = std::max(most, live[phase]); });
    return most;
  };
  std::vector<uint64_t> key(spans.size());
  for (size_t i = 0; i < spans.size(); ++i) key[i] = fullest(spans[i]);
  try_by([&](uint32_t a, uint32_t b) { return key[a] > key[b]; });
  return best;
}

}  // namespace phub::geeps
