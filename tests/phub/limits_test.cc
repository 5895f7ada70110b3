#include "phub/plan/limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "phub/plan/models.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace limits_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A box and a job, and everything that can be said about them.
struct Case {
  JobSpec spec;
  Plan plan;
  LimitInputs inputs;

  Limits limits() const { return find_limits(plan, spec, inputs); }
};

LimitInputs everything() {
  return {.link_gbit_s = 100,
          .pcie_gb_s = 15,
          .pcie_node_gb_s = 60,
          .memory_gb_s = 150,
          .core_gb_s = 20,
          .worker_link_gbit_s = 50,
          .images_per_s = 400,
          .batch = 64};
}

Case make_case(uint32_t ranks, const char* optimizer = "nesterov", uint32_t nics = 4,
               const char* gradient = "f32", const char* parameter = "f32") {
  Case c;
  c.spec = {.name = "resnet50", .keys = model("resnet50").keys, .optimizer = optimizer};
  c.spec.max_ranks = c.spec.world_size = ranks;
  c.spec.gradient_dtype = gradient;
  c.spec.parameter_dtype = parameter;
  numa::Topology topology = numa::from_synthetic("pack:2 core:8 pu:1");
  numa::set_nics(topology, nics);
  c.plan = make_plan(topology, c.spec.keys, {.ranks = ranks});
  c.inputs = everything();
  c.inputs.nics = nics > 0;
  return c;
}

const Limit& find(const Limits& limits, const std::string& resource) {
  for (const Limit& limit : limits.all) {
    if (limit.resource == resource) return limit;
  }
  throw std::runtime_error("no limit for " + resource);
}

// One node, one NIC, one core and a key of a million elements: everything by hand.
Case by_hand(const char* optimizer, const char* gradient, const char* parameter) {
  Case c;
  c.spec = {.name = "m", .keys = {{.name = "a", .elements = 1'000'000}}, .optimizer = optimizer};
  c.spec.max_ranks = c.spec.world_size = 10;
  c.spec.gradient_dtype = gradient;
  c.spec.parameter_dtype = parameter;
  numa::Topology topology = numa::from_synthetic("pack:1 core:1 pu:1");
  numa::set_nics(topology, 1);
  c.plan = make_plan(topology, c.spec.keys, {.ranks = 10});
  c.inputs = everything();
  return c;
}

TEST(Limits, BytesByHand) {
  struct Expected {
    const char *optimizer, *gradient, *parameter;
    // MB per round with 10 workers.
    double nic_in, nic_out, memory_in, memory_out, core_in, core_out;
  };
  const Expected table[] = {
      // The sum alone: W gradients come in and are read, one result is written, W are read.
      {"none", "f32", "f32", 40, 40, 40 + 4, 40 + 40, 40, 4},
      // Parameters are read and written besides.
      {"sgd", "f32", "f32", 40, 40, 40 + 4, 40 + 40 + 4, 44, 4},
      // … and one array of state, or two.
      {"nesterov", "f32", "f32", 40, 40, 40 + 8, 40 + 40 + 8, 48, 8},
      {"adam", "f32", "f32", 40, 40, 40 + 12, 40 + 40 + 12, 52, 12},
      // 16 bits travel; the f32 master is read and written, a 16-bit copy is written.
      {"adam", "bf16", "bf16", 20, 20, 20 + 12 + 2, 20 + 20 + 12, 32, 14},
      {"sgd", "bf16", "f32", 20, 40, 20 + 4, 20 + 40 + 4, 24, 4},
      {"none", "f32", "f16", 40, 20, 40 + 2, 40 + 20, 40, 2},
  };
  for (const Expected& e : table) {
    SCOPED_TRACE(std::string(e.optimizer) + " " + e.gradient + " " + e.parameter);
    const Limits limits = by_hand(e.optimizer, e.gradient, e.parameter).limits();
    const auto expect = [&](const char* resource, double in, double out) {
      const Traffic bytes = find(limits, resource).bytes(10);
      EXPECT_DOUBLE_EQ(bytes.in, in * 1e6) << resource;
      EXPECT_DOUBLE_EQ(bytes.out, out * 1e6) << resource;
    };
    expect("links", e.nic_in, e.nic_out);
    expect("PCIe", e.nic_in, e.nic_out);
    expect("PCIe of a node", e.nic_in, e.nic_out);
    expect("memory", e.memory_in, e.memory_out);
    expect("cores", e.core_in, e.core_out);
    expect("worker links", e.nic_out / 10, e.nic_in / 10);
  }
}

TEST(Limits, SecondsByHand) {
  const Limits limits = by_hand("nesterov", "f32", "f32").limits();
  EXPECT_DOUBLE_EQ(find(limits, "links").seconds(10), 40e6 / 12.5e9);         // larger way
  EXPECT_DOUBLE_EQ(find(limits, "PCIe").seconds(10), 40e6 / 15e9);            // larger way
  EXPECT_DOUBLE_EQ(find(limits, "PCIe of a node").seconds(10), 80e6 / 60e9);  // both
  EXPECT_DOUBLE_EQ(find(limits, "memory").seconds(10), 136e6 / 150e9);        // both
  EXPECT_DOUBLE_EQ(find(limits, "cores").seconds(10), 56e6 / 20e9);           // both
  EXPECT_DOUBLE_EQ(find(limits, "worker links").seconds(10), 4e6 / 6.25e9);
  EXPECT_EQ(limits.all[limits.binding].resource, "links");
  EXPECT_DOUBLE_EQ(limits.seconds, 3.2e-3);
  EXPECT_DOUBLE_EQ(*limits.wanted_seconds, 64.0 / 400);
  EXPECT_EQ(limits.workers_fed, 500u) << "0.16 s x 12.5 GB/s / 4 MB";
  EXPECT_EQ(limits.all[*limits.feeding_binds].resource, "links");
  EXPECT_EQ(find(limits, "cores").workers_within(0.16), 796u) << "(3.2 GB - 16 MB) / 4 MB";
  EXPECT_EQ(find(limits, "memory").workers_within(0.16), 1998u) << "(24 GB - 16 MB) / 12 MB";
  EXPECT_EQ(find(limits, "worker links").workers_within(0.16), std::nullopt);
}

// With DDIO, NICs and cores meet in the cache; memory sees the optimizer alone.
TEST(Limits, DdioLeavesTheOptimizer) {
  Case c = by_hand("nesterov", "f32", "f32");
  c.inputs.ddio = true;
  const Limits limits = c.limits();
  EXPECT_DOUBLE_EQ(find(limits, "memory").bytes(10).in, 8e6);
  EXPECT_DOUBLE_EQ(find(limits, "memory").bytes(10).out, 8e6);
  EXPECT_EQ(find(limits, "memory").workers_within(0.16), std::nullopt);
}

// bench/FIGURES.md: over shared memory the limit is (workers + 4) x model bytes.
TEST(Limits, SharedMemoryReadsGradientsInPlace) {
  const Case c = make_case(8, "nesterov", 0);
  const Limits limits = c.limits();
  ASSERT_EQ(limits.all.size(), 2u);
  const Limit& memory = find(limits, "memory");
  const double half = 25'557'032.0 * 4 / 2;
  const Traffic bytes = memory.bytes(8);
  EXPECT_NEAR(bytes.in + bytes.out, (8 + 4) * half, 1e-3 * half) << "a node has half of the model";
  EXPECT_THAT(describe(limits, c.inputs), HasSubstr("no NICs: links and PCIe carry nothing"));
}

// Whatever the inputs: the slowest binds; as many workers as are fed fit into the wanted time, and
// one more does not; more workers take no less time.
TEST(Limits, HoldForAnyInputs) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto draw = [&] { return std::exp(std::uniform_real_distribution<double>(-1, 6)(random)); };
  const char* optimizers[] = {"none", "sgd", "nesterov", "adam"};
  const char* dtypes[] = {"f32", "bf16"};
  for (int i = 0; i < 60; i++) {
    Case c = make_case(1 + random() % 60, optimizers[random() % 4], 1 + random() % 6,
                       dtypes[random() % 2], dtypes[random() % 2]);
    c.inputs = {draw(), draw(), draw(), draw(), draw(),
                draw(), draw(), draw(), true,   random() % 2 == 0};
    const Limits limits = c.limits();
    ASSERT_EQ(limits.all.size(), 6u);
    EXPECT_THAT(limits.missing, ::testing::IsEmpty());
    double slowest = 0;
    std::optional<uint64_t> least;
    for (const Limit& limit : limits.all) {
      slowest = std::max(slowest, limit.seconds(static_cast<double>(limits.workers)));
      const auto fed = limit.workers_within(*limits.wanted_seconds);
      if (fed && (!least || *fed < *least)) least = fed;
      double before = 0;
      for (double workers : {1, 2, 3, 17, 400}) {
        EXPECT_GE(limit.seconds(workers), before) << limit.resource;
        before = limit.seconds(workers);
      }
    }
    EXPECT_EQ(limits.seconds, slowest);
    EXPECT_EQ(limits.all[limits.binding].seconds(static_cast<double>(limits.workers)), slowest);
    ASSERT_EQ(limits.workers_fed, least);
    const double wanted = *limits.wanted_seconds * (1 + 1e-9);
    const auto fed = static_cast<double>(*limits.workers_fed);
    const auto worst = [&](double workers) {
      double seconds = 0;
      for (const Limit& l : limits.all) seconds = std::max(seconds, l.seconds(workers));
      return seconds;
    };
    EXPECT_TRUE(fed == 0 || worst(fed) <= wanted) << worst(fed) << " > " << wanted;
    EXPECT_GT(worst(fed + 1), *limits.wanted_seconds * (1 - 1e-9));
    EXPECT_LE(*limits.images_per_worker, *c.inputs.images_per_s);
    EXPECT_EQ(static_cast<double>(limits.workers) <= fed,
              *limits.images_per_worker >= *c.inputs.images_per_s * (1 - 1e-9));
  }
}

// The PBox of the paper ("Parameter Box", section 2): ten NICs of 56 Gbit/s, five on each of two
// nodes; MXNet's 190 images/s on one GPU (its table 1), batches of 32. phub/README.md shows it.
TEST(Limits, PBox) {
  Case c;
  c.spec = {.name = "resnet50", .keys = model("resnet50").keys, .optimizer = "nesterov"};
  c.spec.max_ranks = c.spec.world_size = 120;
  numa::Topology topology = numa::from_synthetic("pack:2 core:14 pu:1");
  numa::set_nics(topology, 10);
  c.plan = make_plan(topology, c.spec.keys, {.ranks = 120});
  c.inputs = {.link_gbit_s = 56, .images_per_s = 190, .batch = 32};
  const Limits limits = c.limits();
  ASSERT_EQ(limits.all.size(), 1u);

  // By hand: ResNet-50 has 25,557,032 parameters of 4 bytes; a worker wants a round every 32/190 s,
  // in which ten links of 7 GB/s carry 11.79 GB each way. Chunks divide to within a percent.
  const double model_bytes = 25'557'032.0 * 4, all_links = 10 * 56e9 / 8, wanted = 32.0 / 190;
  EXPECT_NEAR(limits.seconds, 120 * model_bytes / all_links, 0.01 * limits.seconds);
  EXPECT_NEAR(*limits.images_per_worker, 182.6, 1.9);
  const double even = all_links * wanted / model_bytes;  // if chunks divided evenly: 115.3
  EXPECT_LE(static_cast<double>(*limits.workers_fed), even);
  EXPECT_GE(static_cast<double>(*limits.workers_fed), even / 1.01 - 1);

  // What the paper's 120 workers need of each node's PCIe, both ways together: 72.8 GB/s.
  c.inputs.pcie_node_gb_s = 120 * 2 * model_bytes / 2 / wanted / 1e9;
  EXPECT_NEAR(*c.inputs.pcie_node_gb_s, 72.8, 0.05);
  EXPECT_NEAR(static_cast<double>(*find(c.limits(), "PCIe of a node").workers_within(wanted)), 120,
              1);
}

TEST(Limits, SaysWhatIsMissing) {
  Case c = make_case(8);
  c.inputs = {.memory_gb_s = 100};
  const Limits limits = c.limits();
  EXPECT_EQ(limits.workers_fed, std::nullopt);
  EXPECT_EQ(limits.wanted_seconds, std::nullopt);
  EXPECT_THAT(limits.missing, ElementsAre(HasSubstr("--link-gbps"), HasSubstr("--pcie-gbps"),
                                          HasSubstr("--pcie-node-gbps"),
                                          HasSubstr("--worker-link-gbps"), HasSubstr("--core-gbps"),
                                          HasSubstr("--images-per-s"), HasSubstr("--batch")));
  const std::string text = describe(limits, c.inputs);
  EXPECT_THAT(text, HasSubstr("memory"));
  EXPECT_THAT(text, Not(HasSubstr("images/s each")));
  c.inputs = {};
  EXPECT_THAT(describe(c.limits(), c.inputs), HasSubstr("unknown: no rate was given"));
}

TEST(Limits, RefusesWhatIsNoRate) {
  Case c = make_case(2);
  for (double wrong : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    c.inputs = everything();
    c.inputs.memory_gb_s = wrong;
    testing::expect_error(ErrorCode::kInvalid, "--memory-gbps is", [&] { c.limits(); });
  }
}

TEST(Limits, JsonSaysTheSame) {
  const Case c = make_case(16);
  const Limits limits = c.limits();
  const auto json = nlohmann::json::parse(to_json(limits, c.inputs));
  EXPECT_EQ(json.at("workers"), 16);
  EXPECT_EQ(json.at("resources").size(), 6u);
  EXPECT_EQ(json.at("workers_fed"), *limits.workers_fed);
  EXPECT_EQ(json.at("binding"), limits.all[limits.binding].resource);
  EXPECT_DOUBLE_EQ(json.at("rounds_per_s").get<double>() * limits.seconds, 1);
  EXPECT_EQ(json.at("inputs").at("link_gbit_s"), 100.0);
  double slowest = 0;
  for (const auto& r : json.at("resources"))
    slowest = std::max(slowest, r.at("seconds").get<double>());
  EXPECT_DOUBLE_EQ(slowest, limits.seconds);
}

}  // namespace limits_test
}  // namespace phub
