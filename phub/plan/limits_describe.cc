// The limits of a box as text and as JSON.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "phub/plan/limits.h"
#include "phub/text_table.h"
#include "transport/wire.h"

namespace phub {
namespace {

std::string duration(double seconds) {
  if (seconds >= 1) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} us", seconds * 1e6);
}

// In powers of 1000, as bandwidths are given.
std::string decimal(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.2f} GB", bytes / 1e9);
  return fmt::format("{:.2f} MB", bytes / 1e6);
}

std::string fed(const std::optional<uint64_t>& workers) {
  return workers ? fmt::to_string(*workers) : "any";
}

std::string inputs_of(const LimitInputs& inputs) {
  std::string text;
  const auto add = [&](const char* name, const std::optional<double>& value, const char* unit) {
    if (value) text += fmt::format("    {:<14} {:>10.6g} {}\n", name, *value, unit);
  };
  if (inputs.nics) {
    add("link", inputs.link_gbit_s, "Gbit/s of a NIC, each way");
    add("PCIe", inputs.pcie_gb_s, "GB/s of a NIC, each way");
    add("PCIe of a node", inputs.pcie_node_gb_s, "GB/s of all its NICs, both ways together");
    add("worker link", inputs.worker_link_gbit_s, "Gbit/s of a worker, each way");
  }
  add("memory", inputs.memory_gb_s, "GB/s of a node, reads and writes together");
  if (inputs.core_gb_s) {
    add("core", inputs.core_gb_s,
        inputs.core_gb_s == kMeasuredCoreGbS ? kMeasuredCore : "GB/s of a core, reads and writes");
  }
  add("images/s", inputs.images_per_s, "of a worker that never waits");
  add("batch", inputs.batch, "images of a worker per round");
  return text;
}

std::string assumptions_of(const LimitInputs& inputs) {
  std::string text =
      "  assumed\n"
      "    every resource works all the time, each on other chunks; computing hides exchanging\n"
      "    gradients and parameters alone count: no headers, no signals, no\n    retransmission, "
      "and over tcp none of the kernel's copies\n";
  if (!inputs.nics) {
    text +=
        "    shared memory: cores read the workers' gradients in place; what workers do with\n"
        "    the results is their own time\n";
  } else if (inputs.ddio) {
    text +=
        "    DDIO at its best: NICs write gradients to the cache and read results there; memory\n"
        "    sees only what the optimizer reads and writes\n";
  } else {
    text +=
        "    no DDIO: NICs write gradients to memory and read results there once per worker\n"
        "    (--ddio for the other end of the range)\n";
  }
  text += "    cores and nodes have no other work; the sum of a chunk stays in the core's cache\n";
  return text;
}

std::string answer(const Limits& limits, const LimitInputs& inputs) {
  const Limit& slowest = limits.all[limits.binding];
  std::string text = fmt::format(
      "  {} {}: at most {:.4g} rounds/s{}; {} ({}) {} first\n", limits.workers,
      limits.workers == 1 ? "worker" : "workers", 1 / limits.seconds,
      limits.images_per_worker ? fmt::format(", {:.4g} images/s each", *limits.images_per_worker)
                               : "",
      slowest.resource, slowest.where, slowest.resource.ends_with('s') ? "bind" : "binds");
  if (!limits.wanted_seconds) return text;
  text += fmt::format("  {:.6g} images/s each in batches of {:.6g} is a round every {}: feeds {}",
                      *inputs.images_per_s, *inputs.batch, duration(*limits.wanted_seconds),
                      limits.workers_fed ? fmt::format("at most {}", *limits.workers_fed)
                                         : "any number of workers");
  if (limits.workers_fed) {
    const Limit& limit = limits.all[*limits.feeding_binds];
    text +=
        fmt::format(" {} ({})", *limits.workers_fed == 1 ? "worker" : "workers", limit.resource);
    if (*limits.workers_fed > kMaxRanks) {
      text += fmt::format("; a job takes at most {}", kMaxRanks);
    }
  }
  return text + '\n';
}

}  // namespace

std::string describe(const Limits& limits, const LimitInputs& inputs) {
  std::string text = fmt::format("Limits of the hardware\n  inputs\n{}", inputs_of(inputs));
  if (limits.all.empty()) {
    text += "  unknown: no rate was given for any resource\n";
  } else {
    TextTable table({"resource", "worst", "in/round", "out/round", "GB/s", "counts", "time/round",
                     "rounds/s", "feeds"});
    const auto workers = static_cast<double>(limits.workers);
    for (const Limit& limit : limits.all) {
      const Traffic bytes = limit.bytes(workers);
      const double seconds = limit.seconds(workers);
      table.add({limit.resource, limit.where, decimal(bytes.in), decimal(bytes.out),
                 fmt::format("{:.4g}", limit.bytes_per_s / 1e9), limit.duplex ? "larger" : "sum",
                 duration(seconds), fmt::format("{:.4g}", 1 / seconds),
                 limits.wanted_seconds ? fed(limit.workers_within(*limits.wanted_seconds)) : "?"});
    }
    text += table.text() + answer(limits, inputs);
  }
  if (!limits.missing.empty()) {
    text += "  not given, so not a limit here\n";
    for (const std::string& option : limits.missing) text += fmt::format("    {}\n", option);
  }
  if (!inputs.nics) text += "  no NICs: links and PCIe carry nothing (--nics N to plan for N)\n";
  return text + assumptions_of(inputs);
}

std::string to_json(const Limits& limits, const LimitInputs& inputs) {
  using Json = nlohmann::ordered_json;
  const auto maybe = [](const auto& value) { return value ? Json(*value) : Json(nullptr); };
  Json out;
  out["inputs"] = {{"link_gbit_s", maybe(inputs.link_gbit_s)},
                   {"pcie_gb_s", maybe(inputs.pcie_gb_s)},
                   {"pcie_node_gb_s", maybe(inputs.pcie_node_gb_s)},
                   {"memory_gb_s", maybe(inputs.memory_gb_s)},
                   {"core_gb_s", maybe(inputs.core_gb_s)},
                   {"worker_link_gbit_s", maybe(inputs.worker_link_gbit_s)},
                   {"images_per_s", maybe(inputs.images_per_s)},
                   {"batch", maybe(inputs.batch)},
                   {"nics", inputs.nics},
                   {"ddio", inputs.ddio}};
  out["workers"] = limits.workers;
  out["resources"] = Json::array();
  const auto workers = static_cast<double>(limits.workers);
  for (const Limit& limit : limits.all) {
    const Traffic bytes = limit.bytes(workers);
    Json entry = {{"resource", limit.resource},
                  {"worst", limit.where},
                  {"in_bytes", bytes.in},
                  {"out_bytes", bytes.out},
                  {"bytes_per_s", limit.bytes_per_s},
                  {"each_way", limit.duplex},
                  {"seconds", limit.seconds(workers)}};
    if (limits.wanted_seconds) entry["feeds"] = maybe(limit.workers_within(*limits.wanted_seconds));
    out["resources"].push_back(std::move(entry));
  }
  if (!limits.all.empty()) {
    out["binding"] = limits.all[limits.binding].resource;
    out["rounds_per_s"] = 1 / limits.seconds;
  }
  if (limits.wanted_seconds) {
    out["wanted_seconds"] = *limits.wanted_seconds;
    out["workers_fed"] = maybe(limits.workers_fed);
    if (limits.feeding_binds) out["feeding_binds"] = limits.all[*limits.feeding_binds].resource;
    out["images_per_s_each"] = maybe(limits.images_per_worker);
  }
  out["missing"] = limits.missing;
  return out.dump();
}

}  // namespace phub
