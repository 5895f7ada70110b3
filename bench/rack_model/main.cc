// rack_model: how long an exchange takes on a cluster that is not here, simulated flow by flow.
#include <fmt/format.h>
#include <fmt/os.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/rack_model/exchange.h"
#include "bench/rack_model/scene.h"
#include "phub/plan/models.h"
#include "phub/text_table.h"
#include "transport/error.h"
#include "transport/text.h"
#include "worker/examples/files.h"
#include "worker/examples/program.h"

namespace phub::rack_model {
namespace {

struct Arguments {
  std::string model, cluster, costs, json;
  JobSpec spec;
  PlanOptions plan;
  SceneOptions scene;
  double uplink_gbit_s = 0;
};

struct Row {
  Scene scene;
  Outcome outcome;
  double took_s = 0;  // to simulate
};

uint32_t boxes_of(const Scene& scene) {
  size_t boxes = 0;
  for (const SceneServer& server : scene.servers) boxes += server.boxes.size();
  return static_cast<uint32_t>(boxes);
}

std::string table_of(const std::vector<Row>& rows) {
  TextTable table(
      {"what", "workers", "boxes", "round", "limit", "busiest", "busy", "flows", "took"});
  for (const Row& row : rows) {
    table.add({row.scene.name, fmt::to_string(row.scene.workers),
               fmt::to_string(boxes_of(row.scene)),
               fmt::format("{:.2f} ms", row.outcome.seconds * 1e3),
               fmt::format("{:.2f} ms", row.scene.limit_s * 1e3), row.outcome.busiest,
               fmt::format("{:.0f}%", row.outcome.busy * 100), fmt::to_string(row.outcome.flows),
               fmt::format("{:.1f} s", row.took_s)});
  }
  return table.text();
}

nlohmann::ordered_json json_of(const Arguments& arguments, const std::vector<Row>& rows) {
  nlohmann::ordered_json out = {{"model", arguments.spec.name},
                                {"optimizer", arguments.spec.optimizer},
                                {"bundle", arguments.scene.bundle}};
  for (const Row& row : rows) {
    out["rows"].push_back({{"what", row.scene.name},
                           {"workers", row.scene.workers},
                           {"boxes", boxes_of(row.scene)},
                           {"racks", arguments.scene.racks},
                           {"seconds", row.outcome.seconds},
                           {"limit_s", row.scene.limit_s},
                           {"busiest", row.outcome.busiest},
                           {"busy", row.outcome.busy},
                           {"flows", row.outcome.flows}});
  }
  return out;
}

void run(Arguments& arguments) {
  KeyTable table = model_or_file(arguments.model);
  arguments.spec.name = std::move(table.name);
  arguments.spec.keys = std::move(table.keys);
  const SlotFormat* format = find_slot_format(arguments.spec.gradient_dtype);
  if (format == nullptr || !format->is_plain()) {
    fail(ErrorCode::kInvalid, "--dtype: '{}' is not f32, bf16 or f16",
         arguments.spec.gradient_dtype);
  }
  arguments.spec.parameter_dtype = arguments.spec.gradient_dtype;
  arguments.spec.chunk_elements = arguments.plan.chunk_elements;
  arguments.plan.gradient_dtype = arguments.spec.gradient_dtype;
  if (arguments.uplink_gbit_s != 0) arguments.scene.uplink_gbit_s = arguments.uplink_gbit_s;
  const Costs costs = arguments.costs.empty() ? Costs{} : load_costs(arguments.costs);
  const Cluster cluster = load_cluster(arguments.cluster);
  std::vector<std::string> left_out;
  std::vector<Row> rows;
  for (Scene& scene :
       make_scenes(cluster, arguments.spec, arguments.plan, arguments.scene, costs, left_out)) {
    const auto begin = std::chrono::steady_clock::now();
    const Outcome outcome = simulate(scene);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    rows.push_back({std::move(scene), outcome, took.count()});
  }
  const std::string text = escaped_lines(table_of(rows));
  std::fwrite(text.data(), 1, text.size(), stdout);
  for (const std::string& line : left_out) fmt::print("  not possible here: {}\n", line);
  examples::write_file(arguments.json, json_of(arguments, rows).dump(2) + "\n");
}

void add_options(CLI::App& app, Arguments& a) {
  app.add_option("model", a.model,
                 fmt::format("{}, or a JSON file of keys", fmt::join(model_names(), ", ")))
      ->required();
  app.add_option("--cluster", a.cluster, "TOML file of hosts, as of phub plan")->required();
  app.add_option("--costs", a.costs, "TOML file of what software costs (default: nothing)");
  app.add_option("--placement", a.scene.placement.placement,
                 fmt::format("all, {}", fmt::join(kPlacements, ", ")))
      ->capture_default_str();
  app.add_option("--ranks", a.scene.placement.ranks,
                 "Workers (default: one on each host of a worker kind)");
  app.add_option("--boxes", a.scene.placement.boxes,
                 "Hosts that serve, of dedicated-sharded (default: all of role box)");
  app.add_option("--racks", a.scene.racks,
                 "Workers are in so many racks; the box, the cluster's last, is beside them");
  app.add_flag("--parent", a.scene.parent, "Each rack has a box, too, which sums for that one");
  app.add_flag("--every-rack", a.scene.every_rack,
               "With --parent: simulate all workers, though their racks are alike");
  app.add_option("--uplink-gbps", a.uplink_gbit_s, "Of each rack, each way (default: no limit)");
  app.add_flag("--shm", a.scene.shared_memory,
               "All workers on one host of the first kind, over shared memory");
  app.add_option("--optimizer", a.spec.optimizer, "As of phub plan")->capture_default_str();
  app.add_option("--dtype", a.spec.gradient_dtype, "f32, bf16 or f16")->capture_default_str();
  app.add_option("--chunk-elements", a.plan.chunk_elements, "Of a chunk")->capture_default_str();
  app.add_option("--bundle", a.scene.bundle,
                 "So many chunks of a queue travel as one: faster to simulate, and coarser")
      ->capture_default_str();
  app.add_flag("--ddio", a.scene.ddio, "NICs access the box's caches instead of its memory");
  app.add_option("--json", a.json, "Also write the rows to this file");
}

void run(int argc, char** argv) {
  CLI::App app("How long an exchange takes on a cluster: simulated flow by flow with SimGrid.");
  Arguments arguments;
  arguments.spec.optimizer = "nesterov";
  add_options(app, arguments);
  examples::parse_or_exit(app, argc, argv);
  examples::check_can_write(arguments.json);
  run(arguments);
}

}  // namespace
}  // namespace phub::rack_model

int main(int argc, char** argv) {
  return phub::examples::status_of("rack_model", [&] { phub::rack_model::run(argc, argv); });
}
