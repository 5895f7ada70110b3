#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "phub/commands/commands.h"
#include "phub/job/memory.h"
#include "phub/plan/models.h"
#include "phub/plan/plan.h"
#include "transport/error.h"

namespace phub {
namespace plan_command_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// What `phub plan …` prints; throws as it does.
std::string output_of(std::vector<std::string> arguments) {
  CLI::App app;
  add_plan_command(app);
  arguments.insert(arguments.begin(), "plan");
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  ::testing::internal::CaptureStdout();
  try {
    app.parse(arguments);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  return ::testing::internal::GetCapturedStdout();
}

std::string error_of(const std::vector<std::string>& arguments) {
  try {
    output_of(arguments);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalid);
    return error.what();
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "no error";
}

TEST(PlanCommand, ShowsPBox) {
  const std::string text = output_of({"resnet50", "--ranks", "8", "--topology",
                                      "pack:2 [numa(memory=64GB)] core:14 pu:1", "--nics", "10",
                                      "--optimizer", "nesterov"});
  EXPECT_THAT(text, HasSubstr("2 NUMA nodes, 28 cores, 10 NICs"));
  EXPECT_THAT(text, HasSubstr("resnet50: 25,557,032 elements in 161 keys, 3,"));
  EXPECT_THAT(text, HasSubstr("8 ranks, optimizer nesterov, gradients f32, parameters f32"));
  EXPECT_THAT(text, ContainsRegex("nic9 +1 +3 +3[0-9][0-9] +7[78]\\.[0-9]+ MiB"));
  EXPECT_THAT(text, ContainsRegex("27 +27 +1 +[0-9]+ "));
  EXPECT_THAT(text, ContainsRegex("all +779\\.94 MiB +97\\.49 MiB +- +97\\.49 MiB"));
  EXPECT_THAT(text, Not(HasSubstr("does not fit")));
}

TEST(PlanCommand, PlansThisMachine) {
  EXPECT_THAT(output_of({"alexnet"}), HasSubstr("this machine: "));
  EXPECT_THAT(output_of({"alexnet", "--nics", "0"}), HasSubstr("planned for shared memory"));
}

TEST(PlanCommand, SaysWhatIsNotUsed) {
  const std::string text =
      output_of({"vgg19", "--topology", "pack:2 core:4 pu:1", "--nics", "2", "--cores", "1"});
  EXPECT_THAT(text, HasSubstr("not used: nic1"));
  EXPECT_THAT(text, HasSubstr("not used: 7 of 8 cores\n"));
  EXPECT_THAT(output_of({"vgg19", "--topology", "pack:2 core:4 pu:1", "--nics", "1"}),
              HasSubstr("not used: 4 of 8 cores (no NIC on node 1)\n"));
}

TEST(PlanCommand, SaysWhatDoesNotFit) {
  EXPECT_THAT(
      output_of({"vgg19", "--topology", "pack:1 [numa(memory=4GiB)] core:4 pu:1", "--ranks", "8"}),
      HasSubstr("does not fit: node 0 has 4.00 GiB and needs 4.83 GiB"));
}

TEST(PlanCommand, JsonAddsUp) {
  std::vector<std::string> words = {
      "bert-base", "--ranks", "4",           "--topology", "pack:2 core:3 pu:1",
      "--nics",    "4",       "--optimizer", "adam",       "--dtype",
      "bf16",      "--json"};
  auto json = nlohmann::json::parse(output_of(words));
  const auto sum = [&](const char* list, const char* field) {
    uint64_t total = 0;
    for (const auto& entry : json.at(list)) total += entry.at(field).get<uint64_t>();
    return total;
  };
  const uint64_t elements = 109'482'240, padded = json.at("total_elements");
  EXPECT_EQ(sum("cores", "elements"), elements);
  EXPECT_EQ(sum("nics", "elements"), elements);
  EXPECT_EQ(sum("queues", "chunks"), json.at("chunks"));
  EXPECT_EQ(json.at("memory").size(), 2u);
  EXPECT_EQ(sum("memory", "gradient_slots"), 4 * 2 * padded);
  EXPECT_EQ(sum("memory", "parameters"), 2 * padded);
  EXPECT_EQ(sum("memory", "master"), 4 * padded);
  EXPECT_EQ(sum("memory", "optimizer_state"), 2 * 4 * padded);
  EXPECT_EQ(sum("memory", "snapshot"), 0u);
  const uint64_t total = sum("memory", "total");
  EXPECT_EQ(total, (8 + 2 + 4 + 8) * padded + sum("memory", "bookkeeping"));

  // Parameters and both states, f32.
  words.push_back("--checkpoints");
  json = nlohmann::json::parse(output_of(words));
  const uint64_t snapshot = 3 * 4 * padded + 8 * json.at("chunks").get<uint64_t>();  // and steps
  EXPECT_EQ(sum("memory", "snapshot"), snapshot);
  EXPECT_EQ(sum("memory", "total"), total + snapshot);
  // And the sums of a round.
  words.push_back("--gated");
  json = nlohmann::json::parse(output_of(words));
  EXPECT_EQ(sum("memory", "gated_sums"), 4 * padded);
  words.erase(std::ranges::find(words, "--json"));
  EXPECT_THAT(output_of(words), HasSubstr("snapshot"));
}

// Everything behind "Limits of the hardware"; "" if there is none.
std::string limits_in(const std::string& text) {
  const size_t begin = text.find("Limits of the hardware");
  return begin == text.npos ? "" : text.substr(begin);
}

const std::vector<std::string> kPBox = {
    "resnet50", "--ranks", "120",         "--topology", "pack:2 [numa(memory=64GB)] core:14 pu:1",
    "--nics",   "10",      "--optimizer", "nesterov"};

TEST(PlanCommand, SaysNoLimitsUnasked) {
  EXPECT_EQ(limits_in(output_of(kPBox)), "");
  std::vector<std::string> arguments = kPBox;
  arguments.emplace_back("--json");
  EXPECT_FALSE(nlohmann::json::parse(output_of(arguments)).contains("limits"));
}

TEST(PlanCommand, SaysLimits) {
  std::vector<std::string> arguments = kPBox;
  for (const char* word : {"--link-gbps", "56", "--pcie-gbps", "7.5", "--pcie-node-gbps", "60",
                           "--memory-gbps", "70", "--core-gbps", "20", "--worker-link-gbps", "56",
                           "--images-per-s", "190", "--batch", "32"}) {
    arguments.emplace_back(word);
  }
  const std::string text = limits_in(output_of(arguments));
  EXPECT_THAT(text, Not(HasSubstr("not given")));
  EXPECT_THAT(text, HasSubstr("memory (node 0) binds first"));
  arguments.emplace_back("--ddio");
  arguments.emplace_back("--json");
  const auto limits = nlohmann::json::parse(output_of(arguments)).at("limits");
  EXPECT_EQ(limits.at("resources").size(), 6u);
  EXPECT_EQ(limits.at("binding"), "PCIe of a node");
  EXPECT_EQ(limits.at("inputs").at("worker_link_gbit_s"), 56.0);
  EXPECT_EQ(limits.at("inputs").at("ddio"), true);
  EXPECT_THAT(error_of({"resnet50", "--link-gbps", "-1"}), HasSubstr("--link-gbps is -1"));
}

// phub/README.md shows the box of the paper: the same command, the same output.
TEST(PlanCommand, PrintsTheExampleOfTheReadme) {
  std::ifstream file(PHUB_README);
  const std::string readme(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(readme,
              HasSubstr("--optimizer nesterov --link-gbps 56 --images-per-s 190 --batch 32"));
  std::vector<std::string> arguments = kPBox;
  for (const char* word : {"--link-gbps", "56", "--images-per-s", "190", "--batch", "32"}) {
    arguments.emplace_back(word);
  }
  std::istringstream lines(limits_in(output_of(arguments)));
  std::string shown;
  for (std::string line; std::getline(lines, line);) shown += "    " + line + '\n';
  EXPECT_THAT(readme, HasSubstr(shown));
}

// … and a cluster: the file of the example, and what is printed.
TEST(PlanCommand, ComparesThePlacementsOfTheReadme) {
  std::ifstream file(PHUB_README);
  const std::string readme(std::istreambuf_iterator<char>(file), {});
  const size_t begin = readme.find("[[host]]\nkind"), end = readme.find("```", begin);
  ASSERT_NE(end, readme.npos);
  const std::string path = ::testing::TempDir() + "plan_command_test_cluster.toml";
  std::ofstream(path) << readme.substr(begin, end - begin);
  std::vector<std::string> arguments = {"resnet50", "--optimizer", "nesterov", "--cluster",
                                        path,       "--batch",     "32"};
  std::istringstream lines(output_of(arguments));
  std::string shown;
  for (std::string line; std::getline(lines, line);) shown += "    " + line + '\n';
  EXPECT_THAT(readme, HasSubstr(shown));

  for (const char* word : {"--json", "--placement", "dedicated-sharded", "--ranks", "3"}) {
    arguments.emplace_back(word);
  }
  const auto json = nlohmann::json::parse(output_of(arguments));
  EXPECT_EQ(json.at("ranks"), 3);
  EXPECT_EQ(json.at("recommended"), "dedicated-sharded");
  EXPECT_EQ(json.at("placements").size(), 1u);
  arguments.back() = "0";
  EXPECT_THAT(error_of(arguments), HasSubstr("--ranks is 0"));
  arguments.back() = "99";
  EXPECT_THAT(error_of(arguments), HasSubstr("--ranks is 99, and the cluster has 8"));
  arguments.insert(arguments.end(), {"--nics", "3"});
  EXPECT_THAT(error_of(arguments), HasSubstr("--nics excludes --cluster"));
  EXPECT_THAT(error_of({"vgg19", "--cluster", "nowhere.toml"}),
              HasSubstr("nowhere.toml: No such file"));
  EXPECT_THAT(error_of({"vgg19", "--boxes", "2"}), HasSubstr("--boxes requires --cluster"));
}

// The README has what is printed, from this heading on.
void expect_in_readme(const std::string& printed, const std::string& heading) {
  std::ifstream file(PHUB_README);
  const std::string readme(std::istreambuf_iterator<char>(file), {});
  const size_t begin = printed.find(heading);
  ASSERT_NE(begin, printed.npos);
  std::istringstream lines(printed.substr(begin));
  std::string shown;
  for (std::string line; std::getline(lines, line);) shown += "    " + line + '\n';
  EXPECT_THAT(readme, HasSubstr(shown));
}

// … and the ways of the matrices of VGG-16.
TEST(PlanCommand, ComparesTheWaysOfTheReadme) {
  std::vector<std::string> arguments = {
      "vgg16",  "--ranks",   "8",           "--topology", "pack:1 core:4 pu:1",
      "--nics", "4",         "--link-gbps", "1",          "--worker-link-gbps",
      "1",      "--samples", "32"};
  expect_in_readme(output_of(arguments), "Ways of matrices");

  arguments.emplace_back("--json");
  const auto json = nlohmann::json::parse(output_of(arguments)).at("ways");
  EXPECT_EQ(json.at("samples"), 32);
  EXPECT_EQ(json.at("matrices").size(), 3u);
  EXPECT_EQ(json.at("matrices")[0].at("way"), "ranks");
  EXPECT_GT(json.at("matrices")[0].at("box_seconds"), json.at("matrices")[0].at("ranks_seconds"));
  EXPECT_LT(json.at("chosen_seconds"), json.at("whole_seconds"));
  // With an optimizer the parameters are the box's, and no rank has a use for products.
  arguments.insert(arguments.end(), {"--optimizer", "sgd", "--box-product-gflops", "400", "--dtype",
                                     "f32", "--parameter-dtype", "int8"});
  const auto at_box = nlohmann::json::parse(output_of(arguments)).at("ways");
  EXPECT_EQ(at_box.at("matrices")[0].at("way"), "box");
  EXPECT_FALSE(at_box.at("matrices")[0].contains("ranks_seconds"));
  EXPECT_THAT(error_of({"vgg16", "--samples", "32"}),
              HasSubstr("it needs --link-gbps, --worker-link-gbps, and NICs"));
  EXPECT_THAT(error_of({"vgg16", "--samples", "0"}), HasSubstr("--samples"));
}

// … and what computing hides of AlexNet's exchange.
TEST(PlanCommand, PrintsWhatComputingHidesAsInTheReadme) {
  std::vector<std::string> arguments = {"alexnet",
                                        "--ranks",
                                        "8",
                                        "--topology",
                                        "pack:1 core:4 pu:1",
                                        "--nics",
                                        "1",
                                        "--samples",
                                        "256",
                                        "--link-gbps",
                                        "10",
                                        "--worker-link-gbps",
                                        "10",
                                        "--product-gflops",
                                        "1142",
                                        "--compute",
                                        "960"};
  expect_in_readme(output_of(arguments), "What computing hides");
  arguments.emplace_back("--json");
  const auto ways = nlohmann::json::parse(output_of(arguments)).at("ways");
  EXPECT_NEAR(ways.at("computing_seconds"), 0.96, 1e-9);
  EXPECT_LT(ways.at("whole_overlapped_iteration_seconds"), ways.at("whole_iteration_seconds"));
  EXPECT_LT(ways.at("chosen_overlapped_iteration_seconds"),
            ways.at("whole_overlapped_iteration_seconds"));
  EXPECT_THAT(error_of({"alexnet", "--compute", "960"}), HasSubstr("--compute requires --samples"));
}

TEST(PlanMemory, HoldsWhatTheJobNeeds) {
  numa::Topology topology = numa::from_synthetic("pack:1 core:2 pu:1");
  JobSpec spec{.name = "m", .keys = {{.name = "a", .elements = 32 * 1000}}, .max_ranks = 3};
  const auto needed = [&](const char* optimizer, const char* gradient, const char* parameter) {
    spec.optimizer = optimizer, spec.gradient_dtype = gradient, spec.parameter_dtype = parameter;
    const Plan plan =
        make_plan(topology, spec.keys, {.ranks = 3, .gradient_dtype = spec.gradient_dtype});
    const std::vector<NodeMemory> nodes = memory_needed(plan, spec);
    EXPECT_EQ(nodes.size(), 1u);
    const NodeMemory& m = nodes.at(0);
    EXPECT_GT(m.bookkeeping, 0u);
    EXPECT_LT(m.bookkeeping, 200'000u);
    return std::vector<uint64_t>{m.slots / 32000, m.parameters / 32000, m.master / 32000,
                                 m.state / 32000};
  };
  using Bytes = std::vector<uint64_t>;
  EXPECT_EQ(needed("none", "f32", "f32"), (Bytes{12, 4, 0, 0}));
  EXPECT_EQ(needed("adam", "f32", "int4"), (Bytes{12, 6, 4, 8}));  // the view, and differences
  EXPECT_EQ(needed("none", "f16", "f16"), (Bytes{6, 2, 0, 0})) << "a sum needs no master";
  EXPECT_EQ(needed("sgd", "bf16", "f32"), (Bytes{6, 4, 0, 0}));
  EXPECT_EQ(needed("sgd", "f32", "bf16"), (Bytes{12, 2, 4, 0}));
  EXPECT_EQ(needed("nesterov", "f32", "f32"), (Bytes{12, 4, 0, 4}));
  EXPECT_EQ(needed("adam", "f32", "f32"), (Bytes{12, 4, 0, 8}));
  spec.hyper["rmsprop_momentum"] = 0.9;
  EXPECT_EQ(needed("rmsprop", "f32", "f32"), (Bytes{12, 4, 0, 8}));
}

TEST(PlanCommand, BadInputIsNamed) {
  EXPECT_THAT(error_of({"nomodel"}), HasSubstr("unknown model 'nomodel'"));
  EXPECT_THAT(error_of({"nowhere.json"}), HasSubstr("nowhere.json"));
  EXPECT_THAT(error_of({}), HasSubstr("model is required"));
  EXPECT_THAT(error_of({"vgg19", "--topology", "nowhere.xml"}),
              HasSubstr("--topology: xml nowhere.xml: No such file"));
  EXPECT_THAT(error_of({"vgg19", "--topology", "nowhere/box"}),
              HasSubstr("--topology: xml nowhere/box: No such file"));
  EXPECT_THAT(error_of({"vgg19", "--topology", "pack:x"}), HasSubstr("--topology: synthetic"));
  EXPECT_THAT(error_of({"vgg19", "--topology", "pack:1 core:2 pu:1", "--cores", "3"}),
              HasSubstr("3 cores asked for"));
  EXPECT_THAT(error_of({"vgg19", "--ranks", "0"}), HasSubstr("0 ranks"));
  EXPECT_THAT(error_of({"vgg19", "--ranks", "-1"}), HasSubstr("--ranks"));
  EXPECT_THAT(error_of({"vgg19", "--nics", "5000"}), HasSubstr("--nics"));
  EXPECT_THAT(error_of({"vgg19", "--nics", "4294967297"}), HasSubstr("--nics"));
  EXPECT_THAT(error_of({"vgg19", "--optimizer", "sdg"}),
              HasSubstr("optimizer: must be one of none, sgd"));
  EXPECT_THAT(error_of({"vgg19", "--dtype", "f64"}),
              HasSubstr("gradient_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int32, "
                        "int8, int4, topk, got 'f64'"));
  EXPECT_THAT(error_of({"vgg19", "--parameter-dtype", "f8"}),
              HasSubstr("parameter_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int8, "
                        "int4, topk, got 'f8'"));
  EXPECT_THAT(error_of({"vgg19", "--chunk-elements", "100"}), HasSubstr("multiple of 32"));
}

}  // namespace plan_command_test
}  // namespace phub
