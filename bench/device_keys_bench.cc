// A round of keys in the memory of a device whose bus has a stated rate: the copies to the host,
// the exchange, and the copies back. Devices are of the host (worker/device/host_device.h), so the
// bus is emulated; the exchange is real.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "bench/zerocompute/measures.h"
#include "worker/device/host_device.h"
#include "worker/device_keys.h"
#include "worker/examples/processes.h"
#include "worker/examples/program.h"

namespace phub::device_keys_bench {
namespace {

struct Options {
  double mb = 100;     // of all keys
  double key_mb = 0;   // of each; 0: there is one
  double bus_gb = 12;  // GB/s in each direction; 0: as fast as this machine copies
  uint32_t workers = 2;
  uint32_t rounds = 15;
  std::string transport = "shm";
  std::string optimizer = "none";
  std::string format = "f32";  // of gradients on the wire
  bool tiny = false;
};

std::vector<KeySpec> keys_of(const Options& options) {
  const auto all = static_cast<uint64_t>(options.mb * 1e6 / sizeof(float));
  const auto each =
      options.key_mb > 0
          ? std::max<uint64_t>(1, static_cast<uint64_t>(options.key_mb * 1e6 / sizeof(float)))
          : all;
  std::vector<KeySpec> keys;
  for (uint64_t at = 0; at < all; at += each) {
    keys.push_back({.name = fmt::format("w{}", keys.size()), .elements = std::min(each, all - at)});
  }
  return keys;
}

// The milliseconds of each round.
std::vector<double> times_of_rank(const Options& options, const std::string& server,
                                  uint32_t rank) {
  const std::vector<KeySpec> keys = keys_of(options);
  uint64_t elements = 0;
  for (const KeySpec& key : keys) elements += key.elements;
  // Gradients, results, and residuals of a coded format.
  const auto device =
      make_host_device({.budget_bytes = DeviceKeys::kDeviceBytes + 3 * elements * sizeof(float) +
                                        keys.size() * 512 + (1 << 20),
                        .copy_bytes_per_second = options.bus_gb * 1e9,
                        .copy_latency = std::chrono::microseconds(options.bus_gb > 0 ? 10 : 0)});
  WorkerOptions of_worker;
  of_worker.server = server;
  of_worker.transport = options.transport;
  of_worker.rank = static_cast<int32_t>(rank);
  of_worker.local_world_size = options.workers;
  of_worker.spec.name = "device-keys";
  of_worker.spec.keys = keys;
  of_worker.spec.optimizer = options.optimizer;
  of_worker.spec.gradient_dtype = options.format;
  of_worker.spec.world_size = options.workers;
  of_worker.spec.initial = "zeros";
  of_worker.spec.lease_ms = 10'000;  // on a busy machine
  Worker worker(of_worker);
  std::vector<double> times;
  {
    const auto stream = device->make_stream("program");
    const DeviceMemory gradient(*device, elements * sizeof(float), "gradients");
    const DeviceMemory result(*device, elements * sizeof(float), "results");
    stream->fill(gradient.floats(), 1e-3f, elements);
    stream->synchronize();
    DeviceKeys on_device(worker, *device);
    for (uint32_t round = 0; round < options.rounds + 2; ++round) {
      worker.barrier();
      const auto begin = std::chrono::steady_clock::now();
      uint64_t at = 0;
      for (size_t key = 0; key < keys.size(); at += keys[key++].elements) {
        on_device.push(key, gradient.floats() + at, *stream);
      }
      at = 0;
      for (size_t key = 0; key < keys.size(); at += keys[key++].elements) {
        on_device.pull(key, result.floats() + at, *stream);
      }
      stream->synchronize();
      on_device.check();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      if (round >= 2) times.push_back(took.count());
    }
  }
  worker.leave();
  return times;
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("A round of keys on devices of the host with an emulated bus.");
  app.add_option("--mb", options.mb, "Of all keys")->check(CLI::PositiveNumber);
  app.add_option("--key-mb", options.key_mb, "Of each key; 0: there is one")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--bus", options.bus_gb, "GB/s each way; 0: as fast as this machine copies")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--workers", options.workers)->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  app.add_option("--transport", options.transport)->check(CLI::IsMember({"shm", "tcp"}));
  app.add_option("--optimizer", options.optimizer);
  app.add_option("--format", options.format, "Of gradients on the wire: f32, int8, topk, ...");
  app.add_flag("--tiny", options.tiny, "A small key, once: whether it works");
  examples::parse_or_exit(app, argc, argv);
  if (options.tiny) options.mb = 1, options.rounds = 1;
  return options;
}

void run(const Options& options) {
  const OwnServer server(beside_this_program("phub"), options.transport, {});
  std::vector<std::future<std::vector<double>>> ranks;
  for (uint32_t rank = 0; rank < options.workers; ++rank) {
    ranks.push_back(std::async(
        std::launch::async, [&, rank] { return times_of_rank(options, server.address(), rank); }));
  }
  std::vector<double> of_first = ranks.front().get();
  for (size_t rank = 1; rank < ranks.size(); ++rank) ranks[rank].get();
  std::ranges::sort(of_first);
  const std::string bus = options.bus_gb > 0 ? fmt::format("{:g} GB/s (emulated)", options.bus_gb)
                                             : "this machine's copies";
  fmt::print("{} keys, {:g} MB, {}, {} workers, {}, bus {}: {:.1f} ms a round (fastest {:.1f})\n",
             keys_of(options).size(), options.mb, options.format, options.workers,
             options.transport, bus, median(of_first), of_first.front());
}

}  // namespace
}  // namespace phub::device_keys_bench

int main(int argc, char** argv) {
  using namespace phub::device_keys_bench;  // NOLINT
  return phub::examples::status_of("device_keys_bench", [&] { run(parse(argc, argv)); });
}
