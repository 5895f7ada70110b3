#include "phub/shard/shard_orders.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "transport/error.h"

namespace phub {

void refuse_order(std::string_view what) {
  fail(ErrorCode::kInvalid, "the server orders what does not fit a box's part: {}", what);
}

Plan plan_of(const ShardPart& order, const Machine& machine) {
  const size_t queues = order.queues.size();
  if (order.queue_chunks.size() != queues || order.queue_offset.size() != queues) {
    refuse_order("queues");
  }
  if (order.spec.chunk_elements == 0 || order.spec.chunk_elements % kChunkAlignment != 0) {
    refuse_order("the size of a chunk");
  }
  Plan plan;
  static_cast<Layout&>(plan) = lay_out_keys(order.spec.keys, order.spec.chunk_elements,
                                            order.spec.gradient_dtype, weight_bytes_of(order.spec));
  plan.trailer_elements = trailer_of(order.spec);
  plan.queue_offset = order.queue_offset;
  plan.queue_slots = order.queue_slots;
  plan.queue_shares = order.queue_shares;
  const bool slots_follow = element_bytes_of_all(plan) > 0 && !plan.shares_slots();
  const bool shares_fit = !plan.shares_slots() || (plan.queue_shares.size() == queues &&
                                                   std::ranges::count(plan.queue_shares, 0u) == 0);
  if (plan.queue_slots.size() != (slots_follow ? 0 : queues) || !shares_fit) refuse_order("slots");
  for (const uint32_t cpu : order.cpus) {
    const numa::Topology& topology = machine.topology();
    const auto core = std::ranges::find(topology.cores, cpu, &numa::Core::os_cpu);
    if (core == topology.cores.end()) refuse_order("a CPU");
    plan.cores.push_back({core->node, 0, topology.nodes[core->node].os_node, cpu});
  }
  for (ChunkLayout& chunk : plan.chunks) chunk.queue = kElsewhere;
  const std::vector<uint64_t> bytes =
      exchanged_bytes(plan, order.spec.keys, static_cast<uint32_t>(ranks_of(order.spec)));
  for (uint32_t q = 0; q < queues; ++q) {
    const ShardQueue& queue = order.queues[q];
    if (queue.core >= plan.cores.size() || (q > 0 && queue.core < order.queues[q - 1].core)) {
      refuse_order("a queue's core");
    }
    auto nic = std::ranges::find(plan.nics, queue.nic, &NicPlan::name);
    if (nic == plan.nics.end()) {
      nic = plan.nics.insert(nic, {plan.cores[queue.core].node, queue.nic});
    }
    plan.queues.push_back({queue.core, static_cast<uint32_t>(nic - plan.nics.begin())});
    plan.cores[queue.core].queues.push_back(q);
    if (order.queue_chunks[q].size() > kMaxChunksPerQueue) refuse_order("a queue");
    for (const uint32_t id : order.queue_chunks[q]) {
      if (id >= plan.chunks.size() || plan.chunks[id].queue != kElsewhere) refuse_order("a chunk");
      const ChunkLayout& chunk = plan.chunks[id];
      plan.chunks[id].queue = q;
      plan.cores[queue.core].elements += chunk.elements;
      plan.cores[queue.core].gradient_bytes += bytes[id];
      plan.nics[plan.queues[q].nic].elements += chunk.elements;
      plan.nics[plan.queues[q].nic].gradient_bytes += bytes[id];
    }
    lay_out_queue(plan, q, order.queue_chunks[q]);
  }
  if (std::ranges::any_of(plan.cores, [](const CorePlan& core) { return core.queues.empty(); })) {
    refuse_order("a core without a queue");
  }
  plan.queue_chunks = order.queue_chunks;
  return plan;
}

Manifest manifest_of(const ShardRestored& restored, const JobSpec& spec) {
  if (restored.ranks < spec.max_ranks) refuse_order("the ranks of a checkpoint");
  Manifest manifest{.spec = spec, .round = restored.round, .steps = restored.steps};
  manifest.hyper = restored.hyper;
  manifest.branches.moves = restored.moves;
  const auto has_dock = [&restored](uint32_t shelf) {
    return std::ranges::count(restored.docks, shelf) == 1;
  };
  if (!fit(restored.moves, spec, has_dock)) refuse_order("moves of branches");
  manifest.ranks.resize(restored.ranks);
  for (const uint32_t rank : restored.expected) {
    if (rank >= restored.ranks) refuse_order("a rank that is expected");
    manifest.ranks[rank].expected = true;
  }
  return manifest;
}

}  // namespace phub
