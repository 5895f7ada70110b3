#include "bench/geeps_workers.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "bench/geeps_host.h"
#include "bench/geeps_link.h"
#include "bench/geeps_run.h"
#include "transport/error.h"
#include "worker/examples/processes.h"
#include "worker/geeps/worker_exchange.h"
#include "worker/worker.h"

namespace phub::geeps_bench {
namespace {

struct Report {
  double seconds;
  uint64_t bytes_copied_by_caller;
};

// One report per worker, in memory that processes share.
class Reports {
 public:
  explicit Reports(size_t workers) : bytes_(workers * sizeof(Report)) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail(ErrorCode::kFull, "mmap: {}", std::strerror(errno));
    all_ = static_cast<Report*>(memory);
  }
  ~Reports() { munmap(all_, bytes_); }
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;
  Report& operator[](size_t worker) { return all_[worker]; }

 private:
  size_t bytes_;
  Report* all_ = nullptr;
};

WorkerOptions options_of(const Workers& workers, uint32_t rank, const Training& training) {
  WorkerOptions options;
  options.server = workers.server;
  options.transport = workers.transport;
  options.rank = static_cast<int32_t>(rank);
  options.spec = job_of(training.tables());
  options.spec.name = workers.job;
  options.spec.world_size = workers.workers;
  options.spec.reduction = "mean";
  options.spec.on_loss = "fail";
  options.spec.lease_ms = 10000;  // on a busy machine a process may get no CPU for seconds
  return options;
}

// Of iterations, without the first ones.
template <class Iterate>
double timed(const Workers& workers, Worker& worker, Stream& compute, Iterate iterate) {
  for (uint32_t i = 0; i < workers.warmup; ++i) iterate();
  compute.synchronize();
  worker.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (uint32_t i = 0; i < workers.iterations; ++i) iterate();
  compute.synchronize();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return took.count() / workers.iterations;
}

Report train_cached(const Workers& workers, Worker& worker, geeps::Exchange& exchange,
                    const Training& training, const Machine& machine) {
  const auto device = make_device(machine, training.everything_bytes(), training.parts());
  const auto compute = device->make_stream("compute");
  geeps::Cache cache(*device, exchange, training.tables(), cache_options(*compute));
  cache.begin_virtual();
  training.iterate(cache, nullptr);
  cache.finish_sequence();
  const uint64_t copied_before = cache.stats().bytes_copied_by_caller;
  const double seconds =
      timed(workers, worker, *compute, [&] { training.iterate(cache, compute.get()); });
  const Report report{seconds, cache.stats().bytes_copied_by_caller - copied_before};
  cache.wait_all();
  return report;
}

Report train_from_host(const Workers& workers, Worker& worker, geeps::Exchange& exchange,
                       const Training& training, const Machine& machine) {
  const auto device = make_device(machine, HostParameters::device_bytes(training.tables()));
  const auto compute = device->make_stream("compute");
  HostParameters parameters(*device, exchange, training.tables(), *compute);
  const double seconds =
      timed(workers, worker, *compute, [&] { training.iterate(parameters, *compute); });
  parameters.wait_all();
  return {seconds, 0};
}

Report train_one(const Workers& workers, uint32_t rank, const Training& training,
                 const Machine& machine) {
  Worker worker(options_of(workers, rank, training));
  geeps::WorkerExchange box(worker, training.tables());
  LinkedExchange exchange(box, machine.link_bytes_per_second);
  const Report report = (workers.cached ? train_cached : train_from_host)(workers, worker, exchange,
                                                                          training, machine);
  worker.barrier();
  return report;
}

}  // namespace

WorkersResult train(const Workers& workers, const Net& net, const Machine& machine, Style style) {
  style.whole |= !workers.cached;
  const Training training(net, machine, style);
  Reports reports(workers.workers);
  std::vector<Child> children;
  for (uint32_t rank = 0; rank < workers.workers; ++rank) {
    children.emplace_back(
        [&, rank] {
          try {
            reports[rank] = train_one(workers, rank, training, machine);
            return 0;
          } catch (const std::exception& error) {
            std::fprintf(stderr, "worker %u: %s\n", rank, error.what());
            return 1;
          }
        },
        SIGKILL);
  }
  const double computing = std::chrono::duration<double>(training.compute_time()).count();
  WorkersResult result;
  for (uint32_t rank = 0; rank < workers.workers; ++rank) {
    children[rank].wait(-1);
    const std::string how = children[rank].ended().value_or("still there");
    if (!how.empty()) fail(ErrorCode::kInternal, "worker {} ended: {}", rank, how);
    const Report& report = reports[rank];
    result.seconds += report.seconds / workers.workers;
    result.stalled += (1 - computing / report.seconds) / workers.workers;
    result.bytes_copied_by_caller += report.bytes_copied_by_caller;
  }
  return result;
}

}  // namespace phub::geeps_bench
