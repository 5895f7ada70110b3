#include "phub/job/meter.h"

#include <algorithm>

#include "phub/core/index_set.h"

namespace phub {
namespace {

double per_second(uint64_t now, uint64_t before, double seconds) {
  return static_cast<double>(now - before) / seconds;
}

Flow rates_of(Flow flow) {
  flow.chunks = flow.bytes_in = flow.bytes_out = 0;
  return flow;
}

// Keeps only ranks that lack in the oldest round: a rank that lacks in a later one may wait, like
// all others, for the results of the oldest round.
void keep_oldest(Probe& probe) {
  uint64_t oldest = kNever;
  for (const Lack& lack : probe.lacks) oldest = std::min(oldest, lack.round);
  for (size_t r = 0; r < probe.lacks.size(); ++r) {
    if (probe.lacks[r].round != oldest) probe.waited_for[r / 64] &= ~(uint64_t{1} << r % 64);
  }
}

}  // namespace

JobMeter::JobMeter(const Plan& plan, const JobSpec& spec, std::string transport,
                   std::vector<uint32_t> cores, BoxMeters& box, uint64_t now_ms)
    : plan_(plan),
      spec_(spec),
      transport_(std::move(transport)),
      cores_(std::move(cores)),
      box_(box),
      probes_(plan.cores.size()),
      queues_(plan.queues.size()),
      core_endpoints_(plan.cores.size()),
      rate_ms_(now_ms) {
  for (size_t i = 0; i < probes_.size(); ++i) {
    probes_[i].arrivals.resize(spec.max_ranks);
    probes_[i].parts.resize(spec.max_ranks);
    probes_[i].waited_for.resize(bit_words(spec.max_ranks));
    probes_[i].lacks.resize(spec.max_ranks);
    probes_[i].queues.resize(plan.cores[i].queues.size());
  }
}

Probe JobMeter::collect(uint64_t now_ms) {
  Probe all = probes_.front();
  for (size_t i = 1; i < probes_.size(); ++i) {
    const Probe& probe = probes_[i];
    all.min_round = std::min(all.min_round, probe.min_round);
    all.chunks_completed += probe.chunks_completed;
    all.switch_chunks += probe.switch_chunks;
    all.endpoint += probe.endpoint;
    for (size_t r = 0; r < all.arrivals.size(); ++r) {
      all.arrivals[r] += probe.arrivals[r];
      all.parts[r] += probe.parts[r];
      all.lacks[r].add(probe.lacks[r]);
    }
    for (size_t w = 0; w < all.waited_for.size(); ++w) all.waited_for[w] |= probe.waited_for[w];
  }
  keep_oldest(all);
  for (size_t i = 0; i < probes_.size(); ++i) core_endpoints_[i] = probes_[i].endpoint;
  endpoints_ = all.endpoint;
  chunks_completed_ = all.chunks_completed;
  switch_chunks_ = all.switch_chunks;
  lacks_ = all.lacks;
  arrivals_ = all.arrivals;
  count_flow();
  if (now_ms >= rate_ms_ + kRateMs) {
    measure_rates(all.chunks_completed, static_cast<double>(now_ms - rate_ms_) / 1000);
    rate_ms_ = now_ms;
  }
  return all;
}

void JobMeter::count_flow() {
  for (size_t i = 0; i < plan_.cores.size(); ++i) {
    const std::vector<uint32_t>& queues = plan_.cores[i].queues;
    for (size_t k = 0; k < queues.size(); ++k) {
      QueueMeter& meter = queues_[queues[k]];
      const QueueCounters& now = probes_[i].queues[k];
      const Flow more = {.chunks = now.chunks - meter.seen.chunks,
                         .bytes_in = now.bytes_in - meter.seen.bytes_in,
                         .bytes_out = now.bytes_out - meter.seen.bytes_out};
      meter.seen = now;
      meter.flow += more;
      if (i >= cores_.size()) continue;
      box_.cores[cores_[i]].flow += more;
      nic_meter(box_, plan_.queues[queues[k]]).flow += more;
    }
  }
}

// A queue's core and NIC are on one node.
NicMeter& JobMeter::nic_meter(BoxMeters& box, const QueuePlan& queue) const {
  NicMeter& meter = box.nics[{transport_, plan_.nics[queue.nic].name}];
  meter.os_node = plan_.cores[queue.core].os_node;
  return meter;
}

void JobMeter::measure_rates(uint64_t chunks_completed, double seconds) {
  rounds_per_s_ = per_second(chunks_completed, chunks_before_, seconds) /
                  static_cast<double>(plan_.chunks.size());
  chunks_before_ = chunks_completed;
  for (QueueMeter& meter : queues_) {
    const QueueCounters& now = meter.seen;
    const QueueCounters& before = meter.before;
    meter.flow.chunks_per_s = per_second(now.chunks, before.chunks, seconds);
    meter.flow.bytes_in_per_s = per_second(now.bytes_in, before.bytes_in, seconds);
    meter.flow.bytes_out_per_s = per_second(now.bytes_out, before.bytes_out, seconds);
    meter.before = now;
  }
}

void JobMeter::add_rates(BoxMeters& to) const {
  for (size_t q = 0; q < plan_.queues.size(); ++q) {
    if (plan_.queues[q].core >= cores_.size()) continue;
    const Flow rates = rates_of(queues_[q].flow);
    to.cores[cores_[plan_.queues[q].core]].flow += rates;
    nic_meter(to, plan_.queues[q]).flow += rates;
  }
}

void JobMeter::add_to(JobStatus& status) const {
  status.rounds_per_s = rounds_per_s_;
  status.chunks_completed = chunks_completed_;
  status.switch_chunks = switch_chunks_;
  status.transport = transport_;
  status.counters = endpoints_;
  for (size_t i = 0; i < plan_.cores.size(); ++i) {
    JobCoreStatus core{.core = i < cores_.size() ? cores_[i] : static_cast<uint32_t>(i),
                       .box = plan_.cores[i].box,
                       .counters = core_endpoints_[i]};
    for (const uint32_t queue : plan_.cores[i].queues) {
      const Flow& flow = queues_[queue].flow;
      status.flow += flow;
      core.queues.push_back({queue, plan_.nics[plan_.queues[queue].nic].name, flow});
    }
    status.cores.push_back(std::move(core));
  }
  for (RankStatus& rank : status.ranks) {
    if (rank.rank < arrivals_.size()) rank.contributions = arrivals_[rank.rank];
    if (rank.rank >= lacks_.size() || lacks_[rank.rank].chunks == 0) continue;
    const Lack& lack = lacks_[rank.rank];
    rank.waited_chunks = lack.chunks;
    rank.waited_round = lack.round;
    rank.waited_key = spec_.keys[plan_.chunks[lack.chunk].key].name;
  }
}

}  // namespace phub
