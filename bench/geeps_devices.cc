#include "bench/geeps_devices.h"

#include <barrier>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "bench/geeps_run.h"
#include "worker/geeps/device_group.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace {

constexpr double kForwardMs = 51, kBackwardMs = 104;  // table 3: BVLC/Caffe2 does nothing else then
// Table 4: all layers, 60.9 million parameters in 16.7 ms.
constexpr double kCopyBytesPerSecond = 4 * 60.9e6 / 16.7e-3;

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
  double run(const Devices& devices, std::barrier<>& all) {
    for (uint32_t i = 0; i < devices.warmup; ++i) training_.iterate(cache_, compute_.get());
    compute_->synchronize();
    all.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t i = 0; i < devices.iterations; ++i) training_.iterate(cache_, compute_.get());
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

}  // namespace

Machine p100_machine() {
  // The data sheet's rates say how layers share the time, table 3 how long it is.
  Machine machine{.flops_per_second = 10.6e12,
                  .memory_bytes_per_second = 732e9,
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
  std::barrier all(devices.devices);
  std::vector<double> seconds(devices.devices);
  {
    std::vector<std::jthread> threads;
    for (uint32_t i = 0; i < devices.devices; ++i) {
      threads.emplace_back([&, i] { seconds[i] = trained[i]->run(devices, all); });
    }
  }
  DevicesResult result;
  for (uint32_t i = 0; i < devices.devices; ++i) {
    result.seconds += seconds[i] / devices.devices;
    result.bytes_copied_by_caller += trained[i]->bytes_copied_by_caller();
  }
  return result;
}

}  // namespace phub::geeps_bench
