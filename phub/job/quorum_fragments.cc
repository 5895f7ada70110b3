#include "phub/job/quorum_fragments.h"

#include <set>
#include <vector>

namespace phub {

std::unique_ptr<QuorumGates> make_quorum_gates(const JobSpec& spec, const Plan& plan,
                                               uint64_t first_round, bool together) {
  std::vector<std::set<uint32_t>> cores(fragments_of(spec));
  for (const ChunkLayout& chunk : plan.chunks) {
    cores[spec.keys[chunk.key].fragment].insert(plan.queues[chunk.queue].core);
  }
  std::vector<uint32_t> with_chunks;  // by fragment
  for (const std::set<uint32_t>& of : cores) {
    with_chunks.push_back(static_cast<uint32_t>(of.size()));
  }
  auto gates = std::make_unique<QuorumGates>(static_cast<uint32_t>(plan.cores.size()), with_chunks,
                                             spec.max_ranks, spec.quorum, first_round, together);
  for (uint32_t f = 0; f < gates->size() && spec.grace == Grace::kAuto; ++f) (*gates)[f].measure();
  return gates;
}

std::vector<uint32_t> fragments_of(const ChunkTable& table, const JobSpec& spec, const Plan& plan) {
  std::vector<uint32_t> fragments;
  fragments.reserve(table.size());
  for (const CoreChunk& chunk : table.chunks()) {
    fragments.push_back(spec.keys[plan.chunks[chunk.id].key].fragment);
  }
  return fragments;
}

}  // namespace phub
