#include "bench/rack_model/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <simgrid/s4u.hpp>

#include "transport/error.h"

namespace phub::rack_model {
namespace {

namespace sg = simgrid::s4u;

constexpr double kFlopsPerS = 1e9;

// What runs, and what follows it.
struct Running {
  sg::ActivityPtr activity;
  Grid::Then then;
};

}  // namespace

struct Grid::Engine {
  Engine(int* argc, char** argv) : engine(argc, argv) {}

  sg::Engine engine;
  sg::NetZone* zone = nullptr;
  std::vector<sg::Link*> links;
  struct Port {
    sg::Host* host = nullptr;
    std::vector<LinkId> out, in;
  };
  std::vector<Port> ports;
  std::vector<sg::Host*> cpus;
  std::deque<Then> soon;
  uint64_t going_on = 0;
  sg::ActivityPtr ended;  // SimGrid still uses it when it says that it has ended

  void start(sg::ActivityPtr activity, Then then) {
    auto* running = new Running{activity, std::move(then)};  // until it has ended
    activity->set_data(running);
    ++going_on;
    activity->start();
  }
};

Grid::Grid() {
  static char name[] = "rack_model", quiet[] = "--log=root.thres:error";
  static char* arguments[] = {name, quiet, nullptr};
  PHUB_CHECK(!sg::Engine::has_instance());
  int count = 2;
  engine_ = std::make_unique<Engine>(&count, arguments);
  // Plain max-min sharing: no slow start, no limit by round trips, no share of the other direction.
  sg::Engine::set_config("network/model:CM02");
  sg::Engine::set_config("network/TCP-gamma:0");
  sg::Engine::set_config("network/crosstraffic:0");
  engine_->zone = sg::create_star_zone("rack");
  sg::Activity::on_completion_cb([this](const sg::Activity& activity) {
    const std::unique_ptr<Running> running(activity.get_data<Running>());
    engine_->ended = std::move(running->activity);
    --engine_->going_on;
    running->then();
    drain();
  });
}

Grid::~Grid() = default;

LinkId Grid::add_link(std::string name, double bytes_per_s) {
  auto* link = engine_->zone->create_link(fmt::format("{} ({})", name, links_.size()), bytes_per_s);
  link->set_latency(0)->set_sharing_policy(sg::Link::SharingPolicy::SHARED);
  engine_->links.push_back(link->seal());
  links_.push_back({std::move(name), bytes_per_s, 0});
  return static_cast<LinkId>(links_.size() - 1);
}

PortId Grid::add_port(const std::vector<LinkId>& out, const std::vector<LinkId>& in) {
  const auto id = static_cast<PortId>(engine_->ports.size());
  auto* host = engine_->zone->create_host(fmt::format("port {}", id), kFlopsPerS)->seal();
  const auto links_of = [&](const std::vector<LinkId>& ids) {
    std::vector<sg::LinkInRoute> links;
    for (const LinkId link : ids) links.emplace_back(engine_->links[link]);
    return links;
  };
  engine_->zone->add_route(host->get_netpoint(), nullptr, nullptr, nullptr, links_of(out), false);
  engine_->zone->add_route(nullptr, host->get_netpoint(), nullptr, nullptr, links_of(in), false);
  engine_->ports.push_back({host, out, in});
  return id;
}

CpuId Grid::add_cpu(uint32_t cores) {
  const auto id = static_cast<CpuId>(engine_->cpus.size());
  auto* host = engine_->zone->create_host(fmt::format("cpu {}", id), kFlopsPerS);
  host->set_core_count(static_cast<int>(cores));
  engine_->cpus.push_back(host->seal());
  return id;
}

void Grid::flow(PortId from, PortId to, double bytes, Then then) {
  const Engine::Port &source = engine_->ports[from], &target = engine_->ports[to];
  if (bytes <= 0 || (source.out.empty() && target.in.empty())) return soon(std::move(then));
  for (const LinkId link : source.out) links_[link].bytes += bytes;
  for (const LinkId link : target.in) {
    if (std::ranges::count(source.out, link) == 0) links_[link].bytes += bytes;
  }
  ++flows_;
  const sg::CommPtr comm = sg::Comm::sendto_init(source.host, target.host);
  comm->set_payload_size(static_cast<uint64_t>(std::llround(bytes)));
  engine_->start(comm, std::move(then));
}

void Grid::work(CpuId cpu, double seconds, Then then) {
  if (seconds <= 0) return soon(std::move(then));
  const sg::ExecPtr exec = sg::Exec::init();
  exec->set_flops_amount(seconds * kFlopsPerS)->set_host(engine_->cpus[cpu]);
  engine_->start(exec, std::move(then));
}

void Grid::soon(Then then) { engine_->soon.push_back(std::move(then)); }

void Grid::drain() {
  while (!engine_->soon.empty()) {
    const Then then = std::move(engine_->soon.front());
    engine_->soon.pop_front();
    then();
  }
}

double Grid::now() const { return sg::Engine::get_clock(); }

void Grid::run() {
  engine_->zone->seal();
  drain();
  if (engine_->going_on > 0) engine_->engine.run();
  PHUB_CHECK(engine_->going_on == 0);
}

}  // namespace phub::rack_model
