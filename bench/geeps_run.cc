#include "bench/geeps_run.h"

#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {

JobSpec job_of(std::span<const geeps::TableSpec> tables) {
  JobSpec spec;
  spec.name = "geeps";
  spec.keys = geeps::keys_of(tables);
  spec.optimizer = "momentum";
  spec.on_nonfinite = "pass";  // the buffers of updates are never written and hold anything
  return spec;
}

geeps::CacheOptions cache_options(Stream& compute, uint32_t partitions) {
  // No call is outside of the sequence.
  return {.reserved_bytes = 1, .partitions = partitions, .compute = &compute};
}

uint64_t data_bytes(std::span<const geeps::TableSpec> tables) {
  uint64_t bytes = 0;
  for (const geeps::TableSpec& table : tables) {
    bytes += table.keys.size() * table.row_floats * sizeof(float) * (table.local ? 1 : 2);
  }
  return bytes;
}

TrainingRun::TrainingRun(const Training& training, const Machine& machine, uint64_t budget_bytes,
                         uint32_t partitions)
    : TrainingRun({.tables = training.tables(),
                   .run = [training](geeps::Cache& cache,
                                     Stream* compute) { training.iterate(cache, compute); },
                   .compute_time = [training] { return training.compute_time(); },
                   .parts = training.parts()},
                  machine, budget_bytes, partitions) {}

TrainingRun::TrainingRun(Iteration iteration, const Machine& machine, uint64_t budget_bytes,
                         uint32_t partitions)
    : iteration_(std::move(iteration)),
      device_(make_device(machine, budget_bytes, iteration_.parts)),
      compute_(device_->make_stream("compute")),
      exchange_(std::make_unique<geeps::StandaloneExchange>(job_of(iteration_.tables))),
      cache_(std::make_unique<geeps::Cache>(*device_, *exchange_, iteration_.tables,
                                            cache_options(*compute_, partitions))) {
  cache_->begin_virtual();
  iteration_.run(*cache_, nullptr);
  cache_->finish_sequence();
  copied_before_ = cache_->stats().bytes_copied_by_caller;
  seconds_per_iteration(1);
}

double TrainingRun::seconds_per_iteration(uint32_t iterations) {
  const auto begin = std::chrono::steady_clock::now();
  for (uint32_t i = 0; i < iterations; ++i) iteration_.run(*cache_, compute_.get());
  compute_->synchronize();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return took.count() / iterations;
}

double TrainingRun::busy(double seconds) const {
  return std::chrono::duration<double>(iteration_.compute_time()).count() / seconds;
}

std::vector<double> alternate(std::span<TrainingRun* const> runs, uint32_t iterations,
                              uint32_t turns) {
  std::vector<std::vector<double>> seconds(runs.size());
  for (uint32_t turn = 0; turn < turns; ++turn) {
    for (size_t r = 0; r < runs.size(); ++r) {
      runs[r]->seconds_per_iteration(1);
      seconds[r].push_back(runs[r]->seconds_per_iteration(iterations));
    }
  }
  std::vector<double> medians;
  for (const std::vector<double>& all : seconds) medians.push_back(median(all));
  return medians;
}

}  // namespace phub::geeps_bench
