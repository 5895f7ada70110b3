#include "bench/rack_model/scene.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/error.h"
#include "transport/wire.h"

namespace phub::rack_model {
namespace {

struct Inputs {
  const Cluster& cluster;
  const JobSpec& spec;
  const PlanOptions& plan_options;
  const SceneOptions& options;
  const Costs& costs;

  Scene empty(std::string name) const {
    Scene scene{.name = std::move(name), .kinds = cluster.kinds};
    scene.ddio = options.ddio;
    scene.bundle = options.bundle;
    scene.costs = costs;
    return scene;
  }
  LimitInputs rates_of(uint32_t kind) const {
    LimitInputs rates = cluster.kinds[kind].rates;
    rates.ddio = options.ddio;
    return rates;
  }
  Plan plan_of(uint32_t kind, uint32_t ranks) const {
    PlanOptions plan = plan_options;
    plan.ranks = ranks;
    plan.shared_memory = false;
    return make_plan(cluster.kinds[kind].topology, spec.keys, plan);
  }
  JobSpec job(uint32_t ranks) const {
    JobSpec job = spec;
    job.world_size = job.max_ranks = ranks;
    return job;
  }
};

Scene scene_of(const Inputs& inputs, const Placement& placement) {
  Scene scene = inputs.empty(placement.name);
  SceneServer server{.plan = placement.plan, .element = element_traffic(inputs.spec)};
  for (const HostLoad& load : placement.hosts) {
    const auto host = static_cast<uint32_t>(scene.hosts.size());
    scene.hosts.push_back({load.kind, {}});
    if (load.host.box) server.boxes.push_back(host);
    if (load.host.worker) server.workers.push_back(host);
  }
  scene.workers = static_cast<uint32_t>(server.workers.size());
  scene.servers.push_back(std::move(server));
  scene.limit_s = placement.seconds;
  return scene;
}

uint32_t ranks_or(const Inputs& inputs, uint32_t fallback) {
  return inputs.options.placement.ranks > 0 ? inputs.options.placement.ranks : fallback;
}

Scene shared_memory_scene(const Inputs& inputs) {
  const uint32_t ranks = ranks_or(inputs, 1);
  if (ranks > kMaxRanks) {
    fail(ErrorCode::kInvalid, "--ranks is {}; there can be at most {}", ranks, kMaxRanks);
  }
  Scene scene = inputs.empty("shared memory");
  scene.nics = false;
  scene.kinds[0].topology.nics.clear();
  scene.hosts.push_back({0, {}});
  PlanOptions plan = inputs.plan_options;
  plan.ranks = ranks;
  plan.shared_memory = true;
  SceneServer server{.plan = make_plan(scene.kinds[0].topology, inputs.spec.keys, plan),
                     .element = element_traffic(inputs.spec),
                     .boxes = {0}};
  server.workers.assign(ranks, 0);
  scene.workers = ranks;
  LimitInputs rates = inputs.rates_of(0);
  rates.nics = false;
  scene.limit_s = find_limits(server.plan, inputs.job(ranks), rates).seconds;
  scene.servers.push_back(std::move(server));
  return scene;
}

// Hosts of the cluster by role, in the order of the file.
std::vector<uint32_t> kinds_of(const Cluster& cluster, bool box) {
  std::vector<uint32_t> kinds;
  for (uint32_t k = 0; k < cluster.kinds.size(); k++) {
    if (cluster.kinds[k].box == box) kinds.insert(kinds.end(), cluster.kinds[k].count, k);
  }
  return kinds;
}

// The limit of a box whose ranks are hosts with NICs, apart from theirs.
double box_limit(const Inputs& inputs, const Plan& plan, uint32_t kind, uint32_t ranks) {
  return find_limits(plan, {.box = 0}, inputs.job(ranks), inputs.rates_of(kind)).seconds;
}

double worker_limit(const Inputs& inputs, const Plan& plan, uint32_t kind) {
  const numa::Topology& topology = inputs.cluster.kinds[kind].topology;
  const Host host{.worker = true, .nics = static_cast<uint32_t>(topology.nics.size())};
  return find_limits(plan, host, inputs.job(1), inputs.rates_of(kind)).seconds;
}

struct Racks {
  std::vector<uint32_t> workers;  // kind of each
  std::vector<uint32_t> boxes;    // kind of that in each rack
  uint32_t top = 0;               // kind of the box beside the racks
};

Racks find_racks(const Inputs& inputs) {
  const SceneOptions& options = inputs.options;
  Racks racks{.workers = kinds_of(inputs.cluster, false)};
  const uint32_t ranks = ranks_or(inputs, static_cast<uint32_t>(racks.workers.size()));
  if (ranks > racks.workers.size()) {
    fail(ErrorCode::kInvalid, "--ranks is {}, and the cluster has {} hosts for workers", ranks,
         racks.workers.size());
  }
  racks.workers.resize(ranks);
  if (options.racks > ranks) {
    fail(ErrorCode::kInvalid, "--racks is {}, and there are {} workers", options.racks, ranks);
  }
  std::vector<uint32_t> boxes = kinds_of(inputs.cluster, true);
  const uint32_t needed = options.parent ? options.racks + 1 : 1;
  if (boxes.size() < needed) {
    fail(ErrorCode::kInvalid, "{} racks{} need {} hosts of role box, and the cluster has {}",
         options.racks, options.parent ? " below a parent" : "", needed, boxes.size());
  }
  racks.top = boxes.back();
  if (!options.parent) return racks;
  racks.boxes.assign(boxes.begin(), boxes.begin() + options.racks);
  if (std::ranges::count(racks.boxes, racks.boxes.front()) != options.racks) {
    fail(ErrorCode::kInvalid, "the boxes of {} racks must be of one kind", options.racks);
  }
  return racks;
}

// The limit of every host, and of a rack's uplink: of all its workers' bytes, or, below a parent,
// of one stream of sums.
double limit_of(const Inputs& inputs, const Racks& racks, const Scene& scene, uint32_t most) {
  const SceneServer& leaf = scene.servers.back();
  const auto ranks = static_cast<uint32_t>(racks.workers.size());
  double limit = worker_limit(inputs, leaf.plan, racks.workers.front());
  for (const uint32_t kind : racks.workers) {
    limit = std::max(limit, worker_limit(inputs, leaf.plan, kind));
  }
  const bool parent = inputs.options.parent;
  limit = std::max(limit, box_limit(inputs, scene.servers.front().plan, racks.top,
                                    parent ? inputs.options.racks : ranks));
  if (parent) {  // the stream to the root is one rank more
    limit = std::max(limit, box_limit(inputs, leaf.plan, racks.boxes.front(), most + 1));
  }
  if (scene.uplink_gbit_s) {
    const double bytes =
        static_cast<double>(leaf.plan.total_elements) * sizeof(float) * (parent ? 1 : most);
    limit = std::max(limit, bytes * 8 / (*scene.uplink_gbit_s * 1e9));
  }
  return limit;
}

bool are_alike(const Racks& racks, uint32_t count) {
  return racks.workers.size() % count == 0 &&
         std::ranges::count(racks.workers, racks.workers.front()) ==
             static_cast<std::ptrdiff_t>(racks.workers.size());
}

Scene rack_scene(const Inputs& inputs) {
  const SceneOptions& options = inputs.options;
  const Racks racks = find_racks(inputs);
  const auto ranks = static_cast<uint32_t>(racks.workers.size());
  Scene scene = inputs.empty(fmt::format("{} racks, {}", options.racks,
                                         options.parent ? "a box in each below one" : "one box"));
  scene.uplink_gbit_s = options.uplink_gbit_s;
  scene.hosts.push_back({racks.top, {}});
  SceneServer top{.plan = inputs.plan_of(racks.top, options.parent ? options.racks : ranks),
                  .element = element_traffic(inputs.spec),
                  .boxes = {0}};
  const uint32_t most = (ranks + options.racks - 1) / options.racks;
  std::vector<SceneServer> leaves;
  JobSpec sums = inputs.spec;  // a rack sums, and sends and gets f32
  sums.optimizer = "none";
  for (uint32_t r = 0; options.parent && r < options.racks; r++) {
    leaves.push_back({.plan = inputs.plan_of(racks.boxes[r], most),
                      .element = element_traffic(sums),
                      .boxes = {static_cast<uint32_t>(scene.hosts.size())}});
    top.children.push_back(r + 1);
    scene.hosts.push_back({racks.boxes[r], r});
  }
  const bool twins = !options.every_rack && are_alike(racks, options.racks);
  for (uint32_t i = 0; i < ranks; i++) {
    const auto rack = static_cast<uint32_t>(uint64_t{i} * options.racks / ranks);
    if (twins && !leaves.empty() && rack > 0) {
      leaves[rack].twin_of = 1;
      continue;
    }
    std::vector<uint32_t>& workers = leaves.empty() ? top.workers : leaves[rack].workers;
    workers.push_back(static_cast<uint32_t>(scene.hosts.size()));
    scene.hosts.push_back({racks.workers[i], rack});
  }
  scene.workers = ranks;
  scene.servers.push_back(std::move(top));
  for (SceneServer& leaf : leaves) scene.servers.push_back(std::move(leaf));
  scene.limit_s = limit_of(inputs, racks, scene, most);
  return scene;
}

}  // namespace

std::vector<Scene> make_scenes(const Cluster& cluster, const JobSpec& spec,
                               const PlanOptions& plan_options, const SceneOptions& options,
                               const Costs& costs, std::vector<std::string>& left_out) {
  if (options.bundle == 0) fail(ErrorCode::kInvalid, "--bundle is 0");
  if (options.uplink_gbit_s.value_or(1) <= 0) {
    fail(ErrorCode::kInvalid, "--uplink-gbps must be a positive number");
  }
  if (options.racks == 0 && (options.parent || options.uplink_gbit_s)) {
    fail(ErrorCode::kInvalid, "--parent and --uplink-gbps need --racks");
  }
  if (options.parent && spec.gradient_dtype != "f32") {
    fail(ErrorCode::kInvalid,
         "--parent: racks exchange f32 with their parent, and so do workers "
         "in the model; --dtype is {}",
         spec.gradient_dtype);
  }
  const Inputs inputs{cluster, spec, plan_options, options, costs};
  std::vector<Scene> scenes;
  if (options.shared_memory) {
    scenes.push_back(shared_memory_scene(inputs));
  } else if (options.racks > 0) {
    scenes.push_back(rack_scene(inputs));
  } else {
    const Placements placements =
        compare_placements(cluster, spec, plan_options, {.ddio = options.ddio}, options.placement);
    for (const Placement& placement : placements.all) scenes.push_back(scene_of(inputs, placement));
    left_out = placements.left_out;
  }
  return scenes;
}

}  // namespace phub::rack_model
