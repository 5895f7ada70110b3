// The cost of setting up a large job: the plan, and the messages of a join. It is not on the path
// of a gradient, but every rank waits for it.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "numa/topology.h"
#include "phub/job/job_part.h"
#include "phub/plan/models.h"
#include "phub/plan/plan.h"
#include "transport/control/job_spec.h"
#include "transport/control/messages_json.h"

namespace phub {
namespace {

constexpr uint32_t kChunkElements = 8192;

// Boxes by the number of their NUMA nodes, cores and NICs.
struct BoxSize {
  const char* description;
  uint32_t nics;
};
constexpr BoxSize kSmall = {"pack:1 core:2 pu:1", 0};
constexpr BoxSize kTwoSockets = {"pack:2 core:14 pu:1", 10};
constexpr BoxSize kLarge = {"pack:8 core:64 pu:1", 16};

numa::Topology topology_of(const BoxSize& box) {
  numa::Topology topology = numa::from_synthetic(box.description);
  numa::set_nics(topology, box.nics);
  return topology;
}

// Keys of real models' sizes: most of them small, most of the bytes in large ones.
std::vector<KeySpec> keys_with_chunks(uint64_t chunks) {
  constexpr uint64_t kWhole = 9;  // chunks of a key, besides one that is not whole
  std::vector<KeySpec> keys;
  for (uint64_t k = 0; k < chunks / (kWhole + 1); ++k) {
    keys.push_back({.name = fmt::format("encoder.layer.{}.weight", k),
                    .elements = kWhole * kChunkElements + 1 + k * 37 % kChunkElements});
  }
  return keys;
}

std::vector<KeySpec> small_keys(uint64_t count) {
  std::vector<KeySpec> keys;
  for (uint64_t k = 0; k < count; ++k) {
    keys.push_back({.name = fmt::format("encoder.layer.{}.attention.output.dense.weight", k),
                    .elements = 1 + k * 37 % 200});
  }
  return keys;
}

JobSpec spec_of(std::vector<KeySpec> keys) {
  JobSpec spec;
  spec.name = "large";
  spec.keys = std::move(keys);
  spec.world_size = spec.max_ranks = 8;
  spec.optimizer = "nesterov";
  return spec;
}

void plan(benchmark::State& state, const BoxSize& box) {
  const numa::Topology topology = topology_of(box);
  const auto keys = keys_with_chunks(static_cast<uint64_t>(state.range(0)));
  for ([[maybe_unused]] const auto _ : state) {
    benchmark::DoNotOptimize(make_plan(topology, keys, {.ranks = 8}));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void encode_join(benchmark::State& state) {
  JoinRequest request;
  request.spec = spec_of(small_keys(static_cast<uint64_t>(state.range(0))));
  std::string text;
  for ([[maybe_unused]] const auto _ : state) text = to_json(request);
  state.counters["bytes"] = static_cast<double>(text.size());
}

void decode_join(benchmark::State& state) {
  JoinRequest request;
  request.spec = spec_of(small_keys(static_cast<uint64_t>(state.range(0))));
  const std::string text = to_json(request);
  for ([[maybe_unused]] const auto _ : state)
    benchmark::DoNotOptimize(from_json<JoinRequest>(text));
}

JoinReply reply_of(uint64_t keys) {
  JoinReply reply;
  reply.offer = {.transport = "shm", .address = "@phub", .ticket = "ticket"};
  reply.spec = spec_of(small_keys(keys));
  reply.layout = routes_of(make_plan(topology_of(kTwoSockets), reply.spec.keys, {.ranks = 8}));
  return reply;
}

void encode_reply(benchmark::State& state) {
  const JoinReply reply = reply_of(static_cast<uint64_t>(state.range(0)));
  std::string text;
  for ([[maybe_unused]] const auto _ : state) text = to_json(reply);
  state.counters["bytes"] = static_cast<double>(text.size());
}

void decode_reply(benchmark::State& state) {
  const std::string text = to_json(reply_of(static_cast<uint64_t>(state.range(0))));
  for ([[maybe_unused]] const auto _ : state) benchmark::DoNotOptimize(from_json<JoinReply>(text));
}

// All that a box does for the first join of a job, but for making the job.
void serve_join(benchmark::State& state) {
  JoinRequest request;
  request.spec = spec_of(small_keys(static_cast<uint64_t>(state.range(0))));
  const std::string text = to_json(request);
  const numa::Topology topology = topology_of(kSmall);
  for ([[maybe_unused]] const auto _ : state) {
    JoinRequest decoded = from_json<JoinRequest>(text);
    complete_spec(decoded.spec);
    JoinReply reply;
    reply.layout = routes_of(make_plan(topology, decoded.spec.keys, {.ranks = 8}));
    reply.spec = std::move(decoded.spec);
    benchmark::DoNotOptimize(to_json(reply));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

void read_key_table(benchmark::State& state) {
  std::string text = R"({"name": "large", "keys": [)";
  for (const KeySpec& key : small_keys(static_cast<uint64_t>(state.range(0)))) {
    text += fmt::format(R"({}{{"name": "{}", "elements": {}}})", text.ends_with('[') ? "" : ", ",
                        key.name, key.elements);
  }
  text += "]}";
  for ([[maybe_unused]] const auto _ : state) {
    benchmark::DoNotOptimize(parse_key_table(text, "memory"));
  }
}

BENCHMARK_CAPTURE(plan, 2_cores, kSmall)->Arg(100'000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan, 28_cores_10_nics, kTwoSockets)->Arg(100'000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan, 512_cores_16_nics, kLarge)->Arg(100'000)->Unit(benchmark::kMillisecond);
BENCHMARK(encode_join)->Arg(50'000)->Unit(benchmark::kMillisecond);
BENCHMARK(decode_join)->Arg(50'000)->Unit(benchmark::kMillisecond);
BENCHMARK(encode_reply)->Arg(50'000)->Unit(benchmark::kMillisecond);
BENCHMARK(decode_reply)->Arg(50'000)->Unit(benchmark::kMillisecond);
BENCHMARK(serve_join)->Arg(50'000)->Unit(benchmark::kMillisecond);
BENCHMARK(read_key_table)->Arg(50'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace phub

BENCHMARK_MAIN();
