#include "phub/plan/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>

#include "kernels/kernels.h"
#include "phub/commands/commands.h"
#include "phub/job/memory.h"
#include "phub/job_rules.h"
#include "phub/plan/limits.h"
#include "phub/plan/matrix_exchange_describe.h"
#include "phub/plan/models.h"
#include "phub/plan/overlap.h"
#include "phub/plan/placement.h"
#include "phub/text_table.h"
#include "transport/control/choices.h"
#include "transport/control/rules.h"
#include "transport/error.h"
#include "transport/text.h"

namespace phub {
namespace {

struct PlanArguments {
  std::string model;
  std::string topology = "this";
  std::optional<uint32_t> nics;  // nothing: those of the topology
  PlanOptions options;
  JobSpec spec;
  std::string state_dtype = "f32";
  std::string parameter_dtype;  // empty: that of the gradients
  bool checkpoints = false;
  bool gated = false;
  LimitInputs limits;
  uint64_t samples = 0;  // 0: ways of matrices are not compared
  double product_gflop_s = ExchangeInputs().product_gflop_s;
  double box_product_gflop_s = ExchangeInputs().box_product_gflop_s;
  std::string computing;  // of layers; empty: it hides nothing
  std::string cluster;    // a file; empty: one box is planned, no placements are compared
  PlacementOptions placement;
  bool ranks_given = false;
  std::vector<uint32_t> rank_boxes;  // empty: one box is planned
  bool json = false;
};

// Whether any limit was given, so that limits are printed.
bool any(const LimitInputs& inputs) {
  return inputs.link_gbit_s || inputs.pcie_gb_s || inputs.pcie_node_gb_s || inputs.memory_gb_s ||
         inputs.core_gb_s || inputs.worker_link_gbit_s || inputs.images_per_s || inputs.batch;
}

numa::Topology load_topology(const std::string& from) {
  try {
    return numa::find_topology(from);
  } catch (const std::runtime_error& error) {
    throw Error(ErrorCode::kInvalid, fmt::format("--topology: {}", error.what()));
  }
}

// " (no NIC on node 1)": the nodes whose cores a plan over NICs cannot use; "" if there are none.
std::string without_nic(const numa::Topology& topology) {
  if (topology.nics.empty()) return "";
  std::set<uint32_t> nodes;
  for (const numa::Core& core : topology.cores) nodes.insert(topology.nodes[core.node].os_node);
  for (const numa::NicInfo& nic : topology.nics) nodes.erase(topology.nodes[nic.node].os_node);
  if (nodes.empty()) return "";
  return fmt::format(" (no NIC on node{} {})", nodes.size() == 1 ? "" : "s",
                     fmt::join(nodes, ", "));
}

// Lists NICs and cores that the plan does not use, with the reason; "" if there are none.
std::string left_out(const numa::Topology& topology, const Plan& plan) {
  std::set<uint32_t> nodes;
  for (const CorePlan& core : plan.cores) nodes.insert(core.node);
  std::string nics;
  for (const numa::NicInfo& nic : topology.nics) {
    if (!nodes.contains(nic.node)) nics += " " + nic.name;
  }
  std::string text;
  if (!nics.empty()) text += fmt::format("  not used:{} (no core in use on the node)\n", nics);
  if (plan.cores.size() < topology.cores.size()) {
    text += fmt::format("  not used: {} of {} cores{}\n", topology.cores.size() - plan.cores.size(),
                        topology.cores.size(), without_nic(topology));
  }
  if (topology.nics.empty()) {
    text += "  no NICs: planned for shared memory, one queue per core (--nics N to plan for N)\n";
  }
  return text;
}

// As many boxes as the ranks sit at, each like this one.
numa::Topology boxes_like(const numa::Topology& one, const std::vector<uint32_t>& rank_boxes) {
  numa::Topology all;
  for (uint32_t box = 1; box <= std::max(std::ranges::max(rank_boxes), 1u); ++box) {
    numa::Topology of_box = one;
    for (numa::NicInfo& nic : of_box.nics) nic.name = fmt::format("box{}:{}", box, nic.name);
    numa::append(of_box, box - 1, box, all);
  }
  all.source = "each box " + one.source;
  all.notes = one.notes;
  return all;
}

// A line for each node that has less memory than the plan needs there.
std::string too_small(const numa::Topology& topology, const Plan& plan, const JobSpec& spec,
                      bool checkpoints) {
  constexpr double kGiB = 1ull << 30;
  std::string text;
  for (const NodeMemory& needed : memory_needed(plan, spec, checkpoints)) {
    for (const numa::Node& node : topology.nodes) {
      if (node.os_node != needed.os_node || node.memory_bytes >= needed.total()) continue;
      text += fmt::format("  does not fit: node {} has {:.2f} GiB and needs {:.2f} GiB\n",
                          node.os_node, static_cast<double>(node.memory_bytes) / kGiB,
                          static_cast<double>(needed.total()) / kGiB);
    }
  }
  return text;
}

nlohmann::ordered_json to_json(const numa::Topology& topology, const Plan& plan,
                               const JobSpec& spec, bool checkpoints) {
  nlohmann::ordered_json out;
  out["model"] = spec.name;
  out["topology"] = topology.source;
  out["notes"] = nlohmann::ordered_json::array();
  for (const numa::Note& note : topology.notes) {
    out["notes"].push_back({{"what", note.what}, {"todo", note.todo}});
  }
  out["ranks"] = spec.max_ranks;
  out["optimizer"] = spec.optimizer;
  out["state_dtype"] = spec.state_dtype.word();
  out["gradient_dtype"] = spec.gradient_dtype;
  out["parameter_dtype"] = spec.parameter_dtype;
  out["keys"] = spec.keys.size();
  out["chunks"] = plan.chunks.size();
  out["total_elements"] = plan.total_elements;
  out["nic_imbalance"] = nic_imbalance(plan);
  out["core_imbalance"] = core_imbalance(plan);
  for (const NicPlan& nic : plan.nics) {
    out["nics"].push_back({{"name", nic.name},
                           {"os_node", topology.nodes[nic.node].os_node},
                           {"elements", nic.elements}});
  }
  for (const CorePlan& core : plan.cores) {
    out["cores"].push_back({{"os_cpu", core.os_cpu},
                            {"os_node", core.os_node},
                            {"elements", core.elements},
                            {"queues", core.queues}});
  }
  for (size_t q = 0; q < plan.queues.size(); q++) {
    out["queues"].push_back({{"core", plan.queues[q].core},
                             {"nic", plan.queues[q].nic},
                             {"chunks", plan.queue_chunks[q].size()}});
  }
  const std::vector<Plan> boxes = parts_of(plan);
  for (size_t box = 0; box < boxes.size(); ++box) {
    for (const NodeMemory& memory : memory_needed(boxes[box], spec, checkpoints)) {
      out["memory"].push_back({{"box", box + 1},
                               {"os_node", memory.os_node},
                               {"gradient_slots", memory.slots},
                               {"parameters", memory.parameters},
                               {"master", memory.master},
                               {"optimizer_state", memory.state},
                               {"gated_sums", memory.sums},
                               {"snapshot", memory.snapshot},
                               {"bookkeeping", memory.bookkeeping},
                               {"total", memory.total()}});
    }
  }
  if (const HomeBytes& homes = plan.homes; homes.known) {
    out["homes"] = {{"stays", homes.stays},
                    {"shared", homes.shared},
                    {"for_balance", homes.for_balance},
                    {"without_box", homes.without_box}};
  }
  return out;
}

ExchangeInputs exchange_inputs_of(const PlanArguments& arguments, const numa::Topology& topology,
                                  const Plan& plan, const JobSpec& spec) {
  const ElementTraffic traffic = element_traffic(spec);
  const LimitInputs& limits = arguments.limits;
  if (!limits.link_gbit_s || !limits.worker_link_gbit_s || topology.nics.empty()) {
    fail(ErrorCode::kInvalid,
         "--samples compares times on links: it needs --link-gbps, --worker-link-gbps, and NICs "
         "(--nics)");
  }
  return {.ranks = arguments.options.ranks,
          .samples = arguments.samples,
          .worker_gbit_s = *limits.worker_link_gbit_s,
          .box_gbit_s = *limits.link_gbit_s * static_cast<double>(topology.nics.size()),
          .product_gflop_s = arguments.product_gflop_s,
          .box_cores = static_cast<uint32_t>(plan.cores.size()),
          .box_product_gflop_s = arguments.box_product_gflop_s,
          .gradient_bytes = traffic.gradient,
          .result_bytes = traffic.parameter,
          .to_ranks = spec.optimizer == "none" && spec.parameter_dtype == "f32"};
}

nlohmann::ordered_json to_json(const Exchanges& exchanges, const JobSpec& spec,
                               const ExchangeInputs& inputs,
                               std::span<const LayerComputing> layers) {
  nlohmann::ordered_json out;
  out["samples"] = inputs.samples;
  out["whole_seconds"] = exchanges.all_whole.seconds(inputs);
  out["chosen_seconds"] = exchanges.chosen.seconds(inputs);
  out["matrices"] = nlohmann::ordered_json::array();
  for (const MatrixCosts& matrix : exchanges.matrices) {
    out["matrices"].push_back({{"key", spec.keys[matrix.key].name},
                               {"rows", matrix.rows},
                               {"columns", matrix.columns},
                               {"whole_seconds", matrix.whole.seconds(inputs)},
                               {"way", name_of(matrix.exchange)}});
    auto& of_matrix = out["matrices"].back();
    if (matrix.box) {
      of_matrix["box_seconds"] = matrix.box->seconds(inputs);
      of_matrix["box_product_seconds"] = matrix.box->box_product_s;
    }
    if (inputs.to_ranks) {
      of_matrix["ranks_seconds"] = matrix.ranks.seconds(inputs);
      of_matrix["ranks_product_seconds"] = matrix.ranks.product_s;
    }
  }
  if (layers.empty()) return out;
  out["computing_seconds"] = computing_seconds(layers);
  for (const bool overlaps : {false, true}) {
    const std::string which = overlaps ? "overlapped_iteration_seconds" : "iteration_seconds";
    out["whole_" + which] = iteration_seconds(layers, exchanges.whole_of_layer, inputs, overlaps);
    out["chosen_" + which] = iteration_seconds(layers, exchanges.chosen_of_layer, inputs, overlaps);
  }
  return out;
}

void compare(PlanArguments& arguments) {
  if (arguments.ranks_given) {
    if (arguments.options.ranks == 0) fail(ErrorCode::kInvalid, "--ranks is 0");
    arguments.placement.ranks = arguments.options.ranks;
  }
  if (arguments.limits.images_per_s.value_or(1) <= 0 || arguments.limits.batch.value_or(1) <= 0) {
    fail(ErrorCode::kInvalid, "--images-per-s and --batch must be positive numbers");
  }
  const Cluster cluster = load_cluster(arguments.cluster);
  const Placements placements = compare_placements(cluster, arguments.spec, arguments.options,
                                                   arguments.limits, arguments.placement);
  const std::string text = arguments.json ? to_json(placements, cluster) + "\n"
                                          : escaped_lines(describe(placements, cluster));
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void run(PlanArguments arguments) {
  JobSpec& spec = arguments.spec;
  KeyTable table = model_or_file(arguments.model);
  spec.name = std::move(table.name);
  spec.keys = std::move(table.keys);
  spec.world_size = spec.max_ranks = arguments.options.ranks;
  spec.chunk_elements = arguments.options.chunk_elements;
  arguments.options.gradient_dtype = spec.gradient_dtype;
  spec.parameter_dtype = arguments.parameter_dtype.empty() ? gradient_memory_format(spec, {})
                                                           : arguments.parameter_dtype;
  spec.state_dtype = arguments.state_dtype;
  if (arguments.gated) spec.on_nonfinite = OnNonFinite::kSkip;
  for (const KeySpec& key : spec.keys) gradient_dtype(spec, key);  // throws if there is none
  const JobRules rules = rules_of(spec);                           // throws likewise
  if (rules.gated && rules.optimizer == kernels::Optimizer::kNone) {
    fail(ErrorCode::kInvalid,
         "--gated is about the steps of an optimizer: choose one (--optimizer)");
  }
  check_rules(spec);
  if (std::ranges::any_of(spec.keys,
                          [](const KeySpec& key) { return !key.exchanged_by.empty(); })) {
    validate(JobSpec{.name = "plan", .keys = spec.keys, .max_ranks = spec.max_ranks});
  }

  if (!arguments.cluster.empty()) return compare(arguments);

  numa::Topology topology = load_topology(arguments.topology);
  if (arguments.nics) numa::set_nics(topology, *arguments.nics);
  if (!arguments.rank_boxes.empty()) {
    if (topology.nics.empty()) {
      fail(ErrorCode::kInvalid, "--rank-boxes: boxes serve one job over NICs (--nics)");
    }
    if (arguments.rank_boxes.size() != arguments.options.ranks) {
      fail(ErrorCode::kInvalid, "--rank-boxes: {} ranks, and --ranks is {}",
           arguments.rank_boxes.size(), arguments.options.ranks);
    }
    topology = boxes_like(topology, arguments.rank_boxes);
    arguments.options.rank_hosts = {arguments.rank_boxes.begin(), arguments.rank_boxes.end()};
    arguments.options.shared_memory = false;
  }
  if (topology.nics.empty()) arguments.options.slot_window = 0;  // over shared memory
  const Plan plan = make_plan(topology, spec.keys, arguments.options);

  LimitInputs& inputs = arguments.limits;
  const bool with_limits = any(inputs);
  inputs.nics = !topology.nics.empty();
  if (!inputs.core_gb_s) inputs.core_gb_s = kMeasuredCoreGbS;
  Limits limits;
  if (with_limits) limits = find_limits(plan, spec, inputs);

  ExchangeInputs exchange_inputs;
  Exchanges exchanges;
  std::vector<LayerComputing> layers;
  const bool with_exchanges = arguments.samples > 0;
  if (with_exchanges) {
    exchange_inputs = exchange_inputs_of(arguments, topology, plan, spec);
    if (!arguments.computing.empty()) layers = computing_of(spec, arguments.computing);
    exchanges = choose_exchanges(spec, exchange_inputs, layers);
  }

  std::string text;
  if (arguments.json) {
    nlohmann::ordered_json out = to_json(topology, plan, spec, arguments.checkpoints);
    if (with_exchanges) out["ways"] = to_json(exchanges, spec, exchange_inputs, layers);
    if (with_limits) out["limits"] = nlohmann::ordered_json::parse(to_json(limits, inputs));
    text = out.dump(2) + "\n";
  } else {
    text = escaped_lines(numa::describe(topology) + left_out(topology, plan) + "\n" +
                         describe(plan, spec));
    const std::vector<Plan> boxes = parts_of(plan);
    for (const Plan& part : boxes) {
      if (boxes.size() > 1) text += fmt::format("\nbox {}:\n", 1 + (&part - boxes.data()));
      text += escaped_lines(describe_memory(part, spec, arguments.checkpoints) +
                            too_small(topology, part, spec, arguments.checkpoints));
    }
    if (with_limits) text += "\n" + describe(limits, inputs);
    if (with_exchanges)
      text += "\n" + escaped_lines(describe(exchanges, spec, exchange_inputs, layers));
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void add_limit_options(CLI::App* command, LimitInputs& inputs) {
  const auto add = [&](const char* name, std::optional<double>& value, const char* unit,
                       const std::string& help) {
    command->add_option(name, value, help)->type_name(unit)->group("Limits of the hardware");
  };
  add("--link-gbps", inputs.link_gbit_s, "Gbit/s", "Of a NIC, each way");
  add("--pcie-gbps", inputs.pcie_gb_s, "GB/s", "Of a NIC's PCIe, each way");
  add("--pcie-node-gbps", inputs.pcie_node_gb_s, "GB/s",
      "Between all NICs of a node and its memory, both ways together");
  add("--memory-gbps", inputs.memory_gb_s, "GB/s", "Of a node's memory, reads and writes together");
  add("--core-gbps", inputs.core_gb_s, "GB/s",
      fmt::format("Of a core that sums and optimizes, reads and writes (default: {}; kernels_bench "
                  "measures it)",
                  kMeasuredCoreGbS));
  add("--worker-link-gbps", inputs.worker_link_gbit_s, "Gbit/s", "Of a worker, each way");
  add("--images-per-s", inputs.images_per_s, "N", "Of a worker that never waits for the box");
  add("--batch", inputs.batch, "N", "Images of a worker per round");
  command->add_flag("--ddio", inputs.ddio, "NICs access the box's caches instead of its memory")
      ->group("Limits of the hardware");
}

// What a cluster file says of each kind of host, and what was not asked with one.
void add_placement_options(CLI::App* command, PlanArguments& arguments, CLI::Option* ranks) {
  const char* group = "Placements";
  CLI::Option* cluster = command->add_option("--cluster", arguments.cluster,
                                             "TOML file of hosts: compare placements on them");
  cluster->type_name("FILE")->group(group);
  for (const char* name : {"--topology", "--nics", "--cores", "--checkpoints", "--link-gbps",
                           "--pcie-gbps", "--pcie-node-gbps", "--memory-gbps", "--core-gbps",
                           "--worker-link-gbps", "--samples", "--rank-boxes"}) {
    cluster->excludes(command->get_option(name));
  }
  command
      ->add_option("--placement", arguments.placement.placement,
                   fmt::format("all, {}", fmt::join(kPlacements, ", ")))
      ->capture_default_str()
      ->needs(cluster)
      ->group(group);
  command
      ->add_option("--boxes", arguments.placement.boxes,
                   "Hosts that serve, of dedicated-sharded (default: all of role box)")
      ->check(CLI::Range(1, 4096))
      ->needs(cluster)
      ->group(group);
  ranks->each([&arguments](const std::string&) { arguments.ranks_given = true; });
}

}  // namespace

void add_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "plan", "Shows how a box would distribute a model: NICs, cores, queues, memory, limits");
  auto arguments = std::make_shared<PlanArguments>();  // lives as long as the callback
  command
      ->add_option("model", arguments->model,
                   fmt::format("{}, or a JSON file of keys", fmt::join(model_names(), ", ")))
      ->required();
  CLI::Option* ranks =
      command->add_option("--ranks", arguments->options.ranks, "Workers")->capture_default_str();
  command
      ->add_option(
          "--topology", arguments->topology,
          "this (machine), FILE.xml of lstopo, or hwloc's synthetic form: \"pack:2 core:14 pu:1\"")
      ->capture_default_str();
  command
      ->add_option("--nics", arguments->nics,
                   "Plan for this many NICs, spread evenly over the nodes (default: those found)")
      ->check(CLI::Range(0, 4096));
  command->add_option("--cores", arguments->options.cores, "Cores to use; 0 for all")
      ->capture_default_str();
  command
      ->add_option("--chunk-elements", arguments->options.chunk_elements,
                   "Elements of a chunk, a multiple of 32")
      ->capture_default_str();
  command
      ->add_option("--optimizer", arguments->spec.optimizer,
                   fmt::to_string(fmt::join(kernels::optimizer_names(), ", ")))
      ->capture_default_str();
  command
      ->add_option("--state-dtype", arguments->state_dtype,
                   "How the box keeps the optimizer's states: f32 or 8bit")
      ->capture_default_str();
  command
      ->add_option("--dtype", arguments->spec.gradient_dtype,
                   "Gradients: f32, bf16, f16, fp8-e4m3, fp8-e5m2, int32, int8, int4, topk, "
                   "topk-10, topk-100, topk-1000, or these four with -int4 or -int2; or by the "
                   "round, as f32*100,topk, of which the largest counts")
      ->capture_default_str();
  command->add_option_function<std::string>(
      "--slot-window",
      [arguments](const std::string& bytes) {
        try {
          arguments->options.slot_window = parse_bytes_or_0(bytes);
        } catch (const Error& error) {
          throw CLI::ValidationError("--slot-window", error.what());
        }
      },
      "Over NICs: 'phub serve --slot-window', with K, M, G or T; 0: slots of everything [0]");
  command->add_flag("--checkpoints", arguments->checkpoints,
                    "With the copy that 'phub serve --checkpoints' takes of parameters and state");
  command->add_flag("--gated", arguments->gated,
                    "Rounds are applied as a whole: with max_norm, or on_nonfinite skip; needs an "
                    "--optimizer");
  command->add_option(
      "--parameter-dtype", arguments->parameter_dtype,
      "Format that is written back: f32, bf16 or f16 (default: that of the gradients; f32 "
      "if theirs is none of these); or, as differences, fp8-e4m3, fp8-e5m2, int8 or "
      "int4");
  command
      ->add_option(
          "--rank-boxes", arguments->rank_boxes,
          "By rank, the box at its machine, from 1 on (0: none), as in 1,1,2: plans for so "
          "many boxes, with chunks at the machines that exchange them")
      ->delimiter(',')
      ->check(CLI::Range(0, 256));
  command->add_flag("--json", arguments->json, "Print JSON, for programs");
  add_limit_options(command, arguments->limits);
  CLI::Option* samples =
      command
          ->add_option("--samples", arguments->samples,
                       "Of a rank in a round: compares exchanging matrices whole and as factors")
          ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 24))
          ->group("Ways of matrices");
  command
      ->add_option("--product-gflops", arguments->product_gflop_s,
                   "Of a rank's products of factors (bench/products measures them)")
      ->capture_default_str()
      ->group("Ways of matrices");
  command
      ->add_option("--box-product-gflops", arguments->box_product_gflop_s,
                   "Of the products of one of the box's cores")
      ->capture_default_str()
      ->group("Ways of matrices");
  command
      ->add_option("--compute", arguments->computing,
                   "What computing hides of the exchange: milliseconds of an iteration (alexnet, "
                   "vgg16, googlenet), or FILE.json of layers")
      ->type_name("MS|FILE")
      ->needs(samples)
      ->group("Ways of matrices");
  add_placement_options(command, *arguments, ranks);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace phub
