// The host device: rows by a prebuilt index against plain copies of as many bytes, the cost of a
// call, and copies at a set bandwidth and latency. If there is a CUDA device, the same for that.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"

namespace phub {
namespace {

constexpr size_t kBatchBytes = 32 << 20;  // more than the caches hold
constexpr double kBytesPerSecond = 12e9;  // of a PCIe 3.0 x16 slot
constexpr std::chrono::microseconds kLatency{10};

using MakeDevice = std::function<std::unique_ptr<Device>(size_t budget_bytes)>;

enum class Order { kInTurn, kRuns, kShuffled };  // the rows that an index names

std::vector<uint32_t> rows_in(Order order, size_t rows) {
  std::vector<uint32_t> all(rows);
  std::iota(all.begin(), all.end(), 0u);
  std::mt19937 engine(1);
  if (order == Order::kShuffled) std::shuffle(all.begin(), all.end(), engine);
  if (order == Order::kRuns) {  // of 64 rows
    for (size_t i = 0; i + 64 <= rows; i += 64) {
      const size_t other = engine() % (rows / 64) * 64;
      std::swap_ranges(all.begin() + i, all.begin() + i + 64, all.begin() + other);
    }
  }
  return all;
}

// Two tables, a batch's index, and a stream.
struct Rig {
  Rig(const MakeDevice& make, Order order, size_t row_floats)
      : rows(kBatchBytes / (row_floats * sizeof(float))),
        device(make(4 * kBatchBytes)),
        stream(device->make_stream("bench")),
        table_memory(*device, kBatchBytes, "table"),
        batch(*device, kBatchBytes, "batch"),
        index(*device, rows_in(order, rows)),
        table{table_memory.floats(), rows, row_floats} {
    stream->fill(table_memory.floats(), 1.0f, kBatchBytes / sizeof(float));
    stream->fill(batch.floats(), 1.0f, kBatchBytes / sizeof(float));
    stream->synchronize();
  }
  size_t bytes() const { return rows * table.row_floats * sizeof(float); }

  size_t rows;
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
  DeviceMemory table_memory;
  DeviceMemory batch;
  RowIndex index;
  Rows table;
};

void measure(const std::string& name, const MakeDevice& make, Order order, size_t row_floats,
             const std::function<void(Rig&)>& work) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) {
        Rig rig(make, order, row_floats);
        for (auto _ : state) {
          work(rig);
          rig.stream->synchronize();
        }
        state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * rig.bytes()));
      })
      ->UseRealTime()
      //         // On a busy machine, only the shortest times of several repetitions can be
      //         compared.
      ->ComputeStatistics("shortest", [](const std::vector<double>& values) {
        return *std::min_element(values.begin(), values.end());
      });
}

void measure_rows(const std::string& device, const MakeDevice& make) {
  measure(fmt::format("{}/copy", device), make, Order::kInTurn, 128, [](Rig& rig) {
    rig.stream->copy_on_device(rig.batch.data(), rig.table.data, rig.bytes());
  });
  const std::pair<Order, const char*> orders[] = {
      {Order::kInTurn, "in turn"}, {Order::kRuns, "runs of 64"}, {Order::kShuffled, "shuffled"}};
  for (const size_t row_floats : {128, 1000}) {
    for (const auto& [order, label] : orders) {
      const std::string which = fmt::format("{} floats/{}", row_floats, label);
      measure(fmt::format("{}/gather/{}", device, which), make, order, row_floats,
              [](Rig& rig) { rig.stream->gather(rig.table, rig.index, rig.batch.floats()); });
      measure(fmt::format("{}/scatter/{}", device, which), make, order, row_floats,
              [](Rig& rig) { rig.stream->scatter(rig.batch.floats(), rig.index, rig.table); });
      measure(fmt::format("{}/scatter_add/{}", device, which), make, order, row_floats,
              [](Rig& rig) { rig.stream->scatter_add(rig.batch.floats(), rig.index, rig.table); });
    }
  }
}

// A copy of this many bytes at 12 GB/s and 10 µs, from the call to the end of the wait.
void set_speed_copy(benchmark::State& state) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const auto device = make_host_device(
      {.budget_bytes = bytes, .copy_bytes_per_second = kBytesPerSecond, .copy_latency = kLatency});
  const auto stream = device->make_stream("bench");
  const DeviceMemory memory(*device, bytes, "memory");
  const HostMemory host(*device, bytes, "host");
  for (auto _ : state) {
    stream->copy_to_device(memory.data(), host.data(), bytes);
    stream->synchronize();
  }
  const double set = static_cast<double>(bytes) / kBytesPerSecond * 1e6 + kLatency.count();
  state.counters["set_us"] = set;
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
}

// Steps of 200 µs of computation, each after the copy of 1 MiB (97 µs) that it needs, into
// `buffers` buffers: with one, a copy waits for the computation before it. `set_us` is the expected
// time of a step.
void steps(benchmark::State& state) {
  constexpr size_t kBytes = 1 << 20;
  constexpr int kSteps = 200;
  constexpr std::chrono::microseconds kWork{200};
  const auto buffers = static_cast<size_t>(state.range(0));
  const auto device = make_host_device({.budget_bytes = kBytes * buffers,
                                        .copy_bytes_per_second = kBytesPerSecond,
                                        .copy_latency = kLatency});
  const auto fetch = device->make_stream("fetch");
  const auto compute = device->make_stream("compute");
  const DeviceMemory memory(*device, kBytes * buffers, "memory");
  const HostMemory host(*device, kBytes, "host");
  std::vector<std::unique_ptr<Event>> fetched(buffers);
  std::vector<std::unique_ptr<Event>> used(buffers);
  for (auto& event : fetched) event = device->make_event();
  for (auto& event : used) event = device->make_event();
  const auto begin = std::chrono::steady_clock::now();
  for (auto _ : state) {
    for (int step = 0; step < kSteps; ++step) {
      const size_t buffer = step % buffers;
      fetch->wait(*used[buffer]);
      fetch->copy_to_device(static_cast<std::byte*>(memory.data()) + buffer * kBytes, host.data(),
                            kBytes);
      fetch->record(*fetched[buffer]);
      compute->wait(*fetched[buffer]);
      compute->work_for(kWork);
      compute->record(*used[buffer]);
    }
    compute->synchronize();
  }
  const double copy_us = kBytes / kBytesPerSecond * 1e6 + kLatency.count();
  state.counters["set_us"] = buffers == 1 ? kWork.count() + copy_us : kWork.count();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  state.counters["step_us"] = took.count() / static_cast<double>(state.iterations()) / kSteps;
}

// The cost of enqueueing for the caller: a record, and empty work.
void calls(benchmark::State& state) {
  const auto device = make_host_device({.budget_bytes = 4096});
  const auto stream = device->make_stream("bench");
  const auto event = device->make_event();
  const DeviceMemory memory(*device, 4096, "memory");
  for (auto _ : state) {
    stream->fill(memory.floats(), 0.0f, 1);
    stream->record(*event);
  }
  stream->synchronize();
}

void round_trip(benchmark::State& state) {
  const auto device = make_host_device({.budget_bytes = 4096});
  const auto stream = device->make_stream("bench");
  const DeviceMemory memory(*device, 4096, "memory");
  for (auto _ : state) {
    stream->fill(memory.floats(), 0.0f, 1);
    stream->synchronize();
  }
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  phub::measure_rows(
      "host", [](size_t budget) { return phub::make_host_device({.budget_bytes = budget}); });
  if (const auto found = phub::cuda_devices(); found.devices.empty()) {
    fmt::print("no CUDA device: {}\n", found.none_because);
  } else {
    phub::measure_rows("cuda", [](size_t budget) {
      return phub::make_cuda_device({.ordinal = 0, .budget_bytes = budget});
    });
  }
  benchmark::RegisterBenchmark("host/12 GB/s, 10 us", phub::set_speed_copy)
      ->Arg(4096)
      ->Arg(1 << 20)
      ->Arg(16 << 20)
      ->UseRealTime();
  benchmark::RegisterBenchmark("host/steps", phub::steps)->Arg(1)->Arg(2)->UseRealTime();
  benchmark::RegisterBenchmark("host/enqueue and record", phub::calls)->Iterations(100000);
  benchmark::RegisterBenchmark("host/enqueue and synchronize", phub::round_trip)->UseRealTime();
  benchmark::RunSpecifiedBenchmarks();
}
