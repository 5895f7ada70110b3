// The comparison of placements as text and as JSON.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "phub/plan/placement.h"
#include "phub/text_table.h"

namespace phub {

std::string describe(const Placements& placements, const Cluster& cluster) {
  std::string text = fmt::format("Placements for {} {}\n", placements.ranks,
                                 placements.ranks == 1 ? "worker" : "workers");
  TextTable table({"placement", "boxes", "busiest host", "in/round", "out/round", "limited by",
                   "time/round", "rounds/s", "images/s"});
  const auto megabytes = [](double bytes) { return fmt::format("{:.2f} MB", bytes / 1e6); };
  for (const Placement& p : placements.all) {
    const HostLoad& busiest = p.hosts[p.busiest];
    table.add({p.name, fmt::to_string(p.boxes), cluster.kinds[busiest.kind].name,
               megabytes(busiest.bytes.in), megabytes(busiest.bytes.out),
               fmt::format("{} ({})", busiest.resource, busiest.where),
               fmt::format("{:.2f} ms", p.seconds * 1e3), fmt::format("{:.4g}", 1 / p.seconds),
               p.images ? fmt::format("{:.4g}", *p.images) : "?"});
  }
  text += table.text();
  for (const std::string& line : placements.left_out) text += fmt::format("  left out: {}\n", line);
  for (const HostKind& kind : cluster.kinds) {
    for (const numa::Note& note : kind.topology.notes) {
      text += fmt::format("  {}: {}\n", kind.name, note.what);
    }
  }
  return text + fmt::format("  recommended: {}\n", placements.reason);
}

std::string to_json(const Placements& placements, const Cluster& cluster) {
  using Json = nlohmann::ordered_json;
  Json out;
  out["ranks"] = placements.ranks;
  out["placements"] = Json::array();
  for (const Placement& p : placements.all) {
    Json hosts = Json::array();
    for (const HostLoad& load : p.hosts) {
      hosts.push_back({{"kind", cluster.kinds[load.kind].name},
                       {"serves", load.host.box.has_value()},
                       {"worker", load.host.worker},
                       {"in_bytes", load.bytes.in},
                       {"out_bytes", load.bytes.out},
                       {"seconds", load.seconds},
                       {"resource", load.resource},
                       {"worst", load.where}});
    }
    out["placements"].push_back({{"placement", p.name},
                                 {"boxes", p.boxes},
                                 {"busiest", p.busiest},
                                 {"seconds", p.seconds},
                                 {"rounds_per_s", 1 / p.seconds},
                                 {"images_per_s", p.images ? Json(*p.images) : Json(nullptr)},
                                 {"hosts", std::move(hosts)}});
  }
  out["left_out"] = placements.left_out;
  for (const HostKind& kind : cluster.kinds) {
    for (const numa::Note& note : kind.topology.notes) {
      out["notes"].push_back({{"kind", kind.name}, {"what", note.what}, {"todo", note.todo}});
    }
  }
  out["recommended"] = placements.all[placements.recommended].name;
  out["reason"] = placements.reason;
  return out.dump(2);
}

}  // namespace phub
