#include "phub/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "phub/job_rules.h"
#include "phub/plan/deal.h"
#include "transport/error.h"
#include "transport/wire.h"

namespace phub {
namespace {

uint64_t chunks_of(const KeySpec& key, uint32_t chunk_elements) {
  const uint64_t most = chunk_elements_of(key, chunk_elements);
  return (key.elements + most - 1) / most;
}

std::vector<Site> sites_of(const numa::Topology& topology) {
  std::vector<Site> sites(topology.nodes.size());
  for (uint32_t n = 0; n < sites.size(); n++) {
    sites[n].node = n;
    sites[n].box = topology.nodes[n].box;
    sites[n].host = topology.nodes[n].host;
  }
  for (uint32_t i = 0; i < topology.cores.size(); i++) {
    PHUB_CHECK(topology.cores[i].node < sites.size());
    sites[topology.cores[i].node].cores.push_back(i);
  }
  for (uint32_t i = 0; i < topology.nics.size(); i++) {
    PHUB_CHECK(topology.nics[i].node < sites.size());
    sites[topology.nics[i].node].nics.push_back(i);
  }
  const bool need_nic = !topology.nics.empty();
  std::erase_if(sites,
                [&](const Site& s) { return s.cores.empty() || (need_nic && s.nics.empty()); });
  if (sites.empty() && !topology.cores.empty()) {
    fail(ErrorCode::kInvalid,
         "no NUMA node of {} has both a NIC and a core that may be used: allow CPUs of a node that "
         "has a NIC (taskset, cpuset), or leave the NICs out",
         topology.source);
  }
  if (sites.empty()) fail(ErrorCode::kInvalid, "{} has no cores", topology.source);
  return sites;
}

// Keeps `wanted` cores: first those that are preferred, then one for each site, so that every NIC
// is used, then the others in proportion to NICs (highest averages); of equals the least loaded.
// Sites without a core are removed.
void keep_cores(const numa::Topology& topology, const PlanOptions& options, uint32_t wanted,
                std::vector<Site>& sites) {
  LoadOfCpus load = load_of_cpus(options);
  const auto claim = [&](uint32_t core) {  // the least goes first
    const uint32_t cpu = topology.cores[core].os_cpu;
    const uint32_t box = topology.nodes[topology.cores[core].node].box;
    const bool preferred = box == 0 && std::ranges::count(options.preferred_cpus, cpu) > 0;
    return std::pair(!preferred, load[{box, cpu}]);
  };
  for (Site& site : sites) std::ranges::stable_sort(site.cores, {}, claim);
  std::vector<size_t> kept(sites.size(), 0);
  const auto goes_before = [&](size_t a, size_t b) {  // whether a's claim to a core beats b's
    const auto [others_a, load_a] = claim(sites[a].cores[kept[a]]);
    const auto [others_b, load_b] = claim(sites[b].cores[kept[b]]);
    if (others_a != others_b) return !others_a;
    if ((kept[a] == 0) != (kept[b] == 0)) return kept[a] == 0;
    const uint64_t nics_a = std::max<size_t>(1, sites[a].nics.size()) * (kept[b] + 1);
    const uint64_t nics_b = std::max<size_t>(1, sites[b].nics.size()) * (kept[a] + 1);
    return nics_a != nics_b ? nics_a > nics_b : load_a < load_b;
  };
  for (uint32_t i = 0; i < wanted; i++) {
    size_t best = sites.size();
    for (size_t s = 0; s < sites.size(); s++) {
      if (kept[s] == sites[s].cores.size()) continue;
      if (best == sites.size() || goes_before(s, best)) best = s;
    }
    kept[best]++;
  }
  for (size_t s = 0; s < sites.size(); s++) sites[s].cores.resize(kept[s]);
  std::erase_if(sites, [](const Site& s) { return s.cores.empty(); });
}

void check(const numa::Topology& topology, std::span<const KeySpec> keys,
           const PlanOptions& options) {
  const uint32_t chunk = options.chunk_elements;
  if (chunk == 0 || chunk % kChunkAlignment != 0) {
    fail(ErrorCode::kInvalid, "chunk_elements is {}; it must be a positive multiple of {}", chunk,
         kChunkAlignment);
  }
  if (options.ranks == 0 || options.ranks > kMaxRanks) {
    fail(ErrorCode::kInvalid, "{} ranks; there can be 1 to {}", options.ranks, kMaxRanks);
  }
  if (topology.nodes.empty()) fail(ErrorCode::kInvalid, "{} has no NUMA nodes", topology.source);
  if (keys.empty()) fail(ErrorCode::kInvalid, "there are no keys to plan for");
  if (keys.size() > kMaxKeys) {
    fail(ErrorCode::kInvalid, "{} keys; there can be at most {}", keys.size(), kMaxKeys);
  }
  uint64_t total = 0;
  for (size_t k = 0; k < keys.size(); k++) {
    if (keys[k].elements == 0) {
      fail(ErrorCode::kInvalid, "key {} '{}' has no elements", k, keys[k].name);
    }
    if (keys[k].elements > kMaxElements - total) {
      fail(ErrorCode::kInvalid, "with key {} '{}' of {} elements the job exceeds {} elements", k,
           keys[k].name, keys[k].elements, kMaxElements);
    }
    total += keys[k].elements;
  }
}

// Adds the cores, NICs and queues of one site. Think of a line, divided once into equal parts for
// the cores and once for the NICs. Where a core's part overlaps a NIC's there is a queue, and the
// overlap is its share of the bytes. That balances both with the fewest queues possible
// (cores + NICs - gcd).
void add_site(const numa::Topology& topology, const Site& site, Plan& plan,
              std::vector<double>& queue_share) {
  const uint32_t os_node = topology.nodes[site.node].os_node;
  const uint32_t box = topology.nodes[site.node].box;
  const auto first_core = static_cast<uint32_t>(plan.cores.size());
  const auto first_nic = static_cast<uint32_t>(plan.nics.size());
  for (uint32_t c : site.cores) {
    plan.cores.push_back({site.node, box, os_node, topology.cores[c].os_cpu});
  }
  for (uint32_t n : site.nics) plan.nics.push_back({site.node, topology.nics[n].name});
  if (site.nics.empty()) plan.nics.push_back({site.node, fmt::format("mem{}", os_node)});

  const uint64_t cores = site.cores.size();
  const uint64_t nics = plan.nics.size() - first_nic;
  for (uint64_t at = 0; at < cores * nics;) {  // core c has [c·nics, (c+1)·nics), NIC n likewise
    const uint64_t core = at / nics, nic = at / cores;
    const uint64_t end = std::min((core + 1) * nics, (nic + 1) * cores);
    plan.cores[first_core + core].queues.push_back(static_cast<uint32_t>(plan.queues.size()));
    plan.queues.push_back(
        {static_cast<uint32_t>(first_core + core), static_cast<uint32_t>(first_nic + nic)});
    queue_share.push_back(static_cast<double>(end - at));
    at = end;
  }
}

void check_chunk_count(std::span<const KeySpec> keys, const PlanOptions& options, size_t queues) {
  uint64_t chunks = 0;
  for (const KeySpec& key : keys) chunks += chunks_of(key, options.chunk_elements);
  const uint64_t limit = std::min<uint64_t>(uint64_t{queues} * kMaxChunksPerQueue,
                                            std::numeric_limits<uint32_t>::max());
  if (chunks > limit) {
    fail(
        ErrorCode::kInvalid,
        "{} chunks of {} elements on {} queues: a queue holds at most {} chunks; use larger chunks "
        "or more cores",
        chunks, options.chunk_elements, queues, kMaxChunksPerQueue);
  }
}

// The keys with the rows of their chunks, where some are still to be decided; otherwise none.
std::vector<KeySpec> with_tiles(std::span<const KeySpec> keys, size_t cores,
                                uint32_t chunk_elements) {
  const auto undecided = [](const KeySpec& key) { return has_tiles(key) && key.tile_rows == 0; };
  if (std::ranges::none_of(keys, undecided)) return {};
  std::vector<KeySpec> all(keys.begin(), keys.end());
  for (KeySpec& key : all) {
    if (undecided(key)) key.tile_rows = tile_rows_for(key, cores, chunk_elements);
  }
  return all;
}

// The chunks of every queue, ascending.
std::vector<std::vector<uint32_t>> chunks_of_queues(const Plan& plan) {
  std::vector<std::vector<uint32_t>> queues(plan.queues.size());
  for (uint32_t c = 0; c < plan.chunks.size(); c++) queues[plan.chunks[c].queue].push_back(c);
  for (size_t q = 0; q < queues.size(); q++) {
    const size_t count = queues[q].size();
    if (count > kMaxChunksPerQueue) {
      fail(ErrorCode::kInvalid,
           "queue {} would hold {} chunks, and a queue holds at most {}; use larger chunks or more "
           "cores",
           q, count, kMaxChunksPerQueue);
    }
  }
  return queues;
}

// The slots that the chunks of each queue share: as large a part of the window as they are of their
// box's gradients. Empty: at no box are these larger than the window.
std::vector<uint32_t> shares_of(const Plan& plan,
                                std::span<const std::vector<uint32_t>> queue_chunks,
                                uint64_t window) {
  std::vector<uint64_t> bytes, bytes_of_box(boxes_of(plan));
  for (size_t q = 0; q < queue_chunks.size(); ++q) {
    bytes.push_back(0);
    for (const uint32_t id : queue_chunks[q]) bytes[q] += plan.slot_room_of(plan.chunks[id]);
    bytes_of_box[plan.cores[plan.queues[q].core].box] += bytes[q];
  }
  if (window == 0 || std::ranges::max(bytes_of_box) <= window) return {};
  std::vector<uint32_t> shares;
  for (size_t q = 0; q < queue_chunks.size(); ++q) {
    const uint64_t of_box = bytes_of_box[plan.cores[plan.queues[q].core].box];
    const double part = std::min(1.0, static_cast<double>(window) / static_cast<double>(of_box));
    const auto room = static_cast<double>(plan.shared_room(queue_chunks[q]));
    const auto slots = static_cast<uint64_t>(part * static_cast<double>(bytes[q]) / room);
    const uint64_t most = std::max<uint64_t>(queue_chunks[q].size(), 1);
    shares.push_back(static_cast<uint32_t>(std::clamp<uint64_t>(slots, 1, most)));
  }
  return shares;
}

// The memory of every box begins at 0.
void lay_out_boxes(Plan& plan, const PlanOptions& options) {
  std::vector<std::vector<uint32_t>> chunks = chunks_of_queues(plan);
  std::vector<uint32_t> shares;
  if (options.shares_slots) shares = shares_of(plan, chunks, options.slot_window);
  std::vector<uint32_t> node;
  for (const QueuePlan& queue : plan.queues) node.push_back(plan.cores[queue.core].node);
  QueueOffsets offsets;
  for (uint32_t box = 0; box < boxes_of(plan) && !options.shared_memory; ++box) {
    const size_t first = offsets.elements.size(), end = first_queue_of(plan, box + 1);
    std::vector<uint32_t> shares_here;
    if (!shares.empty()) shares_here = {shares.begin() + first, shares.begin() + end};
    const QueueOffsets of_box =
        offsets_of_queues(plan, std::span(chunks).subspan(first, end - first),
                          std::span(node).subspan(first, end - first), std::move(shares_here));
    offsets.elements.insert(offsets.elements.end(), of_box.elements.begin(), of_box.elements.end());
    offsets.slots.insert(offsets.slots.end(), of_box.slots.begin(), of_box.slots.end());
  }
  offsets.shares = std::move(shares);
  lay_out_queues(plan, std::move(chunks), std::move(offsets));
}

}  // namespace

Plan make_plan(const numa::Topology& topology, std::span<const KeySpec> keys,
               const PlanOptions& options) {
  check(topology, keys, options);
  std::vector<Site> sites = sites_of(topology);
  size_t usable = 0;
  for (const Site& site : sites) usable += site.cores.size();
  if (options.cores > usable) {
    fail(ErrorCode::kInvalid, "{} cores asked for, but {} has {} that can be used{}", options.cores,
         topology.source, usable,
         usable < topology.cores.size() ? " (the others are on NUMA nodes without a NIC)" : "");
  }
  if (options.most_cores == 0) fail(ErrorCode::kInvalid, "a plan needs a core, and may have none");
  const auto asked = options.cores == 0 ? static_cast<uint32_t>(usable) : options.cores;
  if (const uint32_t wanted = std::min(asked, options.most_cores); wanted < usable) {
    keep_cores(topology, options, wanted, sites);
  }

  Plan plan;
  std::vector<double> queue_share;
  for (const Site& site : sites) add_site(topology, site, plan, queue_share);
  const std::vector<KeySpec> decided = with_tiles(keys, plan.cores.size(), options.chunk_elements);
  const std::span<const KeySpec> tiled = decided.empty() ? keys : decided;
  check_chunk_count(tiled, options, plan.queues.size());
  static_cast<Layout&>(plan) =
      lay_out_keys(tiled, options.chunk_elements, options.gradient_dtype, options.weight_bytes);
  plan.tile_rows.reserve(tiled.size());
  for (const KeySpec& key : tiled) plan.tile_rows.push_back(key.tile_rows);
  plan.trailer_elements = options.trailer_elements;
  if (!options.shares_slots) plan.slot_window = options.slot_window;
  deal(sites, queue_share, tiled, options, plan);
  lay_out_boxes(plan, options);
  return plan;
}

std::vector<uint64_t> exchanged_bytes(const Layout& layout, std::span<const KeySpec> keys,
                                      uint32_t ranks) {
  std::vector<uint64_t> bytes;
  for (const ChunkLayout& chunk : layout.chunks) {
    const std::vector<uint64_t> some = ranks_exchanging(chunk, keys[chunk.key]);
    uint64_t count = some.empty() ? ranks : 0;
    for (const uint64_t word : some) count += static_cast<uint64_t>(std::popcount(word));
    bytes.push_back((chunk.slot_bytes * count + ranks - 1) / ranks);
  }
  return bytes;
}

}  // namespace phub
