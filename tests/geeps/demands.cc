#include "tests/geeps/demands.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "worker/geeps/packing.h"

namespace phub::geeps {
namespace {

constexpr uint64_t kRowBytes = 512;

uint64_t round_up(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

// A batch of one whole entry.
uint32_t add_batch(Demand& demand, uint32_t entry) {
  const Entry& e = demand.entries[entry];
  demand.batches.push_back(
      {e.name, {{entry, (e.bytes + kRowBytes - 1) / kRowBytes, e.bytes}}, e.local});
  return static_cast<uint32_t>(demand.batches.size() - 1);
}

}  // namespace

Demand network(const std::vector<LayerBytes>& layers) {
  Demand demand;
  const auto count = static_cast<uint32_t>(layers.size());
  demand.phases = 2 * count;
  for (uint32_t i = 0; i < count; ++i) {
    demand.entries.push_back(
        {fmt::format("parameters {}", i), false, layers[i].parameters, layers[i].parameters});
    demand.entries.push_back({fmt::format("local {}", i), true, layers[i].local, 0});
    add_batch(demand, 2 * i);
    add_batch(demand, 2 * i + 1);
  }
  uint32_t step = 0;
  for (uint32_t phase = 0; phase < 2 * count; ++phase) {
    const bool forward = phase < count;
    const uint32_t layer = forward ? phase : 2 * count - 1 - phase;
    const auto access = [&](AccessKind kind, uint32_t batch) {
      demand.accesses.push_back({.kind = kind,
                                 .batch = batch,
                                 .step = step++,
                                 .first_phase = phase,
                                 .last_phase = phase,
                                 .fetch = !forward,
                                 .save = forward});
    };
    access(AccessKind::kRead, 2 * layer);
    if (!forward) access(AccessKind::kUpdate, 2 * layer);
    access(AccessKind::kLocal, 2 * layer + 1);
    step += 3;
  }
  return demand;
}

Demand random_demand(std::mt19937& engine, uint32_t max_entries, uint32_t max_accesses) {
  const auto random = [&](uint32_t least, uint32_t most) {
    return std::uniform_int_distribution<uint32_t>(least, most)(engine);
  };
  Demand demand;
  demand.phases = random(1, 8);
  const uint32_t entries = random(1, max_entries);
  for (uint32_t i = 0; i < entries; ++i) {
    const bool local = random(0, 1) == 1;
    const uint64_t bytes = random(1, 40) * 100;
    demand.entries.push_back(
        {fmt::format("e{}", i), local, bytes, local || random(0, 1) == 0 ? 0 : bytes});
  }
  for (uint32_t i = 0; i < entries; ++i) {
    add_batch(demand, i);
    demand.batches.back().in_place = demand.entries[i].local && random(0, 4) > 0;
    // A second batch that shares the entry with another of its kind.
    const uint32_t other = random(0, entries - 1);
    if (other == i || demand.entries[other].local != demand.entries[i].local) continue;
    add_batch(demand, i);
    Batch& batch = demand.batches.back();
    batch.in_place = false;
    const uint64_t bytes = demand.entries[other].bytes;
    batch.parts.push_back({other, (bytes + kRowBytes - 1) / kRowBytes, bytes});
  }
  const uint32_t accesses = random(1, max_accesses);
  for (uint32_t i = 0; i < accesses; ++i) {
    const uint32_t batch = random(0, static_cast<uint32_t>(demand.batches.size()) - 1);
    const bool local = demand.entries[demand.batches[batch].parts[0].entry].local;
    const uint32_t first = random(0, demand.phases - 1);
    const AccessKind parameters = random(0, 1) == 0 ? AccessKind::kRead : AccessKind::kUpdate;
    demand.accesses.push_back(
        {.kind = local ? AccessKind::kLocal : parameters,
         .batch = batch,
         .step = i,
         .first_phase = first,
         .last_phase = (first + random(0, std::min(2u, demand.phases - 1))) % demand.phases,
         .fetch = random(0, 1) == 0,
         .save = random(0, 1) == 0});
  }
  std::vector<bool> taken_up(accesses);
  for (uint32_t i = 0; i < accesses; ++i) {
    Access& access = demand.accesses[i];
    if (access.kind != AccessKind::kRead || access.last_phase < access.first_phase) continue;
    for (uint32_t j = 0; j < i && !access.again; ++j) {
      const Access& before = demand.accesses[j];
      const bool given_back =
          before.first_phase <= before.last_phase && before.last_phase < access.first_phase;
      if (taken_up[j] || before.kind != access.kind || before.batch != access.batch ||
          !given_back || random(0, 3) == 0) {
        continue;
      }
      access.again = j;
      taken_up[j] = true;
    }
  }
  return demand;
}

std::vector<bool> kept_with(const Demand& demand, uint32_t lead) {
  std::vector<bool> kept;
  for (const Access& access : demand.accesses) {
    // Nobody else's phases lie between the two, but those of the lead.
    kept.push_back(access.again &&
                   access.first_phase - demand.accesses[*access.again].last_phase - 1 <= lead);
  }
  return kept;
}

uint64_t moved_bytes(const Demand& demand, const std::vector<bool>& pinned,
                     const std::vector<bool>& kept) {
  uint64_t moved = 0;
  for (size_t i = 0; i < demand.accesses.size(); ++i) {
    const Access& access = demand.accesses[i];
    if (kept[i]) continue;
    for (const BatchPart& part : demand.batches[access.batch].parts) {
      if (pinned[part.entry]) continue;
      if (access.kind != AccessKind::kLocal || access.fetch) moved += part.bytes;
      if (access.kind == AccessKind::kLocal && access.save) moved += part.bytes;
    }
  }
  return moved;
}

uint64_t pinned_bytes(const Demand& demand, const std::vector<bool>& pinned) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < demand.entries.size(); ++i) {
    if (!pinned[i]) continue;
    bytes += round_up(demand.entries[i].bytes) + round_up(demand.entries[i].log_bytes);
  }
  for (const Batch& batch : demand.batches) {
    for (const BatchPart& part : batch.parts) {
      if (!pinned[part.entry] || batch.in_place) continue;
      bytes += round_up(part.rows * (batch.parts.size() == 1 ? 4 : 8));
    }
  }
  return bytes;
}

uint64_t pool_bytes(const Demand& demand, const std::vector<bool>& pinned, uint32_t lead) {
  std::vector<Span> spans;
  const std::vector<bool> kept = kept_with(demand, lead);
  std::vector<Access> accesses = demand.accesses;  // those that keep a buffer are part of its first
  for (size_t i = accesses.size(); i-- > 0;) {
    if (kept[i]) accesses[*accesses[i].again].last_phase = accesses[i].last_phase;
  }
  for (size_t i = 0; i < accesses.size(); ++i) {
    const Access& access = accesses[i];
    if (kept[i]) continue;
    const Batch& batch = demand.batches[access.batch];
    if (batch.in_place && pinned[batch.parts[0].entry]) continue;
    uint64_t bytes = 0;
    for (const BatchPart& part : batch.parts) bytes += part.bytes;
    const uint32_t phases = demand.phases;
    const uint32_t length = (access.last_phase + phases - access.first_phase) % phases + 1;
    const bool local = access.kind == AccessKind::kLocal;
    uint32_t earlier = 0, later = 0;
    if (local ? access.fetch : access.kind == AccessKind::kRead) {
      earlier = std::min(lead, phases - length);
    }
    if (lead > 0 && (local ? access.save : access.kind == AccessKind::kUpdate)) {
      later = std::min(1U, phases - length - earlier);
    }
    spans.push_back({(access.first_phase + phases - earlier) % phases, length + earlier + later,
                     round_up(bytes)});
  }
  return pack(spans, demand.phases).height;
}

}  // namespace phub::geeps
