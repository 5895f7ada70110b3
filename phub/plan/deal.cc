#include "phub/plan/deal.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <string_view>
#include <tuple>

#include "transport/error.h"

namespace phub {
namespace {

// A candidate for chunks: a box, a site, a core or a queue.
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

// Only between boxes is there a choice of machines.
Homes homes_of(const std::vector<Site>& sites, const PlanOptions& options) {
  std::vector<uint64_t> hosts;
  for (const Site& site : sites) hosts.push_back(site.host);
  const bool may_choose = sites.front().box != sites.back().box && options.units.empty();
  const std::span<const uint64_t> rank_hosts = options.rank_hosts;
  return {hosts, may_choose ? rank_hosts : rank_hosts.first(0), options.ranks};
}

class Dealer {
 public:
  Dealer(const std::vector<Site>& sites, std::span<const double> queue_share,
         std::span<const uint64_t> bytes_of, const PlanOptions& options, Plan& plan)
      : sites_(sites),
        bytes_of_(bytes_of),
        options_(options),
        plan_(plan),
        site_bins_(sites.size()),
        core_bins_(plan.cores.size()),
        queue_bins_(plan.queues.size()),
        site_cores_(sites.size()),
        all_sites_(sites.size()) {
    std::iota(all_sites_.begin(), all_sites_.end(), 0);
    uint32_t core = 0;
    for (size_t s = 0; s < sites.size(); s++) {
      // A site's share is that of its scarcer resource: min(its share of the cores, of the NICs).
      // If the two are equal, both are balanced; if not, no other division has a smaller largest
      // load. Pseudo-NICs limit nothing.
      const auto cores = static_cast<double>(sites[s].cores.size() * plan.nics.size());
      const auto nics = static_cast<double>(sites[s].nics.size() * plan.cores.size());
      site_bins_[s].share = sites[s].nics.empty() ? cores : std::min(cores, nics);
      for (size_t i = 0; i < sites[s].cores.size(); i++) site_cores_[s].push_back(core++);
    }
    for (size_t q = 0; q < queue_bins_.size(); q++) queue_bins_[q].share = queue_share[q];
    add_load();
  }

  void put(std::span<const uint32_t> chunks, bool to_one_queue) {
    put_at(least_loaded(site_bins_, all_sites_, bytes_in(chunks)), chunks, to_one_queue);
  }
  // Returns the chunks of `order` that are still to be put, in their order.
  std::vector<uint32_t> send_home(std::span<const uint32_t> order, std::span<const KeySpec> keys,
                                  Homes& homes);

 private:
  void add_load();
  uint64_t bytes_in(std::span<const uint32_t> chunks) const {
    uint64_t bytes = 0;
    for (const uint32_t chunk : chunks) bytes += bytes_of_[chunk];
    return bytes;
  }
  // All to one core of the site; there each by itself, or all to one queue.
  void put_at(uint32_t site, std::span<const uint32_t> chunks, bool to_one_queue);

  const std::vector<Site>& sites_;
  const std::span<const uint64_t> bytes_of_;
  const PlanOptions& options_;
  Plan& plan_;
  std::vector<Bin> site_bins_, core_bins_, queue_bins_;
  std::vector<std::vector<uint32_t>> site_cores_;
  std::vector<uint32_t> all_sites_;
};

// The load of other jobs, in gradients of one rank of this job. A core's load counts for any NIC,
// since jobs over another transport have other NICs.
void Dealer::add_load() {
  const LoadOfCpus of_cpu = load_of_cpus(options_);
  std::map<std::pair<uint32_t, std::string_view>, uint64_t> of_nic;  // by box and name
  for (const PlanLoad& load : options_.load) of_nic[{load.box, load.nic}] += load.bytes;
  const auto bytes = [ranks = options_.ranks](const auto& loads, const auto& of) {
    const auto at = loads.find(of);
    return at == loads.end() ? 0 : (at->second + ranks - 1) / ranks;
  };
  for (size_t s = 0; s < site_cores_.size(); s++) {
    for (const uint32_t c : site_cores_[s]) {
      core_bins_[c].bytes = bytes(of_cpu, std::pair(plan_.cores[c].box, plan_.cores[c].os_cpu));
      site_bins_[s].bytes += core_bins_[c].bytes;
    }
  }
  for (size_t q = 0; q < queue_bins_.size(); q++) {
    const QueuePlan& queue = plan_.queues[q];
    queue_bins_[q].bytes = bytes(of_nic, std::pair(plan_.cores[queue.core].box,
                                                   std::string_view(plan_.nics[queue.nic].name)));
  }
}

void Dealer::put_at(uint32_t site, std::span<const uint32_t> chunks, bool to_one_queue) {
  const uint64_t bytes = bytes_in(chunks);
  const uint32_t k = least_loaded(core_bins_, site_cores_[site], bytes);
  site_bins_[site].bytes += bytes;
  core_bins_[k].bytes += bytes;
  plan_.cores[k].gradient_bytes += bytes;
  uint32_t queue = least_loaded(queue_bins_, plan_.cores[k].queues, bytes);
  for (const uint32_t id : chunks) {
    ChunkLayout& chunk = plan_.chunks[id];
    if (!to_one_queue) queue = least_loaded(queue_bins_, plan_.cores[k].queues, bytes_of_[id]);
    chunk.queue = queue;
    queue_bins_[queue].bytes += bytes_of_[id];
    NicPlan& nic = plan_.nics[plan_.queues[queue].nic];
    nic.gradient_bytes += bytes_of_[id];
    nic.elements += chunk.elements;
    plan_.cores[k].elements += chunk.elements;
  }
}

std::vector<uint32_t> Dealer::send_home(std::span<const uint32_t> order,
                                        std::span<const KeySpec> keys, Homes& homes) {
  std::vector<Bin> boxes(sites_.back().box + size_t{1},
                         {.share = 0});  // with this job's bytes only
  double all = 0, share = 0;
  for (size_t s = 0; s < sites_.size(); ++s) {
    boxes[sites_[s].box].share += site_bins_[s].share;
    share += site_bins_[s].share;
  }
  std::vector<std::pair<const Homes::Home*, uint32_t>> going;
  for (const uint32_t id : order) {
    const ChunkLayout& chunk = plan_.chunks[id];
    all += static_cast<double>(bytes_of_[id]);
    const Homes::Home& home = homes.home_of(ranks_exchanging(chunk, keys[chunk.key]));
    if (!home.places.empty()) going.emplace_back(&home, id);
  }
  std::ranges::stable_sort(going, {}, [](const auto& of) { return of.first->strangers; });
  std::vector<bool> is_home(plan_.chunks.size());
  std::vector<uint32_t> places;  // those whose box has room
  for (const auto& [home, id] : going) {
    const uint64_t bytes = bytes_of_[id];
    places.clear();
    std::ranges::copy_if(home->places, std::back_inserter(places), [&](uint32_t site) {
      const Bin& box = boxes[sites_[site].box];
      const double even = all * box.share / share;
      return static_cast<double>(box.bytes) < even ||
             static_cast<double>(box.bytes + bytes) <= kMostOfEven * even;
    });
    if (places.empty()) continue;
    const uint32_t site = least_loaded(site_bins_, places, bytes);
    boxes[sites_[site].box].bytes += bytes;
    put_at(site, std::span(&id, 1), true);
    is_home[id] = true;
  }
  std::vector<uint32_t> others;
  std::ranges::copy_if(order, std::back_inserter(others),
                       [&](uint32_t id) { return !is_home[id]; });
  return others;
}

// Counts which bytes stay at their ranks' machines.
HomeBytes home_bytes(const std::vector<Site>& sites, std::span<const KeySpec> keys,
                     const Plan& plan, Homes& homes) {
  std::map<uint32_t, uint32_t> site_of_node;
  for (uint32_t s = 0; s < sites.size(); ++s) site_of_node[sites[s].node] = s;
  HomeBytes bytes{.known = true};
  for (const ChunkLayout& chunk : plan.chunks) {
    const uint32_t site = site_of_node[plan.cores[plan.queues[chunk.queue].core].node];
    homes.count(homes.home_of(ranks_exchanging(chunk, keys[chunk.key])), site, chunk.slot_bytes,
                bytes);
  }
  return bytes;
}

}  // namespace

LoadOfCpus load_of_cpus(const PlanOptions& options) {
  LoadOfCpus bytes;
  for (const PlanLoad& load : options.load) bytes[{load.box, load.os_cpu}] += load.bytes;
  return bytes;
}

// Longest processing time first: the largest remaining chunk, or the run that begins with it, goes
// to the site with the least load for its share, there to such a core, there to such a queue. Equal
// chunks go in their order, so that the chunks of one key are spread over the whole box.
void deal(const std::vector<Site>& sites, std::span<const double> queue_share,
          std::span<const KeySpec> keys, const PlanOptions& options, Plan& plan) {
  const std::vector<uint64_t> bytes_of = exchanged_bytes(plan, keys, options.ranks);
  Dealer dealer(sites, queue_share, bytes_of, options, plan);
  if (!options.units.empty()) {
    for (const std::vector<uint32_t>& unit : units_of(options, plan)) dealer.put(unit, false);
    return;
  }
  std::vector<uint32_t> order(plan.chunks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return bytes_of[a] > bytes_of[b]; });
  Homes homes = homes_of(sites, options);
  if (homes.known()) order = dealer.send_home(order, keys, homes);
  const bool no_links = options.shared_memory && sites.front().nics.empty();
  const size_t longest =
      std::clamp<size_t>(order.size() / (plan.cores.size() * kRunsPerCore), 1, kLongestRun);
  const size_t runs_end = no_links ? order.size() - order.size() / kSinglePart : 0;
  for (size_t first = 0, length = 0; first < order.size(); first += length) {
    length = first < runs_end ? run_length(plan, bytes_of, order, first, longest) : 1;
    dealer.put(std::span(order).subspan(first, length), true);
  }
  if (homes.known()) plan.homes = home_bytes(sites, keys, plan, homes);
}

}  // namespace phub
