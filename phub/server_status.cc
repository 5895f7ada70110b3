// Server: what it tells about itself, and where those numbers come from.
#include <algorithm>
#include <utility>

#include "phub/server.h"

namespace phub {
namespace {

constexpr uint64_t kRateMs = 1000;

double per_second(uint64_t now, uint64_t before, double seconds) {
  return static_cast<double>(now - before) / seconds;
}

Flow rates_of(Flow flow) {
  flow.chunks = flow.bytes_in = flow.bytes_out = 0;
  return flow;
}

}  // namespace

// After every core answered a probe.
void Server::collect_probes(Running& running) {
  Probe all = running.probes.front();
  for (size_t i = 1; i < running.probes.size(); ++i) {
    const Probe& probe = running.probes[i];
    all.min_round = std::min(all.min_round, probe.min_round);
    all.chunks_completed += probe.chunks_completed;
    all.endpoint += probe.endpoint;
    for (size_t r = 0; r < all.arrivals.size(); ++r) {
      all.arrivals[r] += probe.arrivals[r];
      all.lacks[r].add(probe.lacks[r]);
    }
    for (size_t w = 0; w < all.waited_for.size(); ++w) all.waited_for[w] |= probe.waited_for[w];
  }
  for (size_t i = 0; i < running.probes.size(); ++i) {
    running.core_counters[i] = running.probes[i].endpoint;
  }
  running.counters = all.endpoint;
  running.chunks_so_far = all.chunks_completed;
  running.lacks = std::move(all.lacks);
  running.job->membership().probed(all.min_round, all.arrivals, all.waited_for, time_.now_ms());
  count_flow(running);
  const uint64_t now = clock_.now_ms();
  if (now >= running.rate_ms + kRateMs) {
    const double seconds = static_cast<double>(now - running.rate_ms) / 1000;
    running.rounds_per_s = per_second(all.chunks_completed, running.chunks_completed, seconds) /
                           static_cast<double>(running.job->plan().chunks.size());
    running.chunks_completed = all.chunks_completed;
    take_rates(running, seconds);
    running.rate_ms = now;
  }
}

// Adds what the queues of a job did since the last probe to the totals of its cores and NICs, which
// outlive the job.
void Server::count_flow(Running& running) {
  const Plan& plan = running.job->plan();
  const ElementBytes bytes = element_bytes(running.job->spec());
  core_meters_.resize(cores());
  for (size_t i = 0; i < plan.cores.size(); ++i) {
    const std::vector<uint32_t>& queues = plan.cores[i].queues;
    for (size_t k = 0; k < queues.size(); ++k) {
      QueueMeter& meter = running.queues[queues[k]];
      const QueueCounters& now = running.probes[i].queues[k];
      const Flow more = {
          .chunks = now.chunks - meter.seen.chunks,
          .bytes_in = (now.elements_in - meter.seen.elements_in) * bytes.gradient,
          .bytes_out = (now.elements_out - meter.seen.elements_out) * bytes.parameter};
      meter.seen = now;
      meter.flow += more;
      core_meters_[running.cores[i]].flow += more;
      const NicPlan& nic = plan.nics[plan.queues[queues[k]].nic];
      NicMeter& nic_meter = nic_meters_[{running.transport, nic.name}];
      nic_meter.os_node = options_.topology.nodes[nic.node].os_node;
      nic_meter.flow += more;
    }
  }
}

void Server::take_rates(Running& running, double seconds) {
  const ElementBytes bytes = element_bytes(running.job->spec());
  for (QueueMeter& meter : running.queues) {
    const QueueCounters& now = meter.seen;
    const QueueCounters& before = meter.before;
    meter.flow.chunks_per_s = per_second(now.chunks, before.chunks, seconds);
    meter.flow.bytes_in_per_s = per_second(now.elements_in, before.elements_in, seconds) *
                                static_cast<double>(bytes.gradient);
    meter.flow.bytes_out_per_s = per_second(now.elements_out, before.elements_out, seconds) *
                                 static_cast<double>(bytes.parameter);
    meter.before = now;
  }
}

void Server::sample_cores(uint64_t now) {
  if (now < sampled_ms_ + kRateMs) return;
  const double ns = static_cast<double>(now - sampled_ms_) * 1e6;
  core_meters_.resize(cores());
  for (uint32_t i = 0; i < cores(); ++i) {
    CoreMeter& meter = core_meters_[i];
    const uint64_t asleep_ns = cores_[i]->usage().asleep_ns;
    const double asleep = static_cast<double>(asleep_ns - meter.asleep_ns) / ns;
    meter.awake = sampled_ms_ == 0 ? 0 : std::clamp(1 - asleep, 0.0, 1.0);
    meter.asleep_ns = asleep_ns;
  }
  sampled_ms_ = now;
}

ServerStatus Server::status() {
  ServerStatus status;
  status.topology = options_.topology.source;
  for (const auto& nic : nics_) {
    status.transports.emplace_back(nic->name());
    status.nics.push_back(nic->describe());
  }
  status.cores = cores();
  status.memory_bytes = memory_used_;
  status.memory_limit_bytes = options_.memory_limit_bytes;
  status.uptime_s = static_cast<double>(clock_.now_ms() - started_ms_) / 1000;
  for (const auto& [name, running] : jobs_) status.jobs.push_back(status_of(*running));
  status.nodes = status_of_nodes();
  return status;
}

JobStatus Server::job_status(const std::string& job) {
  const Running* running = find(job);
  if (!running) fail(ErrorCode::kNotFound, "there is no job '{}'", job);
  return status_of(*running);
}

// The nodes that have a core or a NIC in use. Totals are of all jobs so far, rates of those that
// are there.
std::vector<NodeStatus> Server::status_of_nodes() const {
  std::vector<CoreMeter> core_meters = core_meters_;
  core_meters.resize(cores());
  std::map<NicName, NicMeter> nic_meters = nic_meters_;
  for (const auto& nic : nics_) {
    for (const NicPort& port : nic->ports()) {
      nic_meters.try_emplace({std::string(nic->name()), port.name}, NicMeter{port.os_node, {}});
    }
  }
  for (const auto& [name, running] : jobs_) {
    const Plan& plan = running->job->plan();
    for (size_t q = 0; q < plan.queues.size(); ++q) {
      const QueuePlan& queue = plan.queues[q];
      const Flow rates = rates_of(running->queues[q].flow);
      core_meters[running->cores[queue.core]].flow += rates;
      nic_meters[{running->transport, plan.nics[queue.nic].name}].flow += rates;
    }
  }
  std::vector<NodeStatus> nodes;
  for (uint32_t n = 0; n < topology_.nodes.size(); ++n) {
    NodeStatus node{.node = topology_.nodes[n].os_node,
                    .memory_bytes = topology_.nodes[n].memory_bytes};
    for (uint32_t i = 0; i < cores(); ++i) {
      if (topology_.cores[i].node != n) continue;
      const CoreUsage usage = cores_[i]->usage();
      CoreStatus core{.core = i,
                      .cpu = core_cpus_[i],
                      .busy_passes = usage.busy_passes,
                      .idle_passes = usage.idle_passes,
                      .sleeps = usage.sleeps,
                      .asleep_s = static_cast<double>(usage.asleep_ns) * 1e-9,
                      .awake = core_meters[i].awake,
                      .flow = core_meters[i].flow};
      node.cores.push_back(core);
    }
    for (const auto& [name, meter] : nic_meters) {
      if (meter.os_node != node.node) continue;
      node.nics.push_back({.name = name.second, .transport = name.first, .flow = meter.flow});
    }
    if (!node.cores.empty() || !node.nics.empty()) nodes.push_back(std::move(node));
  }
  return nodes;
}

JobStatus Server::status_of(const Running& running) const {
  Job& job = *running.job;
  const Plan& plan = job.plan();
  const Membership& membership = job.membership();
  JobStatus status;
  status.name = job.spec().name;
  status.state = membership.state();
  status.error = running.error;
  status.optimizer = job.spec().optimizer;
  status.keys = job.spec().keys.size();
  status.chunks = plan.chunks.size();
  for (const KeySpec& key : job.spec().keys) status.elements += key.elements;
  status.memory_bytes = job.memory().total() + running.grown_bytes;
  status.completed_round = membership.completed_round();
  status.rounds_per_s = running.rounds_per_s;
  status.chunks_completed = running.chunks_so_far;
  status.transport = running.transport;
  status.counters = running.counters;
  for (size_t i = 0; i < plan.cores.size(); ++i) {
    JobCoreStatus core{.core = running.cores[i], .counters = running.core_counters[i]};
    for (const uint32_t queue : plan.cores[i].queues) {
      const Flow& flow = running.queues[queue].flow;
      status.flow += flow;
      core.queues.push_back({queue, plan.nics[plan.queues[queue].nic].name, flow});
    }
    status.cores.push_back(std::move(core));
  }
  status.max_ranks = job.spec().max_ranks;
  status.ranks = membership.ranks();
  std::erase_if(status.ranks, [](const RankStatus& rank) { return rank.state == "absent"; });
  status.missing = membership.missing();
  status.waiting_for = membership.waiting_for();
  for (RankStatus& rank : status.ranks) {
    if (rank.rank >= running.lacks.size() || running.lacks[rank.rank].chunks == 0) continue;
    const Lack& lack = running.lacks[rank.rank];
    rank.waited_chunks = lack.chunks;
    rank.waited_round = lack.round;
    rank.waited_key = job.spec().keys[plan.chunks[lack.chunk].key].name;
  }
  return status;
}

}  // namespace phub
