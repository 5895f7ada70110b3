// The plan for people.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "phub/plan/plan.h"
#include "phub/text_table.h"

namespace phub {
namespace {

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
double mean_bytes(const std::vector<Part>& parts) {
  double sum = 0;
  for (const Part& part : parts) sum += static_cast<double>(part.gradient_bytes);
  return sum / static_cast<double>(parts.size());
}

std::string percent_of(uint64_t part, double mean) {
  return fmt::format("{:.1f}%", 100 * static_cast<double>(part) / mean);
}

std::string describe_nics(const Plan& plan, const JobSpec& spec, uint64_t ranks) {
  struct Use {
    uint64_t chunks = 0, cores = 0, result_bytes = 0;
    uint32_t os_node = 0;
  };
  std::vector<Use> use(plan.nics.size());
  for (size_t q = 0; q < plan.queues.size(); q++) {
    const QueuePlan& queue = plan.queues[q];
    use[queue.nic].chunks += plan.queue_chunks[q].size();
    use[queue.nic].cores++;
    use[queue.nic].os_node = plan.cores[queue.core].os_node;
  }
  const ResultFormat results = result_format(spec);
  for (const ChunkLayout& chunk : plan.chunks) {
    if (chunk.queue == kElsewhere) continue;
    use[plan.queues[chunk.queue].nic].result_bytes +=
        results.difference ? results.difference->bytes(chunk.elements)
                           : uint64_t{chunk.elements} * results.element_bytes;
  }
  const double mean = mean_bytes(plan.nics);
  TextTable table({"NIC", "node", "cores", "chunks", "in/round", "out/round", "of mean"});
  for (size_t n = 0; n < plan.nics.size(); n++) {
    const NicPlan& nic = plan.nics[n];
    table.add({nic.name, fmt::to_string(use[n].os_node), grouped(use[n].cores),
               grouped(use[n].chunks), human_bytes(nic.gradient_bytes * ranks),
               human_bytes(use[n].result_bytes * ranks), percent_of(nic.gradient_bytes, mean)});
  }
  return table.text();
}

std::string describe_cores(const Plan& plan) {
  const double mean = mean_bytes(plan.cores);
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
               grouped(chunks), human_bytes(core.gradient_bytes),
               percent_of(core.gradient_bytes, mean), queues});
  }
  return table.text();
}

// "bf16", or "bf16 (3 keys), f32 (1 key)".
std::string gradient_formats(const JobSpec& spec) {
  std::map<std::string_view, uint64_t> keys;
  for (const KeySpec& key : spec.keys) ++keys[gradient_format(spec, key)];
  if (keys.empty()) return spec.gradient_dtype;
  if (keys.size() == 1) return std::string(keys.begin()->first);
  std::string text;
  for (const auto& [format, count] : keys) {
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", format, counted(count, "key"));
  }
  return text;
}

}  // namespace

std::string describe(const Plan& plan, const JobSpec& spec) {
  const uint64_t ranks = ranks_of(spec);
  uint64_t elements = 0, bytes = 0;
  uint32_t largest = 0;
  for (const ChunkLayout& chunk : plan.chunks) {
    elements += chunk.elements;
    bytes += chunk.slot_bytes;
    largest = std::max(largest, chunk.elements);
  }
  std::string text = fmt::format(
      "{}: {} in {}, {} of up to {} elements; {} per gradient\n"
      "{}, optimizer {}, gradients {}, parameters {}\n",
      spec.name, counted(elements, "element"), counted(plan.key_offset.size(), "key"),
      counted(plan.chunks.size(), "chunk"), grouped(largest), human_bytes(bytes),
      counted(ranks, "rank"), spec.optimizer, gradient_formats(spec), spec.parameter_dtype);
  text += fmt::format("\nNICs (largest {:.3f} x mean)\n", nic_imbalance(plan));
  text += describe_nics(plan, spec, ranks);
  if (const std::string homes = describe(plan.homes); !homes.empty()) text += homes + "\n";
  text += fmt::format("\nCores (largest {:.3f} x mean)\n", core_imbalance(plan));
  text += describe_cores(plan);
  return text;
}

}  // namespace phub
