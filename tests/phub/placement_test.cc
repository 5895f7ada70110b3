#include "phub/plan/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "phub/plan/models.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace placement_test {

using ::testing::HasSubstr;

std::string host(const std::string& kind, const std::string& role, uint32_t count, uint32_t nics,
                 double link, const std::string& more = "") {
  return fmt::format(
      "[[host]]\nkind = \"{}\"\nrole = \"{}\"\ncount = {}\ntopology = \"pack:1 core:4 pu:1\"\n"
      "nics = {}\nlink_gbps = {}\n{}\n",
      kind, role, count, nics, link, more);
}

JobSpec resnet() {
  return {.name = "resnet50", .keys = model("resnet50").keys, .optimizer = "nesterov"};
}

Placements compare(const std::string& file, const PlacementOptions& options = {},
                   const LimitInputs& inputs = {}, const JobSpec& spec = resnet()) {
  return compare_placements(parse_cluster(file, "cluster.toml"), spec, {}, inputs, options);
}

const Placement& find(const Placements& placements, std::string_view name) {
  for (const Placement& p : placements.all) {
    if (p.name == name) return p;
  }
  throw std::runtime_error("no " + std::string(name));
}

std::string recommended(const Placements& placements) {
  return placements.all[placements.recommended].name;
}

constexpr double kModel = 25'557'032.0 * 4;

// W·M, W·M/S, (W-1)·M and 2(W-1)/W·M: those of a central box exactly, of shards but for how chunks
// divide. Together the shards have the bytes exactly.
TEST(Placement, BytesAreThoseOfTheTable) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 8; i++) {
    const auto w = static_cast<uint32_t>(2 + random() % 30);
    const auto s = static_cast<uint32_t>(2 + random() % 6);
    const auto nics = static_cast<uint32_t>(1 + random() % 4);
    SCOPED_TRACE(::testing::Message() << w << " workers, " << s << " boxes, " << nics << " NICs");
    const Placements all =
        compare(host("w", "worker", w, nics, 10) + host("b", "box", s, nics, 10));
    ASSERT_EQ(all.all.size(), 4u);
    const auto expect = [&](const char* name, double each, double within) {
      const Placement& p = find(all, name);
      double sum = 0;
      for (const HostLoad& load : p.hosts) {
        EXPECT_DOUBLE_EQ(load.bytes.in, load.bytes.out) << name;
        if (!load.host.box) {
          EXPECT_DOUBLE_EQ(load.bytes.in, kModel) << name << ", a worker's";
          continue;
        }
        EXPECT_NEAR(load.bytes.in, each, each * within + 1e-3) << name;
        sum += load.bytes.in;
      }
      EXPECT_NEAR(sum, each * p.boxes, 1) << name;
    };
    expect("dedicated-central", w * kModel, 0);
    expect("dedicated-sharded", w * kModel / s, 0.02);
    expect("colocated-central", (w - 1) * kModel, 0);
    expect("colocated-sharded", 2.0 * (w - 1) / w * kModel, 0.05);
    EXPECT_EQ(find(all, "dedicated-sharded").hosts.size(), w + s);
    EXPECT_EQ(find(all, "colocated-sharded").hosts.size(), w);
  }
}

// Gradients and parameters of other sizes: what a host serves comes in and what its worker sends
// goes out.
TEST(Placement, DirectionsAreApart) {
  JobSpec spec = resnet();
  spec.gradient_dtype = "bf16";
  const Placements all = compare(host("w", "worker", 4, 1, 10), {}, {}, spec);
  const Placement& central = find(all, "colocated-central");
  EXPECT_DOUBLE_EQ(central.hosts[0].bytes.in, 3 * kModel / 2);
  EXPECT_DOUBLE_EQ(central.hosts[0].bytes.out, 3 * kModel);
  EXPECT_DOUBLE_EQ(central.hosts[1].bytes.in, kModel);
  EXPECT_DOUBLE_EQ(central.hosts[1].bytes.out, kModel / 2);
}

// A host with a shard and a worker: the bytes of both at its memory, by hand.
TEST(Placement, MemoryAddsShardAndWorker) {
  JobSpec spec{.name = "m", .keys = {{.name = "a", .elements = 1'000'000}}, .optimizer = "sgd"};
  spec.world_size = spec.max_ranks = 10;
  numa::Topology topology = numa::from_synthetic("pack:1 core:1 pu:1");
  numa::set_nics(topology, 1);
  const Plan plan = make_plan(topology, spec.keys, {.ranks = 10});
  const LimitInputs inputs{.link_gbit_s = 1, .memory_gb_s = 100};
  const auto memory = [&](const Host& host) {
    return find_limits(plan, host, spec, inputs).all.at(1).bytes(10);
  };
  // The box alone: 40 MB in, 80 out, parameters of 4 MB read and written. The worker: 4 MB each.
  EXPECT_DOUBLE_EQ(memory({.box = 0}).in, 44e6);
  EXPECT_DOUBLE_EQ(memory({.box = 0}).out, 84e6);
  EXPECT_DOUBLE_EQ(memory({.worker = true}).in, 4e6);
  EXPECT_DOUBLE_EQ(memory({.worker = true}).out, 4e6);
  EXPECT_DOUBLE_EQ(memory({.box = 0, .worker = true}).in, 48e6);
  EXPECT_DOUBLE_EQ(memory({.box = 0, .worker = true}).out, 88e6);
}

TEST(Placement, TimeIsBytesOverLinks) {
  const Placements all = compare(host("w", "worker", 4, 1, 1) + host("b", "box", 1, 1, 1));
  EXPECT_DOUBLE_EQ(find(all, "dedicated-central").seconds, 4 * kModel / 125e6);
  EXPECT_DOUBLE_EQ(find(all, "colocated-central").seconds, 3 * kModel / 125e6);
  EXPECT_NEAR(find(all, "colocated-sharded").seconds, 1.5 * kModel / 125e6, 0.01);
}

TEST(Placement, RecommendationFlips) {
  const std::string workers = host("w", "worker", 8, 1, 10);
  // A box with one link as fast as a worker's is worse than a part on each worker's host …
  EXPECT_EQ(recommended(compare(workers + host("b", "box", 1, 1, 10))), "colocated-sharded");
  // … and one with as many links as workers is better: M at each link, not 2(W-1)/W·M.
  EXPECT_EQ(recommended(compare(workers + host("b", "box", 1, 8, 10))), "dedicated-central");
  // The same links in eight boxes.
  EXPECT_EQ(recommended(compare(workers + host("b", "box", 8, 1, 10))), "dedicated-sharded");
  EXPECT_EQ(recommended(compare(workers + host("b", "box", 8, 1, 10), {.boxes = 2})),
            "colocated-sharded");
  // A worker's host with more links than all others.
  EXPECT_EQ(recommended(compare(workers + host("big", "worker", 1, 16, 10))), "colocated-central");
  // Where computing takes longer than any exchange, no host that only serves is worth it.
  const Placements slow =
      compare(workers + host("b", "box", 1, 8, 10), {}, {.images_per_s = 1, .batch = 32});
  EXPECT_EQ(recommended(slow), "colocated-central");
  EXPECT_THAT(slow.reason, HasSubstr("computing takes longer"));
  EXPECT_DOUBLE_EQ(*slow.all[0].images, 8);
}

TEST(Placement, SaysWhatIsLeftOut) {
  const Placements all = compare(host("w", "worker", 3, 1, 10));
  EXPECT_EQ(all.all.size(), 2u);
  EXPECT_THAT(all.left_out, ::testing::ElementsAre(HasSubstr("no host of role box"),
                                                   HasSubstr("needs 2 hosts of role box")));
  EXPECT_EQ(compare(host("w", "worker", 3, 1, 10), {.ranks = 1}).all.size(), 1u);
}

std::string error_of(const std::string& file, const PlacementOptions& options = {}) {
  return testing::error_of(ErrorCode::kInvalid, [&] { compare(file, options); });
}

TEST(Placement, BadInputIsNamed) {
  const std::string good = host("w", "worker", 3, 1, 10);
  EXPECT_NO_THROW(compare(good, {}));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string file = good;
    file.replace(file.find(from), from.size(), to);
    return error_of(file);
  };
  EXPECT_THAT(error_of(""), HasSubstr("needs a [[host]]"));
  EXPECT_THAT(error_of("host = 3"), HasSubstr("needs a [[host]]"));
  EXPECT_THAT(error_of("host = [3]"), HasSubstr("needs a [[host]]"));
  EXPECT_THAT(error_of("[["), HasSubstr("cluster.toml:1:"));
  EXPECT_THAT(error_of("rack = 3\n" + good), HasSubstr("unknown 'rack'"));
  EXPECT_THAT(error_of(good + good), HasSubstr("two kinds 'w'"));
  EXPECT_THAT(error_of(host("b", "box", 3, 1, 10)), HasSubstr("role = \"worker\""));
  EXPECT_THAT(with("kind = \"w\"", ""), HasSubstr("a host needs 'kind'"));
  EXPECT_THAT(with("\"worker\"", "\"boss\""), HasSubstr("cluster.toml:3:8: role must be"));
  EXPECT_THAT(with("count = 3", "count = 0"), HasSubstr("count must be an integer from 1"));
  EXPECT_THAT(with("count = 3", "count = 1e3"), HasSubstr("count must be an integer from 1"));
  EXPECT_THAT(with("count = 3", ""), HasSubstr("a host needs 'count'"));
  EXPECT_THAT(with("nics = 1", "nics = 0"), HasSubstr("nics must be an integer from 1"));
  EXPECT_THAT(with("pack:1", "pack:x"), HasSubstr("synthetic"));
  EXPECT_THAT(with("link_gbps = 10", ""), HasSubstr("a host needs 'link_gbps'"));
  for (const char* wrong : {"0", "-1", "inf", "nan", "\"10\"", "true"}) {
    EXPECT_THAT(with("link_gbps = 10", std::string("link_gbps = ") + wrong),
                HasSubstr("link_gbps must be a positive number"));
  }
  EXPECT_THAT(with("nics = 1", "nics = 1\nlink_gbs = 1"), HasSubstr("no 'link_gbs'"));
  EXPECT_THAT(error_of(good + host("b", "box", 1, 1, 10, "images_per_s = 3")),
              HasSubstr("images_per_s is of workers"));
  EXPECT_THAT(error_of(good, {.placement = "central"}), HasSubstr("--placement must be one of"));
  EXPECT_THAT(error_of(good, {.placement = "dedicated-central"}), HasSubstr("no host of role box"));
  EXPECT_THAT(error_of(good, {.ranks = 4}), HasSubstr("--ranks is 4, and the cluster has 3"));
  EXPECT_THAT(error_of(good, {.boxes = 1}), HasSubstr("--boxes is 1, and the cluster has 0"));
}

TEST(Placement, JsonSaysTheSame) {
  const std::string file = host("w", "worker", 4, 1, 10) + host("b", "box", 2, 2, 25);
  const Placements all = compare(file, {}, {.images_per_s = 100, .batch = 32});
  const auto json = nlohmann::json::parse(to_json(all, parse_cluster(file, "f")));
  EXPECT_EQ(json.at("ranks"), 4);
  EXPECT_EQ(json.at("placements").size(), 4u);
  EXPECT_EQ(json.at("recommended"), recommended(all));
  for (size_t i = 0; i < 4; i++) {
    const auto& p = json.at("placements").at(i);
    EXPECT_EQ(p.at("placement"), all.all[i].name);
    EXPECT_DOUBLE_EQ(p.at("seconds"), all.all[i].seconds);
    EXPECT_DOUBLE_EQ(p.at("images_per_s"), *all.all[i].images);
    EXPECT_EQ(p.at("hosts").size(), all.all[i].hosts.size());
  }
}

}  // namespace placement_test
}  // namespace phub
