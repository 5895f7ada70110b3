// The plan for people, and the memory that a job needs under it.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "kernels/kernels.h"
#include "phub/hyper.h"
#include "phub/membership_log.h"
#include "phub/plan.h"
#include "phub/text_table.h"
#include "transport/error.h"
#include "transport/shm_format.h"
#include "transport/tcp_format.h"

namespace phub {
namespace {

constexpr uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// What a job of this kind holds per element and per chunk.
struct Holders {
  uint64_t ranks = 1;
  uint64_t results = 1;  // copies of what is written back
  ElementBytes element;
  uint64_t bytes_per_chunk = 0;
};

Holders holders_of(const JobSpec& spec) {
  Holders holders;
  holders.ranks = std::max({spec.max_ranks, spec.world_size, 1u});
  holders.element = element_bytes(spec);

  // A chunk's place in the plan and in its queue, its state on the core (48 bytes), and three bits
  // per rank (arrived, null, result owed).
  constexpr uint64_t kChunkStateBytes = 48;
  holders.bytes_per_chunk = sizeof(ChunkLayout) + sizeof(uint32_t) + kChunkStateBytes +
                            3 * round_up(holders.ranks, 64) / 8;
  if (spec.consistency != "bsp") {
    constexpr uint64_t kClockBytes = 9;
    holders.results = holders.ranks;
    holders.bytes_per_chunk += holders.ranks * kClockBytes + sizeof(uint64_t);
  }
  return holders;
}

// 25557032 -> "25,557,032"
std::string grouped(uint64_t n) {
  std::string digits = fmt::to_string(n);
  for (size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ',');
  return digits;
}

std::string counted(uint64_t n, std::string_view noun) {
  return fmt::format("{} {}{}", grouped(n), noun, n == 1 ? "" : "s");
}

template <typename Part>
double mean_elements(const std::vector<Part>& parts) {
  double sum = 0;
  for (const Part& part : parts) sum += static_cast<double>(part.elements);
  return sum / static_cast<double>(parts.size());
}

std::string percent_of(uint64_t part, double mean) {
  return fmt::format("{:.1f}%", 100 * static_cast<double>(part) / mean);
}

std::string describe_nics(const Plan& plan, const Holders& holders) {
  struct Use {
    uint64_t chunks = 0, cores = 0;
    uint32_t os_node = 0;
  };
  std::vector<Use> use(plan.nics.size());
  for (size_t q = 0; q < plan.queues.size(); q++) {
    const QueuePlan& queue = plan.queues[q];
    use[queue.nic].chunks += plan.queue_chunks[q].size();
    use[queue.nic].cores++;
    use[queue.nic].os_node = plan.cores[queue.core].os_node;
  }
  const double mean = mean_elements(plan.nics);
  TextTable table({"NIC", "node", "cores", "chunks", "in/round", "out/round", "of mean"});
  for (size_t n = 0; n < plan.nics.size(); n++) {
    const NicPlan& nic = plan.nics[n];
    table.add({nic.name, fmt::to_string(use[n].os_node), grouped(use[n].cores),
               grouped(use[n].chunks),
               human_bytes(nic.elements * holders.element.gradient * holders.ranks),
               human_bytes(nic.elements * holders.element.parameter * holders.ranks),
               percent_of(nic.elements, mean)});
  }
  return table.text();
}

std::string describe_cores(const Plan& plan, const Holders& holders) {
  const double mean = mean_elements(plan.cores);
  TextTable table({"core", "CPU", "node", "chunks", "bytes", "of mean", "queues (NIC: chunks)"},
                  true);
  for (size_t c = 0; c < plan.cores.size(); c++) {
    const CorePlan& core = plan.cores[c];
    uint64_t chunks = 0;
    std::string queues;
    for (uint32_t q : core.queues) {
      const size_t count = plan.queue_chunks[q].size();
      chunks += count;
      queues += fmt::format("{}q{} {}: {}", queues.empty() ? "" : ", ", q,
                            plan.nics[plan.queues[q].nic].name, grouped(count));
    }
    table.add({fmt::to_string(c), fmt::to_string(core.os_cpu), fmt::to_string(core.os_node),
               grouped(chunks), human_bytes(core.elements * holders.element.gradient),
               percent_of(core.elements, mean), queues});
  }
  return table.text();
}

std::string describe_memory(const Plan& plan, const JobSpec& spec) {
  TextTable table(
      {"node", "gradient slots", "parameters", "f32 master", "optimizer", "bookkeeping", "total"});
  NodeMemory all;
  const auto add = [&](const std::string& name, const NodeMemory& m) {
    table.add({name, human_bytes(m.slots), human_bytes(m.parameters), human_bytes(m.master),
               human_bytes(m.state), human_bytes(m.bookkeeping), human_bytes(m.total())});
  };
  const std::vector<NodeMemory> nodes = memory_needed(plan, spec);
  for (const NodeMemory& m : nodes) {
    add(fmt::to_string(m.os_node), m);
    all.slots += m.slots, all.parameters += m.parameters, all.master += m.master;
    all.state += m.state, all.bookkeeping += m.bookkeeping;
  }
  if (nodes.size() > 1) add("all", all);
  return table.text();
}

}  // namespace

ElementBytes element_bytes(const JobSpec& spec) {
  const auto optimizer = kernels::parse_optimizer(spec.optimizer);
  const auto gradient = kernels::parse_dtype(spec.gradient_dtype);
  const auto parameter = kernels::parse_dtype(spec.parameter_dtype);
  if (!optimizer) fail(ErrorCode::kInvalid, "there is no optimizer '{}'", spec.optimizer);
  if (!gradient) fail(ErrorCode::kInvalid, "there is no dtype '{}'", spec.gradient_dtype);
  if (!parameter) fail(ErrorCode::kInvalid, "there is no dtype '{}'", spec.parameter_dtype);

  // Of the hyperparameters, only this one decides whether there is a state.
  kernels::Hyper hyper = kernels::default_hyper(*optimizer);
  const auto momentum = spec.hyper.find("rmsprop_momentum");
  if (momentum != spec.hyper.end()) hyper.rmsprop_momentum = momentum->second;

  ElementBytes bytes;
  bytes.gradient = kernels::bytes_of(*gradient);
  bytes.parameter = kernels::bytes_of(*parameter);
  bytes.optimized = *optimizer != kernels::Optimizer::kNone;
  // Not in lock-step, what is written back is a copy.
  const bool has_master =
      spec.consistency != "bsp" || (bytes.optimized && *parameter != kernels::DType::kF32);
  bytes.master = has_master ? sizeof(float) : 0;
  bytes.state = sizeof(float) * kernels::state_arrays(*optimizer, hyper);
  return bytes;
}

std::vector<NodeMemory> memory_needed(const Plan& plan, const JobSpec& spec) {
  const Holders holders = holders_of(spec);
  std::map<uint32_t, NodeMemory> nodes;  // by index, as the topology orders them
  uint64_t largest_chunk = 0;
  for (const CorePlan& core : plan.cores) nodes[core.node].os_node = core.os_node;
  for (const ChunkLayout& chunk : plan.chunks) {
    NodeMemory& node = nodes[plan.cores[plan.queues[chunk.queue].core].node];
    const uint64_t elements = slot_elements(chunk.elements);
    node.slots += holders.ranks * holders.element.gradient * elements;
    node.parameters += holders.results * holders.element.parameter * elements;
    node.master += holders.element.master * elements;
    node.state += holders.element.state * elements;
    node.bookkeeping += holders.bytes_per_chunk;
    largest_chunk = std::max(largest_chunk, elements);
  }
  // The rings of every rank: over tcp one of writes that are posted, over shared memory two of
  // immediates, which is less.
  for (size_t q = 0; q < plan.queues.size(); q++) {
    const auto chunks = static_cast<uint32_t>(plan.queue_chunks[q].size());
    static_assert(sizeof(Write) >= 2 * sizeof(uint32_t) && kTcpRingSlack >= kShmRingSlack);
    nodes[plan.cores[plan.queues[q].core].node].bookkeeping +=
        holders.ranks * tcp_ring_entries(chunks) * sizeof(Write);
  }
  // Each core sums into scratch of one chunk.
  for (const CorePlan& core : plan.cores) {
    nodes[core.node].bookkeeping += largest_chunk * sizeof(float);
  }
  // What the control thread keeps: the spec, hyperparameters, and exclusions for the log.
  uint64_t& control = nodes.begin()->second.bookkeeping;
  control += spec_memory(spec, plan.cores.size());
  if (spec.on_nonfinite == "exclude") {
    control += MembershipLog::gathering_bytes(plan.chunks.size(), holders.ranks);
  }
  std::vector<NodeMemory> result;
  for (const auto& [node, memory] : nodes) result.push_back(memory);
  return result;
}

std::string describe(const Plan& plan, const JobSpec& spec) {
  const Holders holders = holders_of(spec);
  uint64_t elements = 0;
  uint32_t largest = 0;
  for (const ChunkLayout& chunk : plan.chunks) {
    elements += chunk.elements;
    largest = std::max(largest, chunk.elements);
  }
  std::string text = fmt::format(
      "{}: {} in {}, {} of up to {} elements; {} per gradient\n"
      "{}, optimizer {}, gradients {}, parameters {}\n",
      spec.name, counted(elements, "element"), counted(plan.key_offset.size(), "key"),
      counted(plan.chunks.size(), "chunk"), grouped(largest),
      human_bytes(elements * holders.element.gradient), counted(holders.ranks, "rank"),
      spec.optimizer, spec.gradient_dtype, spec.parameter_dtype);
  text += fmt::format("\nNICs (largest {:.3f} x mean)\n", nic_imbalance(plan));
  text += describe_nics(plan, holders);
  text += fmt::format("\nCores (largest {:.3f} x mean)\n", core_imbalance(plan));
  text += describe_cores(plan, holders);
  text += "\nMemory (over shared memory, the gradient slots are the workers' own)\n";
  text += describe_memory(plan, spec);
  return text;
}

}  // namespace phub
