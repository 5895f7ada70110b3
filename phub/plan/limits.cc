#include "phub/plan/limits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "transport/error.h"

namespace phub {
namespace {

// Bytes per element of the model.
struct Element {
  double gradient = 4, parameter = 4;
  // Memory traffic of a core per round and element that does not depend on the number of workers.
  double read = 0, written = 0;
};

Element element_of(const JobSpec& spec) {
  const ElementBytes bytes = element_bytes(spec);
  Element element;
  element.gradient = static_cast<double>(bytes.gradient);
  element.parameter = static_cast<double>(bytes.parameter);
  if (!bytes.optimized) {
    element.written = element.parameter;  // streaming stores read no old lines
    return element;
  }
  // f32 parameters and state are read and written back; 16-bit results are written besides.
  element.read = static_cast<double>(sizeof(float) + bytes.state);
  element.written = element.read + (bytes.master > 0 ? element.parameter : 0);
  return element;
}

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

// The part with the most elements. All parts of a kind are equally fast, so it is the slowest.
struct Part {
  std::string where;
  double elements = 0;
  void keep_larger(const std::string& name, double count) {
    if (where.empty() || count > elements) where = name, elements = count;
  }
};

struct Parts {
  Part nic, node, core;
  double all = 0;
};

Parts parts_of(const Plan& plan) {
  Parts parts;
  std::map<uint32_t, double> nodes;  // elements by the system's number
  for (const NicPlan& nic : plan.nics) {
    parts.nic.keep_larger(nic.name, static_cast<double>(nic.elements));
  }
  for (const CorePlan& core : plan.cores) {
    const auto elements = static_cast<double>(core.elements);
    parts.core.keep_larger(fmt::format("CPU {}", core.os_cpu), elements);
    nodes[core.os_node] += elements;
    parts.all += elements;
  }
  for (const auto& [node, elements] : nodes) {
    parts.node.keep_larger(fmt::format("node {}", node), elements);
  }
  return parts;
}

// A node's memory. NICs write gradients and cores read them; cores write results and NICs read them
// once per worker. With DDIO all of that stays in the cache, but for the results that cores write
// back. Over shared memory the workers take the place of the NICs; the time in which they read
// results is not counted.
Limit memory_limit(const Part& part, const Element& element, const LimitInputs& inputs) {
  Limit limit{.resource = "memory", .where = part.where};
  if (!inputs.nics) {
    limit.per_worker.out = element.gradient * part.elements;
  } else if (!inputs.ddio) {
    limit.per_worker.in = element.gradient * part.elements;
    limit.per_worker.out = (element.gradient + element.parameter) * part.elements;
  }
  limit.fixed = {element.written * part.elements, element.read * part.elements};
  limit.bytes_per_s = *inputs.memory_gb_s * 1e9;
  return limit;
}

constexpr double bytes_per_s(double gbit_s) { return gbit_s * 1e9 / 8; }

std::vector<Limit> limits_of(const Parts& parts, const Element& element,
                             const LimitInputs& inputs) {
  const auto exchanged = [&](double elements) {
    return Traffic{element.gradient * elements, element.parameter * elements};
  };
  std::vector<Limit> all;
  if (inputs.nics && inputs.link_gbit_s) {
    all.push_back({"links",
                   parts.nic.where,
                   exchanged(parts.nic.elements),
                   {},
                   bytes_per_s(*inputs.link_gbit_s),
                   true});
  }
  if (inputs.nics && inputs.pcie_gb_s) {
    all.push_back({"PCIe",
                   parts.nic.where,
                   exchanged(parts.nic.elements),
                   {},
                   *inputs.pcie_gb_s * 1e9,
                   true});
  }
  if (inputs.nics && inputs.pcie_node_gb_s) {
    all.push_back({"PCIe of a node",
                   parts.node.where,
                   exchanged(parts.node.elements),
                   {},
                   *inputs.pcie_node_gb_s * 1e9,
                   false});
  }
  if (inputs.memory_gb_s) all.push_back(memory_limit(parts.node, element, inputs));
  if (inputs.core_gb_s) {
    all.push_back({"cores",
                   parts.core.where,
                   {element.gradient * parts.core.elements, 0},
                   {element.read * parts.core.elements, element.written * parts.core.elements},
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

Limits find_limits(const Plan& plan, const JobSpec& spec, const LimitInputs& inputs) {
  check(inputs);
  Limits limits;
  limits.workers = std::max({spec.max_ranks, spec.world_size, 1u});
  limits.all = limits_of(parts_of(plan), element_of(spec), inputs);
  limits.missing = missing_of(inputs);
  const auto workers = static_cast<double>(limits.workers);
  for (size_t i = 0; i < limits.all.size(); i++) {
    const double seconds = limits.all[i].seconds(workers);
    if (seconds > limits.seconds) limits.seconds = seconds, limits.binding = i;
  }
  feed(inputs, limits);
  return limits;
}

}  // namespace phub
