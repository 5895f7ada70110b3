#include "bench/geeps_devices.h"

#include <fmt/format.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "bench/geeps_run.h"
#include "transport/error.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace {

// 003, table 3: forward of TRL/Caffe, backward of BVLC/Caffe2 (TRL/Caffe's 111 ms have its copies).
constexpr double kForwardMs = 51, kBackwardMs = 104;
// 003, table 4, GPU to CPU: the sum of all layers, 60.9 million parameters in 16.7 ms.
constexpr double kCopyBytesPerSecond = 4 * 60.9e6 / 16.7e-3;
// Assumed of a P100: only their ratio counts, by which layers share the time of table 3.
constexpr double kFlopsPerSecond = 10.6e12, kMemoryBytesPerSecond = 732e9;

float gradient_of(uint32_t device) { return static_cast<float>(device + 1); }

class Trained {
 public:
  Trained(const Training& training, const Machine& machine, geeps::Exchange& exchange)
      : training_(training),
        device_(make_device(machine, training.everything_bytes(), training.parts())),
        compute_(device_->make_stream("compute")),
        cache_(*device_, exchange, training.tables(), cache_options(*compute_)) {
    cache_.begin_virtual();
    training_.iterate(cache_, nullptr);
    cache_.finish_sequence();
    copied_before_ = cache_.stats().bytes_copied_by_caller;
  }

  // The seconds of one of the measured iterations, which begin when all devices are there.
  double run(const Devices& devices, uint32_t device, std::barrier<>& all) {
    const auto iterate = [&](uint32_t iteration) {
      if (devices.before) devices.before(device, iteration);
      training_.iterate(cache_, compute_.get(), gradient_of(device));
    };
    for (uint32_t i = 0; i < devices.warmup; ++i) iterate(i);
    compute_->synchronize();
    all.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t i = 0; i < devices.iterations; ++i) iterate(devices.warmup + i);
    compute_->synchronize();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    cache_.wait_all();
    return took.count() / devices.iterations;
  }

  uint64_t bytes_copied_by_caller() const {
    return cache_.stats().bytes_copied_by_caller - copied_before_;
  }

 private:
  const Training& training_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> compute_;
  geeps::Cache cache_;
  uint64_t copied_before_ = 0;
};

// The parameter of which each iteration had this gradient: momentum's, from zero (job_of()).
double trained_parameter(double gradient, uint32_t iterations) {
  constexpr double kRate = 0.01, kMomentum = 0.9;  // unless a job says others
  double parameter = 0, velocity = 0;
  for (uint32_t i = 0; i < iterations; ++i) {
    velocity = kMomentum * velocity + gradient;
    parameter -= kRate * velocity;
  }
  return parameter;
}

// Compares both ends of each layer's parameters.
void check(const Devices& devices, const Training& training, const geeps::Exchange& box) {
  double sum = 0;
  for (uint32_t i = 0; i < devices.devices; ++i) sum += gradient_of(i);
  const double expected = trained_parameter(sum, devices.warmup + devices.iterations);
  std::vector<float> all;  // tables of parameters, one behind the other
  for (size_t key = 0; key < box.keys(); ++key) {
    const std::span<const float> of_key = box.parameters(key);
    all.insert(all.end(), of_key.begin(), of_key.end());
  }
  uint64_t first = 0;
  for (const uint64_t floats : training.weight_floats()) {
    for (const uint64_t at : {first, first + floats - 1}) {
      if (at < all.size() && std::abs(all[at] - expected) <= 1e-4 * std::abs(expected)) continue;
      throw Error(
          ErrorCode::kInternal,
          fmt::format("parameter {} of {} is {} after {} devices trained, and should be {}", at,
                      all.size(), at < all.size() ? all[at] : 0.0F, devices.devices, expected));
    }
    first += floats;
  }
}

// Runs all devices, each in a thread. Throws what the first one threw that failed.
std::vector<double> run_all(const Devices& devices,
                            std::vector<std::unique_ptr<Trained>>& trained) {
  std::barrier all(devices.devices);
  std::vector<double> seconds(devices.devices);
  std::mutex mutex;
  std::exception_ptr first;
  {
    std::vector<std::jthread> threads;
    for (uint32_t i = 0; i < devices.devices; ++i) {
      threads.emplace_back([&, i] {
        try {
          seconds[i] = trained[i]->run(devices, i, all);
        } catch (...) {
          {
            const std::lock_guard lock(mutex);
            if (!first) first = std::current_exception();
          }
          all.arrive_and_drop();
          trained[i].reset();  // leaves the group, so that nobody waits for its gradients
        }
      });
    }
  }
  if (first) std::rethrow_exception(first);
  return seconds;
}

}  // namespace

Machine p100_machine() {
  Machine machine{.flops_per_second = kFlopsPerSecond,
                  .memory_bytes_per_second = kMemoryBytesPerSecond,
                  .copy_bytes_per_second = kCopyBytesPerSecond};
  const std::chrono::duration<double, std::milli> computing =
      Training(alexnet(), machine).compute_time();
  const double factor = computing.count() / (kForwardMs + kBackwardMs);
  machine.flops_per_second *= factor;
  machine.memory_bytes_per_second *= factor;
  return machine;
}

DevicesResult train(const Devices& devices, const Net& net, const Machine& machine,
                    const Style& style) {
  const Training training(net, machine, style);
  geeps::StandaloneExchange box(job_of(training.tables()));
  geeps::DeviceGroup group(box, {.members = devices.devices});
  std::vector<std::unique_ptr<Trained>> trained(devices.devices);
  for (uint32_t i = 0; i < devices.devices; ++i) {
    trained[i] = std::make_unique<Trained>(training, machine, group.member(i));
  }
  const std::vector<double> seconds = run_all(devices, trained);
  check(devices, training, box);
  DevicesResult result;
  for (uint32_t i = 0; i < devices.devices; ++i) {
    result.seconds += seconds[i] / devices.devices;
    result.bytes_copied_by_caller += trained[i]->bytes_copied_by_caller();
  }
  return result;
}

}  // namespace phub::geeps_bench
