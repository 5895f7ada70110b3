// A training in this process: a device, a cache and an exchange without a box.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "bench/geeps_net.h"
#include "bench/zerocompute/measures.h"
#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/exchange.h"

namespace phub::geeps_bench {

// The job of every benchmark, for a cache's tables: SGD with momentum, BSP.
JobSpec job_of(std::span<const geeps::TableSpec> tables);

geeps::CacheOptions cache_options(Stream& compute, uint32_t partitions = 1);

// The bytes of all tables and the log of updates.
uint64_t data_bytes(std::span<const geeps::TableSpec> tables);

// A training: its tables, and the calls and computations of an iteration.
struct Iteration {
  std::vector<geeps::TableSpec> tables;
  std::function<void(geeps::Cache& cache, Stream* compute)> run;  // without a stream: virtual
  std::function<std::chrono::nanoseconds()> compute_time;         // that of one that has run
  double parts = 1;                                               // see part_of()
};

class TrainingRun {
 public:
  // Records the iteration virtually, and runs one to fill device memory.
  TrainingRun(Iteration iteration, const Machine& machine, uint64_t budget_bytes,
              uint32_t partitions = 1);
  TrainingRun(const Training& training, const Machine& machine, uint64_t budget_bytes,
              uint32_t partitions = 1);

  double seconds_per_iteration(uint32_t iterations);

  geeps::Cache& cache() { return *cache_; }
  const geeps::Cache& cache() const { return *cache_; }
  DeviceStats device() const { return device_->stats(); }
  // By the application's thread, in all iterations.
  uint64_t bytes_copied_by_caller() const {
    return cache_->stats().bytes_copied_by_caller - copied_before_;
  }
  // The fraction of the time in which the device computes, if an iteration takes `seconds`.
  double busy(double seconds) const;

 private:
  Iteration iteration_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> compute_;
  std::unique_ptr<geeps::Exchange> exchange_;
  std::unique_ptr<geeps::Cache> cache_;
  uint64_t copied_before_ = 0;  // the value when the sequence was placed
};

// Runs iterations of all runs in turn, `turns` times. Returns the median seconds of each.
std::vector<double> alternate(std::span<TrainingRun* const> runs, uint32_t iterations,
                              uint32_t turns);

}  // namespace phub::geeps_bench
