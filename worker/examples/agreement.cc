#include "worker/examples/agreement.h"

#include "transport/control/job_spec.h"

namespace phub::examples {

// The settings are names of keys, which a server compares. A rank that left before the job's first
// round would count as lost.
void agree(const WorkerOptions& worker, std::span<const std::string> settings) {
  if (worker.spec.world_size == 1) return;
  WorkerOptions options = worker;
  options.spec.name += ".settings";
  options.spec.consistency = "bsp";
  options.spec.slack = 0;
  options.spec.initial = "zeros";
  options.spec.keys.clear();
  for (const std::string& setting : settings) {
    options.spec.keys.push_back({.name = setting, .elements = 1});
  }
  Worker joined(options);
  for (size_t key = 0; key < joined.keys(); ++key) joined.push(key);
  for (size_t key = 0; key < joined.keys(); ++key) joined.wait(key);
}

void take_rank_if_alone(WorkerOptions& worker) {
  const bool is_alone = worker.spec.world_size == 1 && worker.rank_error.empty();
  if (worker.rank == -1 && is_alone) worker.rank = 0;
}

}  // namespace phub::examples
