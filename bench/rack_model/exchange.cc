#include "bench/rack_model/exchange.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "bench/rack_model/fabric.h"
#include "bench/rack_model/grid.h"
#include "bench/rack_model/thread.h"
#include "transport/error.h"
#include "worker/examples/processes.h"

namespace phub::rack_model {
namespace {

// Chunks that have the same queue at every level, and follow each other there.
struct UnitPlan : Unit {
  double elements = 0;
  uint32_t queue = 0;      // at the server of the workers
  uint32_t top_queue = 0;  // at the server above it; 0: there is none
};

std::vector<UnitPlan> units_of(const Scene& scene) {
  const Plan& plan = scene.servers.back().plan;
  const Plan* top = scene.servers.size() > 1 ? &scene.servers.front().plan : nullptr;
  std::vector<UnitPlan> units;
  std::map<std::pair<uint32_t, uint32_t>, size_t> open;  // by queues: a unit with room
  for (size_t c = 0; c < plan.chunks.size(); c++) {
    const uint32_t queue = plan.chunks[c].queue;
    const uint32_t top_queue = top != nullptr ? top->chunks[c].queue : 0;
    const auto [at, is_new] = open.try_emplace({queue, top_queue}, units.size());
    if (is_new || units[at->second].chunks == scene.bundle) {
      at->second = units.size();
      units.push_back({{static_cast<uint32_t>(units.size()), 0}, 0, queue, top_queue});
    }
    UnitPlan& unit = units[at->second];
    unit.chunks++;
    unit.elements += plan.chunks[c].elements;
  }
  return units;
}

// A rank as its server sees it.
struct RankEnds {
  std::function<Pipe::End(const UnitPlan&, uint32_t box)> end;  // towards that box
  std::function<void(const UnitPlan&)> result;                  // has arrived
  std::function<uint32_t(const UnitPlan&)> stream;  // what of its side a connection belongs to
  uint32_t host = 0;
};

class Server {
 public:
  Server(Grid& grid, Fabric& fabric, const Scene& scene, const SceneServer& plan,
         const std::vector<UnitPlan>& units, bool above)
      : grid_(grid), fabric_(fabric), scene_(scene), at_(plan), units_(units), above_(above) {
    uint32_t node = 0;
    for (const uint32_t host : at_.boxes) {
      first_node_.push_back(node);
      node += static_cast<uint32_t>(topology(host).nodes.size());
    }
    for (size_t c = 0; c < at_.plan.cores.size(); c++) {
      cores_.push_back(std::make_unique<Core>(grid, fabric.new_cpu()));
      cores_.back()->thread.run(scene.costs.wakeup_us * 1e-6, [] {});
    }
    for (const QueuePlan& queue : at_.plan.queues) nic_of_queue_.push_back(host_nic(queue));
    arrived_.assign(units.size(), 0);
  }

  void add_rank(RankEnds rank) { ranks_.push_back({std::move(rank), {}, {}}); }
  // A server below sends sums up with it, and those of its twins; the answer comes with finish().
  void add_parent(std::function<void(const UnitPlan&)> parent) {
    parents_.push_back(std::move(parent));
  }

  // After all ranks: makes everything that the round will use, as the grid takes no more then.
  void connect() {
    for (const UnitPlan& unit : units_) {
      memory(unit);
      for (Rank& rank : ranks_) pipe(rank, unit, true), pipe(rank, unit, false);
    }
  }

  // A rank sends its part of a unit.
  void send(uint32_t rank, const UnitPlan& unit) {
    Rank& from = ranks_[rank];
    pipe(from, unit, true).post(unit, unit.elements * at_.element.gradient, [this, &unit] {
      arrive(unit);
    });
  }

  // The result is here: it goes to all ranks.
  void finish(const UnitPlan& unit) {
    for (Rank& rank : ranks_) {
      pipe(rank, unit, false).post(unit, unit.elements * at_.element.parameter, [&rank, &unit] {
        rank.ends.result(unit);
      });
    }
  }

  uint32_t queue_of(const UnitPlan& unit) const { return above_ ? unit.top_queue : unit.queue; }
  uint32_t box_of(const UnitPlan& unit) const { return core_plan(unit).box; }
  uint32_t host_of(const UnitPlan& unit) const { return at_.boxes[box_of(unit)]; }
  Pipe::End end(const UnitPlan& unit, uint32_t peer_host) {
    const uint32_t queue = queue_of(unit);
    const uint32_t host = host_of(unit);
    Thread* thread = &cores_[at_.plan.queues[queue].core]->thread;
    if (!scene_.nics) return {thread, 0};
    return {thread, fabric_.nic_port(host, nic_of_queue_[queue], far(host, peer_host))};
  }
  Fabric::MemoryPorts memory(const UnitPlan& unit) {
    const CorePlan& core = core_plan(unit);
    return fabric_.memory_ports(at_.boxes[core.box], core.node - first_node_[core.box]);
  }
  const SceneServer& plan() const { return at_; }

 private:
  struct Rank {
    RankEnds ends;
    std::map<std::pair<uint32_t, uint32_t>, std::unique_ptr<Pipe>> up, down;
  };
  struct Core {
    Core(Grid& grid, CpuId cpu) : thread(grid, cpu) {}
    Thread thread;
    std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> ready;  // units
  };

  const numa::Topology& topology(uint32_t host) const {
    return scene_.kinds[scene_.hosts[host].kind].topology;
  }
  const CorePlan& core_plan(const UnitPlan& unit) const {
    return at_.plan.cores[at_.plan.queues[queue_of(unit)].core];
  }
  bool far(uint32_t a, uint32_t b) const { return scene_.hosts[a].rack != scene_.hosts[b].rack; }

  // The NIC of a queue among those of its host.
  uint32_t host_nic(const QueuePlan& queue) const {
    const auto& nics = topology(at_.boxes[at_.plan.cores[queue.core].box]).nics;
    const auto* at = nics.data();
    const auto* end = at + nics.size();
    const std::string& name = at_.plan.nics[queue.nic].name;
    const auto* found = std::find_if(at, end, [&](const auto& nic) { return nic.name == name; });
    return found == end ? 0 : static_cast<uint32_t>(found - at);
  }

  Pipe& pipe(Rank& rank, const UnitPlan& unit, bool up) {
    const std::pair name(rank.ends.stream(unit), queue_of(unit));
    std::unique_ptr<Pipe>& pipe = (up ? rank.up : rank.down)[name];
    if (pipe != nullptr) return *pipe;
    const uint32_t host = host_of(unit);
    Pipe::End theirs = rank.ends.end(unit, host), ours = end(unit, rank.ends.host);
    Pipe::Weight weight;
    weight.copied = scene_.nics ? 1 : 0;
    weight.carried = scene_.nics ? scene_.costs.framing : 0;
    if (scene_.nics && rank.ends.host == host) {  // memory is read, and written
      const Fabric::MemoryPorts ports = memory(unit);
      theirs.port = ports.from;
      ours.port = ports.to;
      weight.carried = scene_.ddio ? 0 : 2;
    }
    pipe = up ? std::make_unique<Pipe>(grid_, scene_.costs, theirs, ours, weight)
              : std::make_unique<Pipe>(grid_, scene_.costs, ours, theirs, weight);
    return *pipe;
  }

  void arrive(const UnitPlan& unit) {
    if (++arrived_[unit.id] < ranks_.size()) return;
    Core& core = *cores_[at_.plan.queues[queue_of(unit)].core];
    core.ready.push(unit.id);
    // What follows next is decided when it begins: the first in memory that is ready.
    core.thread.run(0, [this, &core] { sum(core); });
  }

  void sum(Core& core) {
    const UnitPlan& unit = units_[core.ready.top()];
    core.ready.pop();
    const ElementTraffic& element = at_.element;
    const double gradients = element.gradient * static_cast<double>(ranks_.size());
    const double update = element.read + element.written;
    const std::optional<double> rate =
        scene_.kinds[scene_.hosts[host_of(unit)].kind].rates.core_gb_s;
    const double compute = rate ? unit.elements * (gradients + update) / (*rate * 1e9) : 0;
    const double moved = unit.elements * (update + (scene_.nics && scene_.ddio ? 0 : gradients));
    core.thread.run(compute + unit.chunks * scene_.costs.sum_chunk_ns * 1e-9, memory(unit), moved,
                    [this, &unit] {
                      for (const auto& parent : parents_) parent(unit);
                      if (parents_.empty()) finish(unit);
                    });
  }

  Grid& grid_;
  Fabric& fabric_;
  const Scene& scene_;
  const SceneServer& at_;
  const std::vector<UnitPlan>& units_;
  const bool above_;
  std::vector<uint32_t> first_node_;  // by box, in the plan's numbers
  std::vector<uint32_t> nic_of_queue_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::deque<Rank> ranks_;
  std::vector<uint32_t> arrived_;
  std::vector<std::function<void(const UnitPlan&)>> parents_;
};

// Which NIC of a worker's host carries which of the server's queues: evenly by bytes. Those of a
// box on the host itself need none.
std::vector<uint32_t> nics_of_queues(const std::vector<UnitPlan>& units, const SceneServer& server,
                                     uint32_t host, uint32_t nics) {
  const size_t queues = server.plan.queues.size();
  std::vector<std::pair<double, uint32_t>> order(queues);
  for (uint32_t q = 0; q < queues; q++) order[q] = {0, q};
  for (const UnitPlan& unit : units) order[unit.queue].first -= unit.elements;
  std::sort(order.begin(), order.end());
  std::vector<double> load(nics, 0);
  std::vector<uint32_t> nic_of(queues, 0);
  for (const auto& [elements, queue] : order) {
    if (server.boxes[server.plan.cores[server.plan.queues[queue].core].box] == host) continue;
    const auto least = std::min_element(load.begin(), load.end());
    nic_of[queue] = static_cast<uint32_t>(least - load.begin());
    *least -= elements;
  }
  return nic_of;
}

class Exchange {
 public:
  explicit Exchange(const Scene& scene)
      : scene_(scene), units_(units_of(scene)), fabric_(grid_, scene) {
    for (const SceneServer& server : scene.servers) {
      servers_.push_back(std::make_unique<Server>(grid_, fabric_, scene, server, units_,
                                                  !server.children.empty()));
    }
    for (size_t s = 0; s < servers_.size(); s++) {
      for (const uint32_t child : scene.servers[s].children) add_child(*servers_[s], child);
      add_workers(*servers_[s], scene.servers[s]);
    }
    for (const auto& server : servers_) server->connect();
  }

  Outcome run() {
    for (const auto& [server, rank] : workers_) {
      for (const UnitPlan& unit : units_) server->send(rank, unit);
    }
    grid_.run();
    Outcome outcome{.seconds = last_, .flows = grid_.flows()};
    const double levels = scene_.servers.size() > 1 ? 2 : 1;
    outcome.seconds += (scene_.costs.wakeup_us + 2 * levels * scene_.costs.latency_us) * 1e-6;
    for (const LinkUse& link : grid_.links()) {
      const double busy = link.bytes / link.bytes_per_s / outcome.seconds;
      if (busy > outcome.busy) outcome.busy = busy, outcome.busiest = link.name;
    }
    PHUB_CHECK(results_ == workers_.size() * units_.size());
    return outcome;
  }

 private:
  void add_child(Server& parent, uint32_t child_index) {
    Server* child = servers_[child_index].get();
    const uint32_t host = child->plan().boxes.front();
    const auto rank = children_++;
    const uint32_t sums_of = child->plan().twin_of.value_or(child_index);
    servers_[sums_of]->add_parent(
        [&parent, rank](const UnitPlan& unit) { parent.send(rank, unit); });
    parent.add_rank(
        {.end = [child, &parent](const UnitPlan& unit,
                                 uint32_t) { return child->end(unit, parent.host_of(unit)); },
         .result = [child](const UnitPlan& unit) { child->finish(unit); },
         .stream = [](const UnitPlan& unit) { return unit.queue; },
         .host = host});
  }

  void add_workers(Server& server, const SceneServer& plan) {
    uint32_t rank = 0;
    for (const uint32_t host : plan.workers) {
      threads_.push_back(std::make_unique<Thread>(grid_, fabric_.new_cpu()));
      Thread* thread = threads_.back().get();
      const numa::Topology& topology = scene_.kinds[scene_.hosts[host].kind].topology;
      const auto nics =
          nics_of_queues(units_, plan, host, std::max<uint32_t>(1, topology.nics.size()));
      server.add_rank(
          {.end =
               [this, thread, host, nics](const UnitPlan& unit, uint32_t box_host) {
                 if (!scene_.nics) return Pipe::End{thread, 0};
                 const bool far = scene_.hosts[host].rack != scene_.hosts[box_host].rack;
                 return Pipe::End{thread, fabric_.nic_port(host, nics[unit.queue], far)};
               },
           .result = [this](const UnitPlan&) { last_ = grid_.now(), ++results_; },
           .stream = [](const UnitPlan&) { return 0; },
           .host = host});
      workers_.push_back({&server, rank++});
    }
  }

  const Scene& scene_;
  const std::vector<UnitPlan> units_;
  Grid grid_;
  Fabric fabric_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::unique_ptr<Thread>> threads_;  // of workers
  std::vector<std::pair<Server*, uint32_t>> workers_;
  uint32_t children_ = 0;
  uint64_t results_ = 0;
  double last_ = 0;
};

// What a child process hands back.
struct Report {
  double seconds = 0, busy = 0;
  uint64_t flows = 0;
  std::array<char, 128> busiest = {};
};

}  // namespace

Outcome simulate(const Scene& scene) {
  void* memory =
      mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail(ErrorCode::kFull, "mmap of a page: out of memory");
  const std::unique_ptr<void, void (*)(void*)> unmap(memory,
                                                     [](void* m) { munmap(m, sizeof(Report)); });
  auto* report = new (memory) Report;
  Child child(
      [&] {
        const Outcome outcome = Exchange(scene).run();
        report->seconds = outcome.seconds, report->busy = outcome.busy;
        report->flows = outcome.flows;
        outcome.busiest.copy(report->busiest.data(), report->busiest.size() - 1);
        return 0;
      },
      SIGKILL);
  child.wait(-1);
  if (!child.ended()->empty()) {
    fail(ErrorCode::kInternal, "the simulation of '{}' ended: {}", scene.name, *child.ended());
  }
  return {report->seconds, report->flows, report->busiest.data(), report->busy};
}

}  // namespace phub::rack_model
