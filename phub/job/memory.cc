#include "phub/job/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "kernels/state8.h"
#include "kernels/whole_key.h"
#include "phub/core/core_job.h"
#include "phub/core/hyper.h"
#include "phub/core/key_steps.h"
#include "phub/core/quorum_gate.h"
#include "phub/core/round_gate.h"
#include "phub/core/shared_slots.h"
#include "phub/job/membership_log.h"
#include "phub/job_rules.h"
#include "phub/text_table.h"
#include "transport/error.h"
#include "transport/shm/format.h"
#include "transport/slot_window.h"
#include "transport/tcp/format.h"

namespace phub {
namespace {

constexpr uint64_t kPlanBytes = sizeof(ChunkLayout) + sizeof(uint32_t);  // a chunk's

// The bytes of a chunk's state, new one included, if its key may have less than its elements.
uint64_t pieces_of(const kernels::WholeKey& key, const ChunkLayout& chunk, size_t states) {
  uint64_t elements = 0;
  for (size_t i = 0; i < states; ++i) {
    const uint64_t of_key = kernels::state_elements(key, i);
    const uint64_t rest = of_key - std::min<uint64_t>(of_key, chunk.key_element);
    elements += (i == 0 ? 2 : 1) * std::min<uint64_t>(rest, chunk.elements);
  }
  return elements * sizeof(float) + sizeof(StatePiece);
}

}  // namespace

bool box_has_state(const JobSpec& spec) {
  return !rules_of(spec).lock_step() || element_bytes(spec).optimized;
}

size_t optimized_arrays_of(const JobSpec& spec) {
  return box_has_state(spec) ? 1 + element_bytes(spec).states : 0;
}

size_t saved_arrays_of(const JobSpec& spec) {
  const size_t views = rules_of(spec).difference ? 1 : 0;
  return box_has_state(spec) ? optimized_arrays_of(spec) + views : 0;
}

std::vector<NodeMemory> memory_needed(const Plan& plan, const JobSpec& of_job, bool snapshots,
                                      uint64_t saved_ranks, const Rack* rack,
                                      const Layout* at_standby) {
  const Layout* const above = rack != nullptr ? &rack->above : at_standby;
  const bool sums_only = rack != nullptr && of_job.optimizer != "none";
  const JobSpec spec = sums_only ? spec_of_sums(of_job) : of_job;
  const ElementBytes element = element_bytes(spec);
  const uint64_t ranks = ranks_of(spec);
  const uint64_t ranks_here = rack ? rack->ranks.size() : ranks;
  const uint64_t classes = key_classes(spec).classes.size();
  const uint32_t levels = RankTree(spec.groups, static_cast<uint32_t>(ranks)).levels();
  const JobRules rules = rack ? rules_of_sums(of_job) : rules_of(spec);
  const bool lock_step = rules.lock_step();
  const bool copies = snapshots && box_has_state(spec);
  const size_t saved = saved_arrays_of(spec), optimized = optimized_arrays_of(spec);
  const bool lazy = std::ranges::any_of(spec.keys, &KeySpec::lazy);
  const auto whole = kernels::takes_whole_keys(rules.optimizer) ? whole_keys(spec, rules.optimizer)
                                                                : std::vector<kernels::WholeKey>();
  std::map<uint32_t, NodeMemory> nodes;  // by index, as the topology orders them
  uint64_t largest_chunk = 0;
  for (const CorePlan& core : plan.cores) nodes[core.node].os_node = core.os_node;
  bool windowed = false;
  for (const CorePlan& core : plan.cores) {
    const auto [places, bytes] = window_places(plan, core);
    if (plan.shares_slots()) {
      windowed = true;
      uint64_t slots = 0;
      for (const uint32_t queue : core.queues) {
        slots += plan.queue_shares[queue];
        nodes[core.node].slots +=
            ranks_here * plan.queue_shares[queue] * plan.shared_room(plan.queue_chunks[queue]);
      }
      const uint64_t chunks = chunks_on(plan, core);
      nodes[core.node].bookkeeping +=
          SharedSlots::bytes(chunks, slots, ranks) + SlotWindow::bookkeeping(chunks, ranks_here, 0);
    }
    if (places == 0) continue;
    windowed = true;
    nodes[core.node].slots += ranks_here * places * bytes;
    nodes[core.node].bookkeeping +=
        SlotWindow::bookkeeping(chunks_on(plan, core), ranks_here, places);
  }
  for (const ChunkLayout& chunk : plan.chunks) {
    if (chunk.queue == kElsewhere) continue;
    NodeMemory& node = nodes[plan.cores[plan.queues[chunk.queue].core].node];
    const uint64_t elements = plan.box_slot(chunk);
    if (!windowed) node.slots += ranks_here * plan.slot_room_of(chunk);
    node.parameters +=
        (rules.own_results() ? ranks : 1) * (element.parameter + element.difference) * elements;
    node.master += element.master * elements;
    if (!whole.empty()) {
      node.state += pieces_of(whole[chunk.key], chunk, element.states);
    } else {
      node.state += rules.state8 ? element.states * kernels::state8_bytes(elements, 1)
                                 : element.state * elements;
    }
    if (rules.gated && !rack) node.sums += sizeof(float) * elements;
    if (above) {
      const uint64_t result = rack != nullptr ? element.parameter : sizeof(float);
      node.sums += (sizeof(float) + result) * above->box_slot(chunk);
    }
    const uint64_t branch = optimized * sizeof(float) * elements + sizeof(uint64_t);
    node.shelves += spec.branches * branch;
    if (copies) node.snapshot += saved * sizeof(float) * elements + spec.branches * branch;
    node.bookkeeping += kPlanBytes;
    largest_chunk = std::max(largest_chunk, elements);
  }
  // The rings of every rank: over tcp one of writes that are posted, over shared memory two of
  // immediates, which is less.
  for (size_t q = 0; q < plan.queues.size(); q++) {
    const auto chunks = static_cast<uint32_t>(plan.queue_chunks[q].size());
    static_assert(sizeof(Write) >= 2 * sizeof(uint32_t) && kTcpRingSlack >= kShmRingSlack);
    nodes[plan.cores[plan.queues[q].core].node].bookkeeping +=
        ranks_here * tcp_ring_entries(chunks) * sizeof(Write);
  }
  if (above) {
    for (const std::vector<uint32_t>& chunks : above->queue_chunks) {
      nodes.begin()->second.bookkeeping +=
          tcp_ring_entries(static_cast<uint32_t>(chunks.size())) * sizeof(Write);
    }
  }
  const uint32_t fragments = rules.quorum > 0 ? fragments_of(spec) : 0;
  for (const CorePlan& core : plan.cores) {
    nodes[core.node].bookkeeping +=
        CoreJob::bytes({.chunks = chunks_on(plan, core),
                        .queues = core.queues.size(),
                        .max_ranks = ranks,
                        .classes = classes,
                        .largest_chunk = largest_chunk,
                        .levels = levels,
                        .places = 1 + 2 * uint64_t{spec.branches},
                        .lock_step = lock_step,
                        .gated = rules.gated,
                        .fragments = fragments,
                        .shares_slots = plan.shares_slots() || rules.mirrors,
                        .differences = rules.difference.has_value(),
                        .lazy = lazy,
                        .of_racks = !spec.rack_ranks.empty(),
                        .weighs = rules.weighs(),
                        .has_parent = rack != nullptr,
                        .has_standby = at_standby != nullptr});
  }
  if (copies) {
    nodes[plan.cores.front().node].snapshot +=
        SavedClocks::bytes(plan.chunks.size(), lock_step ? 0 : std::max(ranks, saved_ranks));
  }
  // The control thread keeps the spec, hyperparameters, and exclusions for the log.
  uint64_t& control = nodes.begin()->second.bookkeeping;
  control += spec_memory(spec, classes);
  control += 2 * uint64_t{spec.branches} * hyper_groups(spec) * sizeof(kernels::Hyper);
  if (fragments > 0) control += QuorumGates::bytes(plan.cores.size(), ranks, fragments);
  if (rules.gated && !rack) {
    const uint64_t keys = kernels::adapts(rules.optimizer) ? spec.keys.size() : 0;
    control += RoundGate::bytes(plan.cores.size(), plan.chunks.size(), keys);
    if (!whole.empty()) control += KeySteps::bytes(whole, plan.chunks.size(), plan.cores.size());
  }
  if (rules.on_nonfinite == OnNonFinite::kExclude) {
    control += MembershipLog::gathering_bytes(plan.chunks.size(), ranks);
  }
  std::vector<NodeMemory> result;
  for (const auto& [node, memory] : nodes) result.push_back(memory);
  return result;
}

NodeMemory total_memory(const Plan& plan, const JobSpec& spec, bool snapshots, uint64_t saved_ranks,
                        const Rack* rack, const Layout* at_standby) {
  NodeMemory total;
  for (const NodeMemory& node :
       memory_needed(plan, spec, snapshots, saved_ranks, rack, at_standby)) {
    total.slots += node.slots;
    total.parameters += node.parameters;
    total.master += node.master;
    total.state += node.state;
    total.sums += node.sums;
    total.shelves += node.shelves;
    total.snapshot += node.snapshot;
    total.bookkeeping += node.bookkeeping;
  }
  return total;
}

std::string describe_memory(const Plan& plan, const JobSpec& spec, bool snapshots) {
  TextTable table({"node", "gradient slots", "parameters", "f32 master", "optimizer", "gated sums",
                   "branches", "snapshot", "bookkeeping", "total"});
  const auto add = [&](const std::string& name, const NodeMemory& m) {
    table.add({name, human_bytes(m.slots), human_bytes(m.parameters), human_bytes(m.master),
               human_bytes(m.state), human_bytes(m.sums), human_bytes(m.shelves),
               human_bytes(m.snapshot), human_bytes(m.bookkeeping), human_bytes(m.total())});
  };
  const std::vector<NodeMemory> nodes = memory_needed(plan, spec, snapshots);
  for (const NodeMemory& m : nodes) add(fmt::to_string(m.os_node), m);
  if (nodes.size() > 1) add("all", total_memory(plan, spec, snapshots));
  return "\nMemory (over shared memory, the gradient slots are the workers' own)\n" + table.text();
}

void MemoryBudget::reserve(const JobSpec& spec, const NodeMemory& memory) {
  if (take(1, memory.total()) == 0) {
    constexpr double kMiB = 1 << 20;
    fail(ErrorCode::kFull,
         "job '{}' needs {:.1f} MiB (gradients of {} ranks {:.1f}, parameters {:.1f}, optimizer "
         "state {:.1f}, gated sums {:.1f}, branches {:.1f}, snapshot {:.1f}, bookkeeping {:.1f}); "
         "{:.1f} of {:.1f} "
         "MiB are in use: end "
         "another job, "
         "lower max_ranks or branches, or raise --memory-limit",
         spec.name, static_cast<double>(memory.total()) / kMiB, spec.max_ranks,
         static_cast<double>(memory.slots) / kMiB,
         static_cast<double>(memory.parameters + memory.master) / kMiB,
         static_cast<double>(memory.state) / kMiB, static_cast<double>(memory.sums) / kMiB,
         static_cast<double>(memory.shelves) / kMiB, static_cast<double>(memory.snapshot) / kMiB,
         static_cast<double>(memory.bookkeeping) / kMiB, static_cast<double>(used_) / kMiB,
         static_cast<double>(limit_) / kMiB);
  }
}

std::shared_ptr<void> MemoryBudget::hold_for_join(std::string_view text) {
  constexpr size_t kSmallBytes = size_t{64} << 10;
  if (text.size() <= kSmallBytes) return nullptr;
  // Strings count twice, as they grow; an object in braces may be a key, with its place among the
  // names; a comma may precede a number of a list.
  constexpr uint64_t kOfKey = sizeof(KeySpec) + 64;
  const auto count = [text](char c) { return static_cast<uint64_t>(std::ranges::count(text, c)); };
  const uint64_t keys = std::min<uint64_t>(count('{'), kMaxKeys);
  const uint64_t bytes = 2 * text.size() + keys * kOfKey + count(',') * sizeof(uint64_t);
  // Jobs go first: their reservations are not refused because of joins that are being read.
  if (!has_room(*held_ + bytes)) {
    constexpr uint64_t kMiB = 1 << 20;
    if (*held_ > 0 && has_room(bytes)) {
      fail(ErrorCode::kUnavailable, "other joins take {} MiB until they are done; try again",
           *held_ / kMiB);
    }
    fail(ErrorCode::kFull,
         "this join of {} MiB takes {} MiB to read, and {} of {} MiB are in use: end a job, or "
         "raise --memory-limit",
         text.size() / kMiB, bytes / kMiB, used_ / kMiB, limit_ / kMiB);
  }
  *held_ += bytes;
  return {held_.get(), [held = held_, bytes](void*) { *held -= bytes; }};
}

}  // namespace phub
