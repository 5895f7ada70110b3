#include "phub/plan/limits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "phub/job_rules.h"
#include "transport/error.h"
#include "transport/format_schedule.h"

namespace phub {

namespace {

// Of a chunk of the key: the fewest chunks that a matrix can have if that is not decided.
uint64_t most_elements_of(const KeySpec& key, uint32_t chunk_elements) {
  if (!has_tiles(key)) return chunk_elements;
  if (key.tile_rows > 0) return key.tile_rows * key.shape[1];
  return tile_rows_for(key, 1, chunk_elements) * key.shape[1];
}

// The mean over all keys, whose chunks take bytes(key, elements).
template <typename Bytes>
double bytes_per_element(const JobSpec& spec, Bytes bytes) {
  double all = 0, elements = 0;
  for (const KeySpec& key : spec.keys) {
    const uint64_t most = most_elements_of(key, spec.chunk_elements);
    for (uint64_t chunk : {key.elements / most * most, key.elements % most}) {
      if (chunk == 0) continue;
      const uint64_t chunks = std::max<uint64_t>(chunk / most, 1);
      all += static_cast<double>(chunks) * static_cast<double>(bytes(key, chunk / chunks));
    }
    elements += static_cast<double>(key.elements);
  }
  return elements > 0 ? all / elements : static_cast<double>(bytes({}, 1));
}

}  // namespace

ElementTraffic element_traffic(const JobSpec& spec) {
  const ElementBytes bytes = element_bytes(spec);
  ElementTraffic element;
  element.gradient = bytes_per_element(spec, [&spec](const KeySpec& key, uint64_t elements) {
    const std::string& format = gradient_format(spec, key);
    // As in the rounds of the largest one.
    if (is_schedule(format)) return FormatSchedule::parse("format", format).slot().bytes(elements);
    if (!is_compact(key)) return kernels::slot_bytes(gradient_dtype(spec, key), elements);
    const auto columns = static_cast<uint32_t>(key.shape[1]);
    if (is_factors(key)) return factor_format(key.rank_limit, columns).bytes(elements);
    // As if all rows that a rank may send in a round were spread evenly over the chunks.
    const uint64_t share = (uint64_t{key.rows_limit} * elements + key.elements - 1) / key.elements;
    return row_format(static_cast<uint32_t>(share), columns).bytes(elements);
  });
  const SlotFormat* difference = difference_format(spec);
  element.parameter = bytes_per_element(spec, [&](const KeySpec&, uint64_t elements) {
    return difference ? difference->bytes(elements) : bytes.parameter * elements;
  });
  if (!bytes.optimized) {
    element.written = element.parameter;  // streaming stores read no old lines
    return element;
  }
  // f32 parameters and state are read and written back; 16-bit results are written besides.
  element.read = static_cast<double>(sizeof(float) + bytes.state);
  element.written = element.read + (bytes.master > 0 ? element.parameter : 0);
  if (difference) {  // from the view, which they are added to
    element.read += sizeof(float);
    element.written += sizeof(float);
  }
  return element;
}

namespace {

void check(std::optional<double> value, const char* option) {
  if (value && !(*value > 0 && std::isfinite(*value))) {
    fail(ErrorCode::kInvalid, "{} is {}; it must be a positive number", option, *value);
  }
}

void check(const LimitInputs& inputs) {
  check(inputs.link_gbit_s, "--link-gbps");
  check(inputs.pcie_gb_s, "--pcie-gbps");
  check(inputs.pcie_node_gb_s, "--pcie-node-gbps");
  check(inputs.memory_gb_s, "--memory-gbps");
  check(inputs.core_gb_s, "--core-gbps");
  check(inputs.worker_link_gbit_s, "--worker-link-gbps");
  check(inputs.images_per_s, "--images-per-s");
  check(inputs.batch, "--batch");
}

std::vector<std::string> missing_of(const LimitInputs& inputs) {
  std::vector<std::string> missing;
  if (inputs.nics) {
    if (!inputs.link_gbit_s) missing.emplace_back("--link-gbps (Gbit/s of a NIC, each way)");
    if (!inputs.pcie_gb_s) missing.emplace_back("--pcie-gbps (GB/s of a NIC, each way)");
    if (!inputs.pcie_node_gb_s) {
      missing.emplace_back(
          "--pcie-node-gbps (GB/s between the NICs of a node and memory, both ways)");
    }
    if (!inputs.worker_link_gbit_s) {
      missing.emplace_back("--worker-link-gbps (Gbit/s of a worker, each way)");
    }
  }
  if (!inputs.memory_gb_s) missing.emplace_back("--memory-gbps (GB/s of a node)");
  if (!inputs.core_gb_s) missing.emplace_back("--core-gbps (GB/s of a core)");
  if (!inputs.images_per_s) missing.emplace_back("--images-per-s (of a worker that never waits)");
  if (!inputs.batch) missing.emplace_back("--batch (images of a worker per round)");
  return missing;
}

// What crosses a part of a host in a round, in elements of the model.
struct Share {
  double served = 0;   // of the chunks that it serves: gradients in and parameters out per worker
  double own = 0;      // of those, what a worker on the host exchanges without its NICs
  double carried = 0;  // of what that worker exchanges with other boxes
};

// The part with the most bytes. All parts of a kind are equally fast, so it is the slowest.
struct Part {
  std::string where;
  Share share;
  void keep_larger(const std::string& name, const Share& other) {
    if (where.empty() || other.served > share.served) where = name, share = other;
  }
};

struct Parts {
  Part nic, node, core;
  double all = 0;     // elements of the model
  double served = 0;  // by these boxes
};

// Of one host, or, without one, of all boxes of the plan.
Parts parts_of(const Plan& plan, const Host* host) {
  Parts parts;
  const auto is_here = [&](const CorePlan& core) {
    return host == nullptr || host->box == core.box;
  };
  const double own = host != nullptr && host->worker ? 1 : 0;
  std::map<uint32_t, std::pair<double, uint32_t>> nodes;  // elements, the system's number
  for (const CorePlan& core : plan.cores) {
    const auto elements = static_cast<double>(core.elements);
    parts.all += elements;
    if (!is_here(core)) continue;
    parts.served += elements;
    parts.core.keep_larger(fmt::format("CPU {}", core.os_cpu), {elements, elements * own, 0});
    nodes[core.node].first += elements;
    nodes[core.node].second = core.os_node;
  }
  const double carried = (parts.all - parts.served) * own;
  const double by_nic = host != nullptr ? carried / host->nics : 0;
  const double by_node = host != nullptr ? carried / host->nodes : 0;
  for (const QueuePlan& queue : plan.queues) {
    if (!is_here(plan.cores[queue.core])) continue;
    const NicPlan& nic = plan.nics[queue.nic];
    const auto elements = static_cast<double>(nic.elements);
    parts.nic.keep_larger(nic.name, {elements, elements * own, by_nic});
  }
  for (const auto& [node, load] : nodes) {
    parts.node.keep_larger(fmt::format("node {}", load.second),
                           {load.first, load.first * own, by_node});
  }
  if (nodes.empty()) {  // only the worker
    parts.nic.keep_larger("any NIC", {0, 0, by_nic});
    parts.node.keep_larger("any node", {0, 0, by_node});
  }
  return parts;
}

// What NICs carry: each worker's gradients in and parameters out, but for a worker on the host,
// which has it the other way round with other boxes.
struct Exchange {
  Traffic per_worker, fixed;
};
Exchange exchanged(const Share& share, const ElementTraffic& element) {
  return {{element.gradient * share.served, element.parameter * share.served},
          {element.parameter * share.carried - element.gradient * share.own,
           element.gradient * share.carried - element.parameter * share.own}};
}

// A node's memory. NICs write gradients and cores read them; cores write results and NICs read them
// once per worker. With DDIO all of that stays in the cache, but for the results that cores write
// back. Over shared memory the workers take the place of the NICs; the time in which they read
// results is not counted. From a worker's memory gradients are read, and parameters written there;
// this includes what it exchanges with its own host.
Limit memory_limit(const Part& part, const ElementTraffic& element, const LimitInputs& inputs) {
  Limit limit{.resource = "memory", .where = part.where};
  const Share& share = part.share;
  limit.fixed = {element.written * share.served, element.read * share.served};
  if (!inputs.nics) {
    limit.per_worker.out = element.gradient * share.served;
  } else if (!inputs.ddio) {
    limit.per_worker.in = element.gradient * share.served;
    limit.per_worker.out = (element.gradient + element.parameter) * share.served;
    limit.fixed.in += element.parameter * (share.carried + share.own);
    limit.fixed.out += element.gradient * (share.carried + share.own);
  }
  limit.bytes_per_s = *inputs.memory_gb_s * 1e9;
  return limit;
}

constexpr double bytes_per_s(double gbit_s) { return gbit_s * 1e9 / 8; }

std::vector<Limit> limits_of(const Parts& parts, const ElementTraffic& element,
                             const LimitInputs& inputs) {
  std::vector<Limit> all;
  const auto add_nics = [&](const char* resource, const Part& part, double rate, bool duplex) {
    const Exchange bytes = exchanged(part.share, element);
    all.push_back({resource, part.where, bytes.per_worker, bytes.fixed, rate, duplex});
  };
  if (inputs.nics && inputs.link_gbit_s) {
    add_nics("links", parts.nic, bytes_per_s(*inputs.link_gbit_s), true);
  }
  if (inputs.nics && inputs.pcie_gb_s) add_nics("PCIe", parts.nic, *inputs.pcie_gb_s * 1e9, true);
  if (inputs.nics && inputs.pcie_node_gb_s) {
    add_nics("PCIe of a node", parts.node, *inputs.pcie_node_gb_s * 1e9, false);
  }
  if (inputs.memory_gb_s) all.push_back(memory_limit(parts.node, element, inputs));
  if (inputs.core_gb_s && !parts.core.where.empty()) {
    const double elements = parts.core.share.served;
    all.push_back({"cores",
                   parts.core.where,
                   {element.gradient * elements, 0},
                   {element.read * elements, element.written * elements},
                   *inputs.core_gb_s * 1e9,
                   false});
  }
  if (inputs.nics && inputs.worker_link_gbit_s) {  // a worker sends gradients, receives parameters
    all.push_back({"worker links",
                   "a worker",
                   {},
                   {element.parameter * parts.all, element.gradient * parts.all},
                   bytes_per_s(*inputs.worker_link_gbit_s),
                   true});
  }
  return all;
}

// How many workers the slowest resource feeds.
void feed(const LimitInputs& inputs, Limits& limits) {
  if (!inputs.images_per_s || !inputs.batch) return;
  limits.wanted_seconds = *inputs.batch / *inputs.images_per_s;
  for (size_t i = 0; i < limits.all.size(); i++) {
    const std::optional<uint64_t> fed = limits.all[i].workers_within(*limits.wanted_seconds);
    if (!fed || (limits.workers_fed && *fed >= *limits.workers_fed)) continue;
    limits.workers_fed = fed;
    limits.feeding_binds = i;
  }
  if (limits.all.empty()) return;
  limits.images_per_worker = std::min(*inputs.images_per_s, *inputs.batch / limits.seconds);
}

}  // namespace

Traffic Limit::bytes(double workers) const {
  return {per_worker.in * workers + fixed.in, per_worker.out * workers + fixed.out};
}

double Limit::seconds(double workers) const {
  const Traffic all = bytes(workers);
  return (duplex ? std::max(all.in, all.out) : all.in + all.out) / bytes_per_s;
}

std::optional<uint64_t> Limit::workers_within(double seconds) const {
  const double room = seconds * bytes_per_s;
  double most = std::numeric_limits<double>::infinity();
  const auto bound = [&](double each, double once) {
    if (once > room) most = 0;
    if (each > 0) most = std::min(most, std::max(0.0, (room - once) / each));
  };
  if (duplex) {
    bound(per_worker.in, fixed.in);
    bound(per_worker.out, fixed.out);
  } else {
    bound(per_worker.in + per_worker.out, fixed.in + fixed.out);
  }
  if (std::isinf(most)) return std::nullopt;
  // A round that takes exactly `seconds` is in time; the factor absorbs rounding errors.
  constexpr double kRounding = 1e-12, kMost = 1e18;
  return static_cast<uint64_t>(std::min(most * (1 + kRounding), kMost));
}

namespace {

Limits find_limits_of(const Plan& plan, const Host* host, const JobSpec& spec,
                      const LimitInputs& inputs) {
  check(inputs);
  Limits limits;
  limits.workers = ranks_of(spec);
  limits.all = limits_of(parts_of(plan, host), element_traffic(spec), inputs);
  limits.missing = missing_of(inputs);
  const auto workers = static_cast<double>(limits.workers);
  for (size_t i = 0; i < limits.all.size(); i++) {
    const double seconds = limits.all[i].seconds(workers);
    if (seconds > limits.seconds) limits.seconds = seconds, limits.binding = i;
  }
  feed(inputs, limits);
  return limits;
}

}  // namespace

Limits find_limits(const Plan& plan, const JobSpec& spec, const LimitInputs& inputs) {
  return find_limits_of(plan, nullptr, spec, inputs);
}

Limits find_limits(const Plan& plan, const Host& host, const JobSpec& spec,
                   const LimitInputs& inputs) {
  LimitInputs of_host = inputs;
  of_host.worker_link_gbit_s.reset();  // the worker's bytes are on the host's own links
  return find_limits_of(plan, &host, spec, of_host);
}

Traffic nic_traffic(const Plan& plan, const Host& host, const JobSpec& spec) {
  const Parts parts = parts_of(plan, &host);
  const double own = host.worker ? parts.served : 0;
  const double carried = host.worker ? parts.all - parts.served : 0;
  const Exchange bytes = exchanged({parts.served, own, carried}, element_traffic(spec));
  const auto workers = static_cast<double>(ranks_of(spec));
  return {bytes.per_worker.in * workers + bytes.fixed.in,
          bytes.per_worker.out * workers + bytes.fixed.out};
}

}  // namespace phub
