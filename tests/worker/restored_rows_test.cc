// Tables of a saved job whose rows are sent: their parameters and state are those of all rows, and
// the job goes on to the bit.
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
namespace restored_rows_test {

constexpr uint32_t kLongMs = 60'000;
constexpr uint64_t kRows = 150, kColumns = 20;
constexpr uint32_t kMost = 9;

JobSpec spec_of(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.1}, {"momentum", 0.9}};
  spec.lease_ms = 30'000;  // nobody is to be lost for being slow
  for (const char* key : {"lazy", "dense"}) {
    spec.keys.push_back({.name = key, .elements = kRows * kColumns, .shape = {kRows, kColumns}});
  }
  EXPECT_EQ(set_rows(spec, "*", kMost, false), 2u);
  EXPECT_EQ(set_rows(spec, "lazy", kMost, true), 1u);
  return spec;
}

void train(Worker& worker, uint64_t first, uint64_t last) {
  for (uint64_t round = first; round <= last; ++round) {
    std::mt19937 random(static_cast<uint32_t>(round));
    std::vector<int64_t> rows(kMost);
    std::vector<float> elements(kMost * kColumns);
    for (int64_t& row : rows) row = static_cast<int64_t>(random() % kRows);
    for (float& x : elements) x = static_cast<float>(random() % 2001) / 1000 - 1;
    for (size_t key : {0, 1}) worker.push_rows(key, {rows, elements});
    worker.wait_all();
  }
}

std::vector<float> parameters_of(const Worker& worker) {
  std::vector<float> all;
  for (size_t key : {0, 1}) {
    const auto parameters = worker.parameters(key);
    all.insert(all.end(), parameters.begin(), parameters.end());
  }
  return all;
}

TEST(RestoredRows, GoOnToTheBit) {
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
  {
    const auto worker = join(spec_of("saved"), "shm");
    train(*worker, 1, 3);
    worker->await_checkpoint(worker->checkpoint(), kLongMs);
    EXPECT_EQ(server->end(SIGKILL), -SIGKILL);
  }
  serve("pack:1 core:4 pu:1");
  const auto worker = join(spec_of("saved"), "tcp");
  ASSERT_EQ(worker->first_round(), 4u);
  train(*worker, 4, 6);

  const auto other = join(spec_of("without-a-break"), "tcp");
  train(*other, 1, 6);
  EXPECT_EQ(parameters_of(*worker), parameters_of(*other));
}

}  // namespace restored_rows_test
}  // namespace phub::testing
