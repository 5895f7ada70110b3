// What must hold of the model whatever it is asked: simple cases that can be computed by hand, and
// the limits of the hardware, which no exchange beats.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "bench/rack_model/exchange.h"
#include "bench/rack_model/scene.h"
#include "phub/plan/models.h"
#include "tests/seeds.h"
#include "transport/error.h"

namespace phub::rack_model {
namespace rack_model_test {

using ::testing::HasSubstr;

std::string host(const std::string& kind, const std::string& role, uint32_t count, uint32_t nics,
                 double link, const std::string& more = "") {
  return fmt::format(
      "[[host]]\nkind = \"{}\"\nrole = \"{}\"\ncount = {}\ntopology = \"pack:1 core:4 pu:1\"\n"
      "nics = {}\nlink_gbps = {}\n{}\n",
      kind, role, count, nics, link, more);
}

JobSpec job(const std::string& name = "resnet50") {
  return {.name = name, .keys = model(name).keys, .optimizer = "nesterov"};
}

JobSpec one_chunk() {
  return {.name = "one", .keys = {{.name = "a", .elements = 8192}}, .optimizer = "none"};
}

SceneOptions placed(const std::string& placement, uint32_t bundle = 1) {
  SceneOptions options;
  options.placement.placement = placement;
  options.bundle = bundle;
  return options;
}

std::vector<Scene> scenes(const std::string& cluster, const SceneOptions& options,
                          const JobSpec& spec = job(), const Costs& costs = {}) {
  std::vector<std::string> left_out;
  return make_scenes(parse_cluster(cluster, "cluster.toml"), spec, {}, options, costs, left_out);
}

double seconds(const std::string& cluster, const SceneOptions& options, const JobSpec& spec = job(),
               const Costs& costs = {}) {
  return simulate(scenes(cluster, options, spec, costs).at(0)).seconds;
}

constexpr double kChunk = 8192 * 4;
constexpr double kModel = 25'557'032.0 * 4;
constexpr double kGbit = 1e9 / 8;  // bytes

// A chunk goes up, is summed (which costs nothing here), and comes down.
TEST(RackModel, OneFlowTakesItsBytesOverTheBandwidth) {
  const std::string cluster = host("w", "worker", 1, 1, 1, "core_gbps = 1e6") +
                              host("b", "box", 1, 1, 10, "core_gbps = 1e6");
  EXPECT_NEAR(seconds(cluster, placed("dedicated-central"), one_chunk()), 2 * kChunk / kGbit, 1e-6);
}

TEST(RackModel, AChunkIsSummedWhenTheLastIsIn) {
  // Two ranks share the box's link on the way up, and on the way down.
  const std::string cluster = host("w", "worker", 2, 1, 10, "core_gbps = 1e6") +
                              host("b", "box", 1, 1, 1, "core_gbps = 1e6");
  EXPECT_NEAR(seconds(cluster, placed("dedicated-central"), one_chunk()), 4 * kChunk / kGbit, 1e-6);
  // 1 ms of summing lies between.
  const Costs costs{.sum_chunk_ns = 1e6};
  EXPECT_NEAR(seconds(cluster, placed("dedicated-central"), one_chunk(), costs),
              4 * kChunk / kGbit + 1e-3, 1e-6);
}

// Of two ranks one is on the box's host: its gradients do not take from the link that the other
// one's results need.
TEST(RackModel, OnTheBoxsHostNoLinkIsNeeded) {
  const std::string cluster = host("w", "worker", 2, 1, 1);
  const double expected = kModel / kGbit;
  EXPECT_NEAR(seconds(cluster, placed("colocated-central")), expected, expected * 0.01);
}

TEST(RackModel, ACentralBoxTakesWModelsOverItsNics) {
  for (const uint32_t workers : {2u, 4u, 8u}) {
    const std::string cluster = host("w", "worker", workers, 1, 1) + host("b", "box", 1, 1, 1);
    const double expected = workers * kModel / kGbit;
    EXPECT_NEAR(seconds(cluster, placed("dedicated-central")), expected, expected * 0.01);
  }
}

TEST(RackModel, MoreNicsScale) {
  double one = 0;
  for (const uint32_t nics : {1u, 2u, 4u, 8u}) {
    const std::string cluster = host("w", "worker", 8, 1, 10) + host("b", "box", 1, nics, 10);
    const double s = seconds(cluster, placed("dedicated-central"));
    if (nics == 1) one = s;
    EXPECT_NEAR(s, one / nics, one / nics * 0.03) << nics << " NICs";
  }
}

// Random workers and NICs; `rates` are those of all hosts.
std::string any_cluster(std::mt19937_64& random, double link, const std::string& rates) {
  const auto workers = static_cast<uint32_t>(2 + random() % 7);
  const auto nics = static_cast<uint32_t>(1 + random() % 4);
  const auto own = static_cast<uint32_t>(1 + random() % 2);
  return host("w", "worker", workers, own, link, rates) + host("b", "box", 2, nics, link, rates);
}

// Where one kind of resource binds nothing queues: the round takes hardly more than the limits say.
TEST(RackModel, AgreesWithTheLimits) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  std::mt19937_64 random(seed);
  const auto rate = [&](const char* name) {
    return fmt::format("core_gbps = 100\n{} = {}", name, 1 + random() % 20);
  };
  const std::pair<double, std::string> rates[] = {
      {1 + static_cast<double>(random() % 40), "core_gbps = 100"},
      {400, rate("memory_gbps")},
      {400, rate("pcie_gbps")},
      {400, rate("pcie_node_gbps")}};
  for (const auto& [link, others] : rates) {
    const std::string cluster = any_cluster(random, link, others);
    for (const Scene& scene : scenes(cluster, placed("all"), job("resnet18"))) {
      const double s = simulate(scene).seconds;
      EXPECT_GE(s, scene.limit_s * 0.9999) << scene.name << "\n" << cluster;
      EXPECT_LE(s, scene.limit_s * 1.1) << scene.name << "\n" << cluster;
    }
  }
}

// Where several are close to their limits they take turns: gradients come in first, results go out
// last. No round is faster than the limits.
TEST(RackModel, IsNeverFasterThanTheLimits) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  std::mt19937_64 random(seed);
  const std::string rates =
      fmt::format("core_gbps = {}\nmemory_gbps = {}\npcie_gbps = {}\npcie_node_gbps = {}",
                  5 + random() % 20, 5 + random() % 60, 1 + random() % 8, 2 + random() % 20);
  const std::string cluster = any_cluster(random, 1 + static_cast<double>(random() % 40), rates);
  for (const Scene& scene : scenes(cluster, placed("all"), job("resnet18"))) {
    const double s = simulate(scene).seconds;
    EXPECT_GE(s, scene.limit_s * 0.9999) << scene.name << "\n" << cluster;
    EXPECT_LE(s, scene.limit_s * 2) << scene.name << "\n" << cluster;
  }
}

TEST(RackModel, SharedMemoryTakesWhatItsMemoryAllows) {
  SceneOptions options;
  options.shared_memory = true;
  options.placement.ranks = 4;
  const std::string cluster = host("w", "worker", 1, 1, 1, "memory_gbps = 20");
  const Scene scene = scenes(cluster, options).at(0);
  EXPECT_NEAR(simulate(scene).seconds, (4 + 4) * kModel / 20e9, 1e-4);
  EXPECT_NEAR(scene.limit_s, (4 + 4) * kModel / 20e9, 1e-4);
}

TEST(RackModel, DdioLeavesGradientsOutOfMemory) {
  SceneOptions options = placed("dedicated-central");
  const std::string cluster =
      host("w", "worker", 4, 1, 100) + host("b", "box", 1, 4, 100, "memory_gbps = 10");
  const double without = seconds(cluster, options);
  options.ddio = true;
  const Scene scene = scenes(cluster, options).at(0);
  const double with = simulate(scene).seconds;
  EXPECT_LT(with, without / 2);
  EXPECT_GE(with, scene.limit_s);
}

TEST(RackModel, IsDeterministic) {
  const std::string cluster = host("w", "worker", 5, 2, 7) + host("b", "box", 2, 3, 9);
  for (const Scene& scene : scenes(cluster, placed("all"), job("resnet18"))) {
    const Outcome first = simulate(scene), second = simulate(scene);
    EXPECT_EQ(first.seconds, second.seconds) << scene.name;
    EXPECT_EQ(first.flows, second.flows) << scene.name;
    EXPECT_EQ(first.busiest, second.busiest) << scene.name;
  }
}

// A bundle is sent when its first chunk could be, and summed when its last one is in: what it adds
// is the time of filling and emptying the queue, a bundle each.
TEST(RackModel, BundlesChangeLittleWhileQueuesHoldMany) {
  const std::string cluster = host("w", "worker", 8, 1, 10) + host("b", "box", 1, 2, 10);
  const double one = seconds(cluster, placed("dedicated-central", 1));
  EXPECT_NEAR(seconds(cluster, placed("dedicated-central", 4)), one, one * 0.02);
  EXPECT_NEAR(seconds(cluster, placed("dedicated-central", 16)), one, one * 0.06);
  EXPECT_GT(seconds(cluster, placed("dedicated-central", 4096)), one * 1.5);  // nothing overlaps
}

TEST(RackModel, ThreadsShareTheMachinesCores) {
  const std::string cluster = host("w", "worker", 4, 1, 100) + host("b", "box", 1, 4, 100);
  Costs costs{.send_byte_ns = 0.5, .receive_byte_ns = 0.5, .shared_cores = 2};
  // Each byte of 2·W·M is sent and received once, by two cores.
  const double expected = 2 * 4 * kModel * 1e-9 / 2;
  const double s = seconds(cluster, placed("dedicated-central"), job(), costs);
  EXPECT_NEAR(s, expected, expected * 0.1);
  costs.shared_cores = 1;
  EXPECT_NEAR(seconds(cluster, placed("dedicated-central"), job(), costs), 2 * expected,
              expected * 0.2);
  costs.shared_cores = 0;  // four cores of the box do half of the work
  EXPECT_LT(seconds(cluster, placed("dedicated-central"), job(), costs), expected);
}

TEST(RackModel, FramingWindowsAndWaitsCost) {
  const std::string cluster = host("w", "worker", 2, 1, 1) + host("b", "box", 1, 2, 1);
  const SceneOptions options = placed("dedicated-central");
  const double plain = seconds(cluster, options);
  EXPECT_NEAR(seconds(cluster, options, job(), {.framing = 1.05}), plain * 1.05, plain * 1e-3);
  EXPECT_NEAR(seconds(cluster, options, job(), {.wakeup_us = 2e3}), plain + 2e-3, 3e-3);
  EXPECT_NEAR(seconds(cluster, options, job(), {.latency_us = 500}), plain + 1e-3, 1e-5);
  // With one chunk in flight at a time the sender waits for the receiver's copy.
  const Costs copies{.receive_byte_ns = 4, .window_bytes = kChunk};
  EXPECT_GT(seconds(cluster, options, job(), copies), plain * 1.2);
}

TEST(RackModel, RacksThatAreAlikeAreSimulatedOnce) {
  const std::string cluster = host("w", "worker", 12, 1, 10) + host("b", "box", 4, 2, 10);
  SceneOptions options;
  options.racks = 3;
  options.parent = true;
  options.uplink_gbit_s = 10;
  options.bundle = 4;
  const Scene once = scenes(cluster, options).at(0);
  options.every_rack = true;
  const Scene every = scenes(cluster, options).at(0);
  EXPECT_EQ(once.workers, 12u);
  const Outcome a = simulate(once), b = simulate(every);
  EXPECT_NEAR(a.seconds, b.seconds, b.seconds * 0.01);
  EXPECT_LT(a.flows, b.flows / 2);
  EXPECT_GE(b.seconds, every.limit_s * 0.9999);
}

// One stream of sums goes up, not one of each worker.
TEST(RackModel, ABoxInEachRackSparesTheUplink) {
  const std::string cluster = host("w", "worker", 16, 1, 10) + host("b", "box", 3, 8, 10);
  SceneOptions options;
  options.racks = 2;
  options.uplink_gbit_s = 10;
  options.bundle = 4;
  const Scene flat = scenes(cluster, options).at(0);
  options.parent = true;
  const Scene racks = scenes(cluster, options).at(0);
  const double uplink = kModel / (10 * kGbit);
  EXPECT_NEAR(simulate(flat).seconds, 8 * uplink, 8 * uplink * 0.05);
  const double s = simulate(racks).seconds;
  EXPECT_GE(s, racks.limit_s * 0.9999);
  EXPECT_LE(s, racks.limit_s * 1.05);
  EXPECT_LT(racks.limit_s,
            uplink * 9 / 8 * 1.01);  // nine streams of the model over the box's eight NICs
  EXPECT_EQ(simulate(flat).busiest.substr(0, 4), "rack");
}

std::string refusal(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RackModel, RefusesCostsThatAreWrong) {
  const auto costs = [](const std::string& text) {
    return refusal([&] { parse_costs(text, "costs.toml"); });
  };
  EXPECT_EQ(costs("send_byte_ns = 0.25\nshared_cores = 2\nframing = 1.05\n"), "accepted");
  EXPECT_THAT(costs("send_byte_ns = -1"),
              HasSubstr("costs.toml:1:16: send_byte_ns must be a number"));
  EXPECT_THAT(costs("framing = 0.5"), HasSubstr("framing must be a number from 1"));
  EXPECT_THAT(costs("wakeup_us = nan"), HasSubstr("wakeup_us must be a number"));
  EXPECT_THAT(costs("wakeup_us = \"5\""), HasSubstr("wakeup_us must be a number"));
  EXPECT_THAT(costs("shared_cores = 1.5"), HasSubstr("shared_cores must be an integer"));
  EXPECT_THAT(costs("shared_cores = -2"), HasSubstr("shared_cores must be a number from 0"));
  EXPECT_THAT(costs("send_bite_ns = 1"), HasSubstr("there is no cost 'send_bite_ns', only"));
  EXPECT_THAT(costs("a ="), HasSubstr("costs.toml:1:"));
  EXPECT_THAT(refusal([] { load_costs("/nowhere/costs.toml"); }), HasSubstr("No such file"));
}

TEST(RackModel, RefusesScenesThatCannotBe) {
  const std::string cluster = host("w", "worker", 4, 1, 10) + host("b", "box", 2, 1, 10);
  const auto with = [&](const std::function<void(SceneOptions&)>& change,
                        const JobSpec& spec = job("resnet18")) {
    SceneOptions options;
    change(options);
    return refusal([&] { scenes(cluster, options, spec); });
  };
  EXPECT_THAT(with([](SceneOptions& o) { o.bundle = 0; }), HasSubstr("--bundle is 0"));
  EXPECT_THAT(with([](SceneOptions& o) { o.parent = true; }), HasSubstr("need --racks"));
  EXPECT_THAT(with([](SceneOptions& o) { o.uplink_gbit_s = 10; }), HasSubstr("need --racks"));
  EXPECT_THAT(with([](SceneOptions& o) { o.racks = 5; }), HasSubstr("--racks is 5"));
  EXPECT_THAT(with([](SceneOptions& o) { o.racks = 2, o.parent = true; }),
              HasSubstr("need 3 hosts of role box, and the cluster has 2"));
  EXPECT_THAT(with([](SceneOptions& o) { o.racks = 1, o.uplink_gbit_s = -1; }),
              HasSubstr("--uplink-gbps"));
  EXPECT_THAT(with([](SceneOptions& o) { o.placement.ranks = 9; }), HasSubstr("--ranks is 9"));
  EXPECT_THAT(with([](SceneOptions& o) { o.shared_memory = true, o.placement.ranks = 5000; }),
              HasSubstr("--ranks is 5000"));
  JobSpec half = job("resnet18");
  half.gradient_dtype = half.parameter_dtype = "bf16";
  EXPECT_THAT(with([](SceneOptions& o) { o.racks = 1, o.parent = true; }, half),
              HasSubstr("--dtype is bf16"));
}

}  // namespace rack_model_test
}  // namespace phub::rack_model
