// What a plan comes to: each box's part of it, its memory by node, its balance.
#include <algorithm>
#include <numeric>

#include "phub/job_rules.h"
#include "phub/plan/plan.h"
#include "transport/error.h"
#include "transport/slot_window.h"

namespace phub {
namespace {

std::vector<NodeRun> runs_of(const Plan& plan, uint64_t ChunkLayout::*offset,
                             uint32_t ChunkLayout::*size) {
  std::vector<uint32_t> order(plan.chunks.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return plan.chunks[a].*offset < plan.chunks[b].*offset;
  });
  std::vector<NodeRun> runs;
  for (uint32_t c : order) {
    const ChunkLayout& chunk = plan.chunks[c];
    if (chunk.queue == kElsewhere) continue;
    const uint32_t node = plan.cores[plan.queues[chunk.queue].core].os_node;
    if (runs.empty() || runs.back().os_node != node) runs.push_back({node, chunk.*offset, 0});
    const uint64_t end = chunk.*offset + chunk.*size;  // chunks may share slots
    runs.back().count = std::max(runs.back().count, end - runs.back().first);
  }
  if (runs.size() == 1) runs.clear();
  return runs;
}

template <typename Part>
double imbalance(const std::vector<Part>& parts) {
  uint64_t largest = 0, sum = 0;
  for (const Part& part : parts) {
    largest = std::max(largest, part.gradient_bytes);
    sum += part.gradient_bytes;
  }
  if (sum == 0) return 1;
  return static_cast<double>(largest) * static_cast<double>(parts.size()) /
         static_cast<double>(sum);
}

}  // namespace

uint32_t boxes_of(const Plan& plan) { return plan.cores.back().box + 1; }

uint32_t first_core_of(const Plan& plan, uint32_t box) {
  const auto first = std::ranges::lower_bound(plan.cores, box, {}, &CorePlan::box);
  return static_cast<uint32_t>(first - plan.cores.begin());
}

uint32_t first_queue_of(const Plan& plan, uint32_t box) {
  const uint32_t core = first_core_of(plan, box);
  return core == plan.cores.size() ? static_cast<uint32_t>(plan.queues.size())
                                   : plan.cores[core].queues.front();
}

Plan part_of(const Plan& plan, uint32_t box) {
  const uint32_t first_core = first_core_of(plan, box), end_core = first_core_of(plan, box + 1);
  const uint32_t first = first_queue_of(plan, box), end = first_queue_of(plan, box + 1);
  PHUB_CHECK(first_core < end_core);
  Plan part;
  static_cast<Layout&>(part) = plan;
  part.slot_window = plan.slot_window;
  part.homes = plan.homes;
  part.cores.assign(plan.cores.begin() + first_core, plan.cores.begin() + end_core);
  for (CorePlan& core : part.cores) {
    for (uint32_t& queue : core.queues) queue -= first;
  }
  const uint32_t first_nic = plan.queues[first].nic, end_nic = plan.queues[end - 1].nic + 1;
  part.nics.assign(plan.nics.begin() + first_nic, plan.nics.begin() + end_nic);
  for (uint32_t q = first; q < end; ++q) {
    part.queues.push_back({plan.queues[q].core - first_core, plan.queues[q].nic - first_nic});
  }
  part.queue_chunks.assign(plan.queue_chunks.begin() + first, plan.queue_chunks.begin() + end);
  if (!plan.queue_offset.empty()) {
    part.queue_offset.assign(plan.queue_offset.begin() + first, plan.queue_offset.begin() + end);
    part.box_elements = part.slots_bytes = 0;
  }
  if (!plan.queue_slots.empty()) {
    part.queue_slots.assign(plan.queue_slots.begin() + first, plan.queue_slots.begin() + end);
  }
  if (plan.shares_slots()) {
    part.queue_shares.assign(plan.queue_shares.begin() + first, plan.queue_shares.begin() + end);
  }
  for (ChunkLayout& chunk : part.chunks) {
    const bool here = chunk.queue >= first && chunk.queue < end;
    chunk.queue = here ? chunk.queue - first : kElsewhere;
    if (!here) continue;
    part.box_elements = std::max(part.box_elements, chunk.box_offset + part.box_slot(chunk));
    part.slots_bytes = std::max(part.slots_bytes, chunk.slot_offset + part.slot_room_of(chunk));
  }
  return part;
}

std::vector<Plan> parts_of(const Plan& plan) {
  std::vector<Plan> parts;
  for (uint32_t box = 0; box < boxes_of(plan); ++box) parts.push_back(part_of(plan, box));
  return parts;
}

std::vector<NodeRun> node_runs(const Plan& plan) {
  return runs_of(plan, &ChunkLayout::box_offset, &ChunkLayout::elements);
}

std::vector<NodeRun> slot_runs(const Plan& plan) {
  return runs_of(plan, &ChunkLayout::slot_offset, &ChunkLayout::slot_bytes);
}

// Each core has a share of the window as of the slots.
WindowPlaces window_places(const Plan& plan, const CorePlan& core) {
  if (plan.slot_window == 0 || plan.slots_bytes <= plan.slot_window) return {};
  uint64_t largest = 1, room = 0;
  for (const uint32_t queue : core.queues) {
    for (const uint32_t id : plan.queue_chunks[queue]) {
      const uint64_t bytes = plan.slot_room_of(plan.chunks[id]);
      largest = std::max(largest, bytes);
      room += bytes;
    }
  }
  const double share = static_cast<double>(room) / static_cast<double>(plan.slots_bytes);
  const auto bytes = static_cast<uint64_t>(share * static_cast<double>(plan.slot_window));
  const uint64_t of_place = SlotWindow::place_bytes(largest);
  const uint64_t most = std::max<uint64_t>(chunks_on(plan, core), 1);
  return {static_cast<uint32_t>(std::clamp<uint64_t>(bytes / of_place, 1, most)), of_place};
}

double core_imbalance(const Plan& plan) { return imbalance(plan.cores); }
double nic_imbalance(const Plan& plan) { return imbalance(plan.nics); }

uint64_t chunks_on(const Plan& plan, const CorePlan& core) {
  uint64_t chunks = 0;
  for (const uint32_t queue : core.queues) chunks += plan.queue_chunks[queue].size();
  return chunks;
}

uint64_t ranks_of(const JobSpec& spec) { return std::max({spec.max_ranks, spec.world_size, 1u}); }

ElementBytes element_bytes(const JobSpec& spec) {
  const JobRules rules = rules_of(spec);
  // The only hyperparameter that decides how much state there is.
  kernels::Hyper hyper = kernels::default_hyper(rules.optimizer);
  const auto momentum = spec.hyper.find("rmsprop_momentum");
  if (momentum != spec.hyper.end()) hyper.rmsprop_momentum = momentum->second;

  ElementBytes bytes;
  bytes.parameter = kernels::bytes_of(rules.parameter_dtype);
  bytes.optimized = rules.optimizer != kernels::Optimizer::kNone;
  bytes.difference = rules.difference ? kDifferenceBytes : 0;
  const bool is_view = rules.difference || rules.parameter_dtype != kernels::DType::kF32;
  const bool has_master = rules.own_results() || (bytes.optimized && is_view);
  bytes.master = has_master ? sizeof(float) : 0;
  bytes.states = kernels::state_arrays(rules.optimizer, hyper);
  bytes.state = bytes.states * (rules.state8 ? sizeof(uint8_t) : sizeof(float));
  return bytes;
}

}  // namespace phub
