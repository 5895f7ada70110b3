// Parameters in host memory: that they are what an optimizer makes of all updates, and cost what
// they are there to cost; and the mini-batches of a clock.
#include "bench/geeps_host.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "bench/geeps_net.h"
#include "bench/geeps_run.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace geeps_host_test {

std::vector<float> on_device(Device& device, const float* from, size_t elements) {
  std::vector<float> values(elements);
  device.read(values.data(), from, elements * sizeof(float));
  return values;
}

TEST(GeepsHost, ParametersAreThoseOfAllUpdates) {
  const std::vector<geeps::TableSpec> tables = {
      {.name = "data", .row_floats = 4, .keys = geeps::dense(9), .local = true},
      {.name = "small", .row_floats = 2, .keys = geeps::dense(3)},
      {.name = "large", .row_floats = 5, .keys = geeps::dense(7)}};
  JobSpec spec = job_of(tables);
  spec.optimizer = "sgd";
  spec.hyper = {{"lr", 0.5}};
  geeps::StandaloneExchange exchange(spec);
  const auto device = make_device({}, 1 << 20);
  const auto compute = device->make_stream("compute");
  HostParameters parameters(*device, exchange, tables, *compute);
  std::vector<float> sums(3, 0);
  for (uint32_t clock = 1; clock <= 3; ++clock) {
    for (const uint32_t table : {1U, 2U}) {
      const size_t elements = table == 1 ? 6 : 35;
      EXPECT_EQ(on_device(*device, parameters.read(table), elements),
                std::vector<float>(elements, -0.5F * sums[table]));
      for (uint32_t batch = 0; batch < clock; ++batch) {
        const auto value = static_cast<float>(clock + 10 * batch + 100 * table);
        const std::vector<float> gradient(elements, value);
        device->write(parameters.gradient(), gradient.data(), elements * sizeof(float));
        parameters.update(table);
        sums[table] += value;
      }
      parameters.clock(table);
    }
  }
  parameters.wait_all();
  EXPECT_EQ(exchange.parameters(0)[5], -0.5F * sums[1]);
  EXPECT_EQ(exchange.parameters(1)[34], -0.5F * sums[2]);
}

// Every read and every update copies a layer, while nothing is computed.
TEST(GeepsHost, NothingIsCachedAndNothingOverlaps) {
  const Machine machine{.copy_bytes_per_second = 1e9};
  const Training training(part_of(adam_like(), 100), machine, {.whole = true});
  uint64_t bytes = 0;
  for (const geeps::TableSpec& table : training.tables()) {
    if (!table.local) bytes += table.keys.size() * table.row_floats * sizeof(float);
  }
  geeps::StandaloneExchange exchange(job_of(training.tables()));
  const auto device = make_device(machine, HostParameters::device_bytes(training.tables()));
  const auto compute = device->make_stream("compute");
  HostParameters parameters(*device, exchange, training.tables(), *compute);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 2; ++i) training.iterate(parameters, *compute);
  compute->synchronize();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(device->stats().bytes_to_device, 2 * 2 * bytes);
  EXPECT_EQ(device->stats().bytes_to_host, 2 * bytes);
  const std::chrono::duration<double> computing = training.compute_time();
  const double copying = 3 * static_cast<double>(bytes) / machine.copy_bytes_per_second;
  EXPECT_GE(took.count(), 2 * (computing.count() + copying));
  parameters.wait_all();
}

// As many images in smaller mini-batches take as long to compute where memory is no limit, are
// pushed as often, and need less memory.
TEST(GeepsHost, AClockHasSeveralMiniBatches) {
  const Machine machine{.memory_bytes_per_second = 1e30};
  const Net net = part_of(adam_like(), 200);
  Net half = net;
  half.images /= 2;
  const Training whole(net, machine), halves(half, machine, {.batches = 2});
  const std::chrono::duration<double> difference = halves.compute_time() - whole.compute_time();
  EXPECT_NEAR(difference.count(), 0, 1e-6);
  EXPECT_LT(halves.least_unmoved_bytes(), whole.least_unmoved_bytes());
  TrainingRun run(halves, machine, halves.everything_bytes());
  run.seconds_per_iteration(2);
  run.cache().wait_all();
  EXPECT_EQ(run.cache().stats().pushes, 3 * geeps::keys_of(halves.tables()).size());
  EXPECT_EQ(run.cache().stats().outside_sequence, 0U);
}

}  // namespace geeps_host_test
}  // namespace phub::geeps_bench
