#include "phub/plan/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

using Kinds = std::vector<uint32_t>;  // a kind for each host

uint32_t nodes_with_nics(const numa::Topology& topology) {
  std::set<uint32_t> nodes;
  for (const numa::NicInfo& nic : topology.nics) nodes.insert(nic.node);
  return static_cast<uint32_t>(nodes.size());
}

// Everything that is the same for all placements.
struct Comparison {
  const Cluster& cluster;
  JobSpec spec;
  PlanOptions plan_options;
  LimitInputs inputs;
  Kinds workers, boxes;  // the workers that take part; all hosts that only serve

  LimitInputs inputs_of(uint32_t kind) const {
    LimitInputs of_kind = cluster.kinds[kind].rates;
    if (!of_kind.images_per_s) of_kind.images_per_s = inputs.images_per_s;
    of_kind.batch = inputs.batch;
    of_kind.ddio = inputs.ddio;
    return of_kind;
  }

  HostLoad load_of(const Plan& plan, uint32_t kind, std::optional<uint32_t> box,
                   bool worker) const {
    const numa::Topology& topology = cluster.kinds[kind].topology;
    HostLoad load{.kind = kind};
    load.host = {.box = box,
                 .worker = worker,
                 .nics = static_cast<uint32_t>(topology.nics.size()),
                 .nodes = nodes_with_nics(topology)};
    const Limits limits = find_limits(plan, load.host, spec, inputs_of(kind));
    load.bytes = nic_traffic(plan, load.host, spec);
    load.seconds = limits.seconds;
    load.resource = limits.all[limits.binding].resource;
    load.where = limits.all[limits.binding].where;
    return load;
  }

  // `serving` are the boxes; with `colocated` they are the first of `of_workers`, too.
  Placement place(std::string_view name, const Kinds& serving, const Kinds& of_workers,
                  bool colocated) const {
    numa::Topology topology{.source = std::string(name)};
    for (uint32_t box = 0; box < serving.size(); box++) {
      numa::append(cluster.kinds[serving[box]].topology, box, 0, topology);
    }
    Plan plan = make_plan(topology, spec.keys, plan_options);
    if (plan.chunks.size() < serving.size()) {
      fail(ErrorCode::kInvalid, "{}: the model has {} chunks, and there are {} boxes", name,
           plan.chunks.size(), serving.size());
    }
    Placement placement{.name = std::string(name)};
    placement.boxes = static_cast<uint32_t>(serving.size());
    placement.dedicated = colocated ? 0 : placement.boxes;
    for (uint32_t box = 0; box < serving.size(); box++) {
      placement.hosts.push_back(load_of(plan, serving[box], box, colocated));
    }
    for (size_t i = colocated ? serving.size() : 0; i < of_workers.size(); i++) {
      placement.hosts.push_back(load_of(plan, of_workers[i], std::nullopt, true));
    }
    const auto weight = [](const HostLoad& load) {
      return std::pair(load.seconds, load.bytes.in + load.bytes.out);
    };
    for (size_t i = 1; i < placement.hosts.size(); i++) {
      if (weight(placement.hosts[i]) > weight(placement.hosts[placement.busiest])) {
        placement.busiest = i;
      }
    }
    placement.seconds = placement.hosts[placement.busiest].seconds;
    placement.images = images_of(placement);
    placement.plan = std::move(plan);
    return placement;
  }

  // In lock-step all workers are as fast as the slowest.
  std::optional<double> images_of(const Placement& placement) const {
    if (!inputs.batch) return std::nullopt;
    double seconds = placement.seconds;
    for (const uint32_t kind : workers) {
      const std::optional<double> rate = inputs_of(kind).images_per_s;
      if (!rate) return std::nullopt;
      seconds = std::max(seconds, *inputs.batch / *rate);
    }
    return static_cast<double>(workers.size()) * *inputs.batch / seconds;
  }

  // One box: that of the fastest kind.
  Placement central(std::string_view name, bool colocated) const {
    const Kinds& candidates = colocated ? workers : boxes;
    std::optional<Placement> best;
    std::set<uint32_t> seen;
    for (size_t i = 0; i < candidates.size(); i++) {
      if (!seen.insert(candidates[i]).second) continue;
      Kinds order = workers;
      if (colocated) std::rotate(order.begin(), order.begin() + static_cast<long>(i), order.end());
      Placement placement = place(name, {candidates[i]}, order, colocated);
      if (!best || placement.seconds < best->seconds) best = std::move(placement);
    }
    return *best;
  }
};

// Why the cluster does not allow the placement; "": it does.
std::string obstacle(std::string_view name, const Comparison& comparison) {
  const size_t boxes = comparison.boxes.size();
  if (name == "dedicated-central" && boxes == 0) return "the cluster has no host of role box";
  if (name == "dedicated-sharded" && boxes < 2) {
    return fmt::format("it needs 2 hosts of role box, and there {} {}", boxes == 1 ? "is" : "are",
                       boxes);
  }
  if (name == "colocated-sharded" && comparison.workers.size() < 2) return "it needs 2 workers";
  return "";
}

Placement placed(std::string_view name, const Comparison& comparison, uint32_t boxes) {
  if (name == "dedicated-sharded") {
    const Kinds serving(comparison.boxes.begin(), comparison.boxes.begin() + boxes);
    return comparison.place(name, serving, comparison.workers, false);
  }
  if (name == "colocated-sharded") {
    return comparison.place(name, comparison.workers, comparison.workers, true);
  }
  return comparison.central(name, name == "colocated-central");
}

// The time of a round that counts: computing hides what is shorter.
double round_of(const Placement& placement, const Comparison& comparison) {
  if (!placement.images) return placement.seconds;
  return static_cast<double>(comparison.workers.size()) * *comparison.inputs.batch /
         *placement.images;
}

// The fastest; of those that are at most a hundredth slower the one with the fewest hosts that only
// serve, then with the fewest boxes.
void recommend(const Comparison& comparison, Placements& placements) {
  constexpr double kAsFast = 1.01;
  const auto round = [&](const Placement& p) { return round_of(p, comparison); };
  double fastest = round(placements.all.front());
  for (const Placement& p : placements.all) fastest = std::min(fastest, round(p));
  const Placement* best = nullptr;
  const Placement* next = nullptr;  // the fastest of the others
  const auto cost = [](const Placement& p) { return std::pair(p.dedicated, p.boxes); };
  for (const Placement& p : placements.all) {
    if (round(p) > fastest * kAsFast) continue;
    if (best == nullptr || cost(p) < cost(*best)) best = &p;
  }
  for (const Placement& p : placements.all) {
    if (&p != best && (next == nullptr || round(p) < round(*next))) next = &p;
  }
  placements.recommended = static_cast<size_t>(best - placements.all.data());
  const HostLoad& busiest = best->hosts[best->busiest];
  const bool hidden = round(*best) > best->seconds;
  placements.reason = fmt::format(
      "{}: {}", best->name,
      hidden ? std::string("computing takes longer than its exchange")
             : fmt::format("its round is limited by {} of a host '{}'", busiest.resource,
                           comparison.cluster.kinds[busiest.kind].name));
  if (next == nullptr) {
    placements.reason += ", and it is the only one that was compared.";
  } else if (round(*next) > round(*best) * kAsFast) {
    placements.reason += fmt::format(", and {}, the next, takes {:.2f} times as long.", next->name,
                                     round(*next) / round(*best));
  } else {
    placements.reason += fmt::format(
        ", and no other that is as fast (as {} is) needs fewer hosts that only serve.", next->name);
  }
}

}  // namespace

Placements compare_placements(const Cluster& cluster, const JobSpec& spec,
                              const PlanOptions& plan_options, const LimitInputs& inputs,
                              const PlacementOptions& options) {
  Comparison comparison{cluster, spec, plan_options, inputs, {}, {}};
  for (uint32_t k = 0; k < cluster.kinds.size(); k++) {
    const HostKind& kind = cluster.kinds[k];
    Kinds& hosts = kind.box ? comparison.boxes : comparison.workers;
    hosts.insert(hosts.end(), kind.count, k);
  }
  const auto boxes = static_cast<uint32_t>(comparison.boxes.size());
  const auto hosts = static_cast<uint32_t>(comparison.workers.size());
  if (options.ranks > hosts) {
    fail(ErrorCode::kInvalid, "--ranks is {}, and the cluster has {} hosts for workers",
         options.ranks, hosts);
  }
  if (options.boxes > boxes) {
    fail(ErrorCode::kInvalid, "--boxes is {}, and the cluster has {} hosts of role box",
         options.boxes, boxes);
  }
  const bool all = options.placement == "all";
  if (!all && std::ranges::count(kPlacements, options.placement) == 0) {
    fail(ErrorCode::kInvalid, "--placement must be one of all, {}, got '{}'",
         fmt::join(kPlacements, ", "), printable(options.placement));
  }
  if (options.ranks > 0) comparison.workers.resize(options.ranks);
  Placements placements{.ranks = static_cast<uint32_t>(comparison.workers.size())};
  comparison.spec.world_size = comparison.spec.max_ranks = placements.ranks;
  comparison.plan_options.ranks = placements.ranks;
  comparison.plan_options.shared_memory = false;
  comparison.plan_options.gradient_dtype = spec.gradient_dtype;
  for (const std::string_view name : kPlacements) {
    if (!all && name != options.placement) continue;
    const std::string why = obstacle(name, comparison);
    if (why.empty()) {
      placements.all.push_back(placed(name, comparison, options.boxes > 0 ? options.boxes : boxes));
    } else if (all) {
      placements.left_out.push_back(fmt::format("{}: {}", name, why));
    } else {
      fail(ErrorCode::kInvalid, "--placement {}: {}", name, why);
    }
  }
  recommend(comparison, placements);
  return placements;
}

}  // namespace phub
