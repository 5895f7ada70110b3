#include "phub/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <string_view>

#include "phub/job_rules.h"
#include "transport/error.h"
#include "transport/wire.h"

namespace phub {
namespace {

uint64_t chunks_of(const KeySpec& key, uint32_t chunk_elements) {
  const uint64_t most = chunk_elements_of(key, chunk_elements);
  return (key.elements + most - 1) / most;
}

// A node that can serve: it has cores, and NICs unless no node has any.
struct Site {
  uint32_t node = 0;
  std::vector<uint32_t> cores;  // into Topology::cores
  std::vector<uint32_t> nics;   // into Topology::nics
};

std::vector<Site> sites_of(const numa::Topology& topology) {
  std::vector<Site> sites(topology.nodes.size());
  for (uint32_t n = 0; n < sites.size(); n++) sites[n].node = n;
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

using LoadOfCpus = std::map<std::pair<uint32_t, uint32_t>, uint64_t>;  // by box and CPU
LoadOfCpus load_of_cpus(const PlanOptions& options) {
  LoadOfCpus bytes;
  for (const PlanLoad& load : options.load) bytes[{load.box, load.os_cpu}] += load.bytes;
  return bytes;
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

// A candidate for chunks: a site, a core or a queue.
struct Bin {
  double share = 1;
  uint64_t bytes = 0;  // of the mean rank's gradients
};

// The candidate whose load, relative to its share, is least after it gets the chunk; the first of
// equals.
uint32_t least_loaded(std::span<const Bin> bins, std::span<const uint32_t> candidates,
                      uint64_t bytes) {
  uint32_t best = candidates.front();
  double least = std::numeric_limits<double>::infinity();
  for (uint32_t i : candidates) {
    const double load = static_cast<double>(bins[i].bytes + bytes) / bins[i].share;
    if (load < least) best = i, least = load;
  }
  return best;
}

// The load of other jobs, in gradients of one rank of this job. A core's load counts for any NIC,
// since jobs over another transport have other NICs.
void add_load(const PlanOptions& options, std::span<const std::vector<uint32_t>> site_cores,
              const Plan& plan, std::span<Bin> sites, std::span<Bin> cores, std::span<Bin> queues) {
  const LoadOfCpus of_cpu = load_of_cpus(options);
  std::map<std::pair<uint32_t, std::string_view>, uint64_t> of_nic;  // by box and name
  for (const PlanLoad& load : options.load) of_nic[{load.box, load.nic}] += load.bytes;
  const auto bytes = [ranks = options.ranks](const auto& loads, const auto& of) {
    const auto at = loads.find(of);
    return at == loads.end() ? 0 : (at->second + ranks - 1) / ranks;
  };
  for (size_t s = 0; s < site_cores.size(); s++) {
    for (const uint32_t c : site_cores[s]) {
      cores[c].bytes = bytes(of_cpu, std::pair(plan.cores[c].box, plan.cores[c].os_cpu));
      sites[s].bytes += cores[c].bytes;
    }
  }
  for (size_t q = 0; q < queues.size(); q++) {
    const QueuePlan& queue = plan.queues[q];
    queues[q].bytes = bytes(
        of_nic, std::pair(plan.cores[queue.core].box, std::string_view(plan.nics[queue.nic].name)));
  }
}

// If the cores read the workers' own memory, up to this many neighbouring chunks go to one core, so
// that it reads longer streams. (Over a link they would arrive one after another.) Fewer if a core
// has few chunks. The last part is assigned chunk by chunk, which evens out the cores.
constexpr size_t kLongestRun = 8;
constexpr size_t kRunsPerCore = 64;
constexpr size_t kSinglePart = 8;  // the last of so many

// The number of chunks from order[first] on that have one size and are neighbours in one key.
size_t run_length(const Plan& plan, std::span<const uint64_t> bytes,
                  std::span<const uint32_t> order, size_t first, size_t longest) {
  size_t length = 1;
  for (; length < longest && first + length < order.size(); ++length) {
    const ChunkLayout& next = plan.chunks[order[first + length]];
    const bool follows = order[first + length] == order[first] + length &&
                         next.key == plan.chunks[order[first]].key &&
                         bytes[order[first + length]] == bytes[order[first]];
    if (!follows) break;
  }
  return length;
}

// The chunks of each unit; the largest unit first, of equals in their order.
std::vector<std::vector<uint32_t>> units_of(const PlanOptions& options, const Plan& plan) {
  PHUB_CHECK(options.units.size() == plan.chunks.size());
  std::vector<std::pair<uint64_t, std::vector<uint32_t>>> units(std::ranges::max(options.units) +
                                                                size_t{1});
  for (uint32_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    auto& [bytes, chunks] = units[options.units[chunk]];
    bytes += plan.chunks[chunk].slot_bytes;
    chunks.push_back(chunk);
  }
  std::ranges::stable_sort(units, std::greater<>(), [](const auto& unit) { return unit.first; });
  std::vector<std::vector<uint32_t>> out;
  for (auto& [bytes, chunks] : units) {
    if (bytes > 0) out.push_back(std::move(chunks));
  }
  return out;
}

// Longest processing time first: the largest remaining chunk, or the run that begins with it, goes
// to the site with the least load for its share, there to such a core, there to such a queue. Equal
// chunks go in their order, so that the chunks of one key are spread over the whole box.
void deal(const std::vector<Site>& sites, std::span<const double> queue_share,
          const PlanOptions& options, std::span<const uint64_t> bytes_of, Plan& plan) {
  std::vector<Bin> site_bins(sites.size()), core_bins(plan.cores.size());
  std::vector<Bin> queue_bins(plan.queues.size());
  std::vector<uint32_t> all_sites(sites.size());
  std::iota(all_sites.begin(), all_sites.end(), 0);
  std::vector<std::vector<uint32_t>> site_cores(sites.size());
  uint32_t core = 0;
  for (size_t s = 0; s < sites.size(); s++) {
    // A site's share is that of its scarcer resource: min(its share of the cores, of the NICs). If
    // the two are equal, both are balanced; if not, no other division has a smaller largest load.
    // Pseudo-NICs limit nothing.
    const auto cores = static_cast<double>(sites[s].cores.size() * plan.nics.size());
    const auto nics = static_cast<double>(sites[s].nics.size() * plan.cores.size());
    site_bins[s].share = sites[s].nics.empty() ? cores : std::min(cores, nics);
    for (size_t i = 0; i < sites[s].cores.size(); i++) site_cores[s].push_back(core++);
  }
  for (size_t q = 0; q < queue_bins.size(); q++) queue_bins[q].share = queue_share[q];
  add_load(options, site_cores, plan, site_bins, core_bins, queue_bins);

  // All to one core; there each by itself, or all to one queue.
  const auto put = [&](std::span<const uint32_t> chunks, bool to_one_queue) {
    uint64_t bytes = 0;
    for (const uint32_t chunk : chunks) bytes += bytes_of[chunk];
    const uint32_t s = least_loaded(site_bins, all_sites, bytes);
    const uint32_t k = least_loaded(core_bins, site_cores[s], bytes);
    site_bins[s].bytes += bytes;
    core_bins[k].bytes += bytes;
    plan.cores[k].gradient_bytes += bytes;
    uint32_t queue = least_loaded(queue_bins, plan.cores[k].queues, bytes);
    for (const uint32_t id : chunks) {
      ChunkLayout& chunk = plan.chunks[id];
      if (!to_one_queue) queue = least_loaded(queue_bins, plan.cores[k].queues, bytes_of[id]);
      chunk.queue = queue;
      queue_bins[queue].bytes += bytes_of[id];
      NicPlan& nic = plan.nics[plan.queues[queue].nic];
      nic.gradient_bytes += bytes_of[id];
      nic.elements += chunk.elements;
      plan.cores[k].elements += chunk.elements;
    }
  };
  if (!options.units.empty()) {
    for (const std::vector<uint32_t>& unit : units_of(options, plan)) put(unit, false);
    return;
  }
  std::vector<uint32_t> order(plan.chunks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return bytes_of[a] > bytes_of[b]; });
  const bool no_links = options.shared_memory && sites.front().nics.empty();
  const size_t longest =
      std::clamp<size_t>(order.size() / (plan.cores.size() * kRunsPerCore), 1, kLongestRun);
  const size_t runs_end = no_links ? order.size() - order.size() / kSinglePart : 0;
  for (size_t first = 0, length = 0; first < order.size(); first += length) {
    length = first < runs_end ? run_length(plan, bytes_of, order, first, longest) : 1;
    put(std::span(order).subspan(first, length), true);
  }
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
  static_cast<Layout&>(plan) = lay_out_keys(tiled, options.chunk_elements, options.gradient_dtype);
  plan.tile_rows.reserve(tiled.size());
  for (const KeySpec& key : tiled) plan.tile_rows.push_back(key.tile_rows);
  plan.trailer_elements = options.trailer_elements;
  if (!options.shares_slots) plan.slot_window = options.slot_window;
  deal(sites, queue_share, options, exchanged_bytes(plan, tiled, options.ranks), plan);
  lay_out_boxes(plan, options);
  return plan;
}

std::vector<uint64_t> exchanged_bytes(const Layout& layout, std::span<const KeySpec> keys,
                                      uint32_t ranks) {
  std::vector<uint64_t> bytes;
  for (const ChunkLayout& chunk : layout.chunks) {
    const std::vector<ExchangedRange>& ranges = keys[chunk.key].exchanged_by;
    uint64_t most = ranges.empty() ? ranks : 0;
    auto range = std::ranges::upper_bound(ranges, chunk.key_element, {}, &ExchangedRange::end);
    for (uint64_t at = chunk.key_element;
         range != ranges.end() && at < chunk.key_element + chunk.elements; ++range) {
      most = std::max<uint64_t>(most, range->ranks);
      at = range->end;
    }
    bytes.push_back((chunk.slot_bytes * most + ranks - 1) / ranks);
  }
  return bytes;
}

}  // namespace phub
