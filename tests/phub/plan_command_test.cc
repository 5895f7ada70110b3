#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
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
using ::testing::Not;

// What `phub plan …` prints; throws as it does.
std::string output_of(const std::string& arguments) {
  CLI::App app;
  add_plan_command(app);
  ::testing::internal::CaptureStdout();
  try {
    app.parse("plan " + arguments);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  return ::testing::internal::GetCapturedStdout();
}
nlohmann::json json_of(const std::string& arguments) {
  return nlohmann::json::parse(output_of(arguments + " --json"));
}
std::string error_of(const std::string& arguments) {
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

std::string readme() {
  std::ifstream file(PHUB_README);
  return {std::istreambuf_iterator<char>(file), {}};
}
// What is printed from this heading on; "" if it has none.
std::string from_heading(const std::string& printed, const std::string& heading) {
  const size_t begin = printed.find(heading);
  return begin == printed.npos ? "" : printed.substr(begin);
}
// phub/README.md shows what is printed, from this heading on.
void expect_in_readme(const std::string& printed, const std::string& heading) {
  std::istringstream lines(from_heading(printed, heading));
  std::string shown;
  for (std::string line; std::getline(lines, line);) shown += "    " + line + '\n';
  ASSERT_NE(shown, "") << heading;
  EXPECT_THAT(readme(), HasSubstr(shown));
}

const std::string kLimits = "Limits of the hardware";
const std::string kPBox =
    "resnet50 --topology 'pack:2 [numa(memory=64GB)] core:14 pu:1' --nics 10 --optimizer nesterov";

TEST(PlanCommand, ShowsPBox) {
  const std::string text = output_of(kPBox + " --ranks 8");
  EXPECT_THAT(text, HasSubstr("2 NUMA nodes, 28 cores, 10 NICs"));
  EXPECT_THAT(text, HasSubstr("resnet50: 25,557,032 elements in 161 keys, 3,"));
  EXPECT_THAT(text, HasSubstr("8 ranks, optimizer nesterov, gradients f32, parameters f32"));
  EXPECT_THAT(text, ContainsRegex("nic9 +1 +3 +3[0-9][0-9] +7[78]\\.[0-9]+ MiB"));
  EXPECT_THAT(text, ContainsRegex("27 +27 +1 +[0-9]+ "));
  EXPECT_THAT(text, ContainsRegex("all +779\\.94 MiB +97\\.49 MiB +- +97\\.49 MiB"));
  EXPECT_THAT(text, Not(HasSubstr("does not fit")));
}

TEST(PlanCommand, SaysWhatItPlansAndWhatIsNotUsed) {
  for (const auto& [arguments, said] : std::vector<std::pair<std::string, std::string>>{
           {"alexnet", "this machine: "},
           {"alexnet --nics 0", "planned for shared memory"},
           {"vgg19 --topology 'pack:2 core:4 pu:1' --nics 2 --cores 1", "not used: nic1"},
           {"vgg19 --topology 'pack:2 core:4 pu:1' --nics 2 --cores 1", "not used: 7 of 8 cores\n"},
           {"vgg19 --topology 'pack:2 core:4 pu:1' --nics 1",
            "not used: 4 of 8 cores (no NIC on node 1)\n"},
           {"vgg19 --topology 'pack:1 [numa(memory=4GiB)] core:4 pu:1' --ranks 8",
            "does not fit: node 0 has 4.00 GiB and needs 4.83 GiB"}}) {
    EXPECT_THAT(output_of(arguments), HasSubstr(said)) << arguments;
  }
}

TEST(PlanCommand, JsonAddsUp) {
  const std::string words =
      "bert-base --ranks 4 --topology 'pack:2 core:3 pu:1' --nics 4 --optimizer adam --dtype bf16";
  auto json = json_of(words);
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

  // A byte for an element of each state, an f32 for 256, and one for each chunk.
  json = json_of(words + " --state-dtype 8bit");
  EXPECT_EQ(json.at("state_dtype"), "8bit");
  const uint64_t chunks = json.at("chunks");
  EXPECT_GE(sum("memory", "optimizer_state"), 2 * padded);
  EXPECT_LE(sum("memory", "optimizer_state"), 2 * (padded + 4 * (padded / 256 + chunks)));
  EXPECT_LT(static_cast<double>(sum("memory", "optimizer_state")), 2.1 * padded);

  // Parameters and both states, f32.
  json = json_of(words + " --checkpoints");
  const uint64_t snapshot = 3 * 4 * padded + 8 * json.at("chunks").get<uint64_t>();  // and steps
  EXPECT_EQ(sum("memory", "snapshot"), snapshot);
  EXPECT_EQ(sum("memory", "total"), total + snapshot);
  // And the sums of a round.
  json = json_of(words + " --checkpoints --gated");
  EXPECT_EQ(sum("memory", "gated_sums"), 4 * padded);
  EXPECT_THAT(output_of(words + " --checkpoints"), HasSubstr("snapshot"));
}

TEST(PlanCommand, SaysNoLimitsUnasked) {
  EXPECT_EQ(from_heading(output_of(kPBox), kLimits), "");
  EXPECT_FALSE(json_of(kPBox).contains("limits"));
}

TEST(PlanCommand, SaysLimits) {
  const std::string words =
      kPBox +
      " --ranks 120 --link-gbps 56 --pcie-gbps 7.5 --pcie-node-gbps 60 --memory-gbps 70"
      " --core-gbps 20 --worker-link-gbps 56 --images-per-s 190 --batch 32";
  const std::string text = from_heading(output_of(words), kLimits);
  EXPECT_THAT(text, Not(HasSubstr("not given")));
  EXPECT_THAT(text, HasSubstr("memory (node 0) binds first"));
  const auto limits = json_of(words + " --ddio").at("limits");
  EXPECT_EQ(limits.at("resources").size(), 6u);
  EXPECT_EQ(limits.at("binding"), "PCIe of a node");
  EXPECT_EQ(limits.at("inputs").at("worker_link_gbit_s"), 56.0);
  EXPECT_EQ(limits.at("inputs").at("ddio"), true);
}

// The box of the paper: the same command, the same output.
TEST(PlanCommand, PrintsTheExampleOfTheReadme) {
  const std::string rates = " --link-gbps 56 --images-per-s 190 --batch 32";
  EXPECT_THAT(readme(), HasSubstr("--optimizer nesterov" + rates));
  expect_in_readme(output_of(kPBox + " --ranks 120" + rates), kLimits);
}

// … and a cluster: the file of the example, and what is printed.
TEST(PlanCommand, ComparesThePlacementsOfTheReadme) {
  const std::string text = readme();
  const size_t begin = text.find("[[host]]\nkind"), end = text.find("```", begin);
  ASSERT_NE(end, text.npos);
  const std::string path = ::testing::TempDir() + "plan_command_test_cluster.toml";
  std::ofstream(path) << text.substr(begin, end - begin);
  const std::string words = "resnet50 --optimizer nesterov --batch 32 --cluster " + path;
  expect_in_readme(output_of(words), "");

  const std::string one = words + " --placement dedicated-sharded --ranks ";
  const auto json = json_of(one + "3");
  EXPECT_EQ(json.at("ranks"), 3);
  EXPECT_EQ(json.at("recommended"), "dedicated-sharded");
  EXPECT_EQ(json.at("placements").size(), 1u);
  EXPECT_THAT(error_of(one + "0"), HasSubstr("--ranks is 0"));
  EXPECT_THAT(error_of(one + "99"), HasSubstr("--ranks is 99, and the cluster has 8"));
  EXPECT_THAT(error_of(one + "99 --nics 3"), HasSubstr("--nics excludes --cluster"));
}

// … and the ways of the matrices of VGG-16.
TEST(PlanCommand, ComparesTheWaysOfTheReadme) {
  const std::string words =
      "vgg16 --ranks 8 --topology 'pack:1 core:4 pu:1' --nics 4 --link-gbps 1"
      " --worker-link-gbps 1 --samples 32";
  expect_in_readme(output_of(words), "Ways of matrices");
  const auto json = json_of(words).at("ways");
  EXPECT_EQ(json.at("samples"), 32);
  EXPECT_EQ(json.at("matrices").size(), 3u);
  EXPECT_EQ(json.at("matrices")[0].at("way"), "ranks");
  EXPECT_GT(json.at("matrices")[0].at("box_seconds"), json.at("matrices")[0].at("ranks_seconds"));
  EXPECT_LT(json.at("chosen_seconds"), json.at("whole_seconds"));
  // With an optimizer the parameters are the box's, and no rank has a use for products.
  const auto at_box = json_of(words +
                              " --optimizer sgd --box-product-gflops 400 --dtype f32"
                              " --parameter-dtype int8")
                          .at("ways");
  EXPECT_EQ(at_box.at("matrices")[0].at("way"), "box");
  EXPECT_FALSE(at_box.at("matrices")[0].contains("ranks_seconds"));
}

// … and what computing hides of AlexNet's exchange.
TEST(PlanCommand, PrintsWhatComputingHidesAsInTheReadme) {
  const std::string words =
      "alexnet --ranks 8 --topology 'pack:1 core:4 pu:1' --nics 1 --samples 256 --link-gbps 10"
      " --worker-link-gbps 10 --product-gflops 1142 --compute 960";
  expect_in_readme(output_of(words), "What computing hides");
  const auto ways = json_of(words).at("ways");
  EXPECT_NEAR(ways.at("computing_seconds"), 0.96, 1e-9);
  EXPECT_LT(ways.at("whole_overlapped_iteration_seconds"), ways.at("whole_iteration_seconds"));
  EXPECT_LT(ways.at("chosen_overlapped_iteration_seconds"),
            ways.at("whole_overlapped_iteration_seconds"));
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

// Two boxes, at the machines of two ranks, and rows that they exchange.
TEST(PlanCommand, TellsWhatStaysAtHome) {
  const std::string path = ::testing::TempDir() + "plan_command_test_rows.json";
  std::ofstream(path) << R"({"name": "rows", "keys": [{"name": "r", "elements": 819200,
      "exchanged_by": [{"end": 327680, "ranks": [1]}, {"end": 655360, "ranks": [2]},
                       {"end": 819200, "ranks": [3]}]}]})";
  const std::string words =
      path + " --topology 'pack:1 [numa(memory=4GB)] core:2 pu:1' --nics 1 --ranks 2";
  EXPECT_THAT(output_of(words), Not(HasSubstr("machines")));
  const std::string told = words + " --rank-boxes 1,2";
  EXPECT_THAT(output_of(told),
              HasSubstr("gradients of a round: 3.12 MiB stay at their ranks' machines, 640.00 KiB "
                        "go to another box since several machines exchange them"));
  const nlohmann::json json = json_of(told);
  EXPECT_EQ(json.at("homes"),
            (nlohmann::json{
                {"stays", 3276800}, {"shared", 655360}, {"for_balance", 0}, {"without_box", 0}}));
  EXPECT_EQ(json.at("memory").size(), 2u);
  EXPECT_EQ(json.at("memory").at(1).at("box"), 2);
  EXPECT_THAT(output_of(told), HasSubstr("box 2:"));
  EXPECT_THAT(error_of(told + ",1"), HasSubstr("--rank-boxes: 3 ranks, and --ranks is 2"));
  EXPECT_EQ(json.at("nics").at(1).at("name"), "box2:nic0");
  EXPECT_THAT(error_of(words + " --rank-boxes 1,300"), HasSubstr("--rank-boxes"));
  EXPECT_THAT(error_of(told + " --nics 0"), HasSubstr("--nics"));
  EXPECT_THAT(error_of(path + " --nics 1 --ranks 1"), HasSubstr("rank 1 up to element 655360"));
}

TEST(PlanCommand, BadInputIsNamed) {
  for (const auto& [arguments, said] : std::vector<std::pair<std::string, std::string>>{
           {"nomodel", "unknown model 'nomodel'"},
           {"nowhere.json", "nowhere.json"},
           {"", "model is required"},
           {"vgg19 --topology nowhere.xml", "--topology: xml nowhere.xml: No such file"},
           {"vgg19 --topology nowhere/box", "--topology: xml nowhere/box: No such file"},
           {"vgg19 --topology pack:x", "--topology: synthetic"},
           {"vgg19 --topology 'pack:1 core:2 pu:1' --cores 3", "3 cores asked for"},
           {"vgg19 --ranks 0", "0 ranks"},
           {"vgg19 --ranks -1", "--ranks"},
           {"vgg19 --nics 5000", "--nics"},
           {"vgg19 --nics 4294967297", "--nics"},
           {"vgg19 --optimizer sdg", "optimizer: must be one of none, sgd"},
           {"vgg19 --optimizer sgd --state-dtype 8bit",
            "optimizer's states, and this one has none"},
           {"vgg19 --dtype f64",
            "gradient_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int32, int8, int4, "
            "topk, topk-10, topk-100, topk-1000, topk-int4, topk-10-int4, topk-100-int4, "
            "topk-1000-int4, topk-int2, topk-10-int2, topk-100-int2, topk-1000-int2, got 'f64'"},
           {"vgg19 --parameter-dtype f8",
            "parameter_dtype: must be one of f32, bf16, f16, fp8-e4m3, fp8-e5m2, int8, int4, got "
            "'f8'"},
           {"vgg19 --chunk-elements 100", "multiple of 32"},
           {"vgg19 --gated", "choose one (--optimizer)"},
           {"vgg19 --cluster nowhere.toml", "nowhere.toml: No such file"},
           {"vgg19 --boxes 2", "--boxes requires --cluster"},
           {"vgg16 --samples 32", "it needs --link-gbps, --worker-link-gbps, and NICs"},
           {"vgg16 --samples 0", "--samples"},
           {"alexnet --compute 960", "--compute requires --samples"},
           {"resnet50 --link-gbps -1", "--link-gbps is -1"}}) {
    EXPECT_THAT(error_of(arguments), HasSubstr(said)) << arguments;
  }
}

}  // namespace plan_command_test
}  // namespace phub
