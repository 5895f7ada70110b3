// Matrices of a saved job whose factors are sent: their chunks stay as they were, also where
// another number of cores would have others, and the job goes on to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/worker/server_process.h"
#include "tests/worker/training.h"
#include "worker/worker.h"

namespace phub::testing {
namespace restored_factors_test {

constexpr uint32_t kLongMs = 60'000;
constexpr uint64_t kRows = 150, kColumns = 20;
constexpr uint32_t kPairs = 3;

JobSpec spec_of(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.1}, {"momentum", 0.9}};
  spec.lease_ms = 30'000;  // nobody is to be lost for being slow
  spec.keys = {{.name = "bias", .elements = 7},
               {.name = "m", .elements = kRows * kColumns, .shape = {kRows, kColumns}}};
  EXPECT_EQ(set_factors(spec, "m*", kPairs), 1u);
  return spec;
}

void train(Worker& worker, uint64_t first, uint64_t last) {
  for (uint64_t round = first; round <= last; ++round) {
    std::mt19937 random(static_cast<uint32_t>(round));
    std::vector<float> left(kPairs * kRows), right(kPairs * kColumns);
    for (float& x : left) x = static_cast<float>(random() % 2001) / 1000 - 1;
    for (float& x : right) x = static_cast<float>(random() % 2001) / 1000 - 1;
    worker.push_null(0);
    worker.push_factors(1, {left.data(), right.data(), kPairs});
    worker.wait_all();
  }
}

std::vector<float> parameters_of(const Worker& worker) {
  const auto parameters = worker.parameters(1);
  return {parameters.begin(), parameters.end()};
}

TEST(RestoredFactors, GoOnWithTheChunksThatTheyHad) {
  const TemporaryDirectory directory = TemporaryDirectory::in_memory();
  std::optional<ServerProcess> server;
  const auto serve = [&](const std::string& topology) {
    server.emplace(PHUB_BINARY,
                   std::vector<std::string>{"--checkpoints", directory.path() + "/checkpoints",
                                            "--checkpoint-every", "1000000"},
                   "127.0.0.1:0", topology);
  };
  const auto join = [&](const JobSpec& spec, const char* transport) {
    WorkerOptions options = server->options(spec);
    options.transport = transport;
    options.rank = 0;
    auto worker = std::make_unique<Worker>(options);
    worker->wait_all();
    return worker;
  };
  serve("pack:1 core:2 pu:1");
  uint32_t tile_rows = 0;
  {
    const auto worker = join(spec_of("saved"), "shm");
    tile_rows = worker->spec().keys[1].tile_rows;
    EXPECT_EQ(tile_rows, 80u) << "two chunks of whole cache lines";
    train(*worker, 1, 3);
    worker->await_checkpoint(worker->checkpoint(), kLongMs);
    EXPECT_EQ(server->end(SIGKILL), -SIGKILL);
  }
  serve("pack:1 core:4 pu:1");
  const auto worker = join(spec_of("saved"), "tcp");
  ASSERT_EQ(worker->first_round(), 4u);
  EXPECT_EQ(worker->spec().keys[1].tile_rows, tile_rows);
  train(*worker, 4, 6);

  const auto other = join(spec_of("without-a-break"), "tcp");
  EXPECT_EQ(other->spec().keys[1].tile_rows, 40u);
  train(*other, 1, 6);
  EXPECT_EQ(parameters_of(*worker), parameters_of(*other));
}

}  // namespace restored_factors_test
}  // namespace phub::testing
