// The client: what a training process links.
//
//   phub::WorkerOptions options = phub::options_from_environment();
//   options.spec.name = "mnist";
//   options.spec.optimizer = "nesterov";
//   options.spec.keys = {{"w1", 784 * 128}, {"b1", 128}};
//   phub::Worker worker(options);                      // joins; throws phub::Error
//   worker.broadcast(initial);                         // rank 0's parameters, for everyone
//   for (;;) {
//     ... compute the gradient of w1 into worker.gradient(0) ...
//     worker.push(0);                                  // lent until wait(0)
//     worker.wait(0);
//     use(worker.parameters(0));                       // until the next push(0)
//   }
//
// Thread-safe: any thread may call anything; calls for one key must be in the order push, wait.
// Errors are exceptions of one type, phub::Error; after kFenced or kRankLost every call throws it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/messages.h"

namespace phub {

struct WorkerOptions {
  std::string server = "127.0.0.1:7717";
  JobSpec spec;
  int32_t rank = -1;     // -1: the server chooses
  bool replace = false;  // take over the rank from an incarnation that still has its lease
  std::string transport = "auto";  // shm, tcp or verbs; auto: as choose_transport() says
  uint32_t connect_timeout_ms = 5000;
  uint32_t wait_timeout_ms =
      0;                 // how long wait() and barrier() wait at most; 0: as the job's policy
  int32_t spin_us = -1;  // how long wait() spins before it sleeps; -1: by the number of CPUs
  // What its threads waited for and how long exchanges took is written to this file when the worker
  // ends, for ui.perfetto.dev (Chrome's trace events); %r in it becomes the rank. Empty: no trace.
  std::string trace;
  size_t trace_events = 200'000;  // the last ones; 48 bytes each
};

// PHUB_SERVER, PHUB_JOB, PHUB_TRANSPORT, PHUB_WORKER_TRACE; rank and world size from
// RANK/WORLD_SIZE, OMPI_COMM_WORLD_RANK/_SIZE or SLURM_PROCID/SLURM_NTASKS, in this order. Throws
// Error(kInvalid) on values that are no numbers or a rank outside the world.
WorkerOptions options_from_environment();

struct WorkerStats {
  uint64_t pushes = 0, chunks_pushed = 0, chunks_received = 0;
  uint64_t bytes_copied = 0;  // between memory of the caller's and phub's; 0 for library memory
  uint64_t sleeps = 0;        // times a wait had to sleep
  uint64_t reconnections = 0;
};

// What a push returns, and wait_any() waits for.
struct Pushed {
  size_t key = 0;
  uint64_t round = 0;
};

class Worker {
 public:
  explicit Worker(const WorkerOptions& options);
  ~Worker();  // leaves the job if leave() was not called
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  uint32_t rank() const;
  uint32_t incarnation() const;
  uint32_t world_size() const;
  uint64_t first_round() const;  // the first round that this incarnation takes part in
  const JobSpec& spec() const;
  size_t keys() const;
  size_t key(std::string_view name) const;  // index; throws kNotFound

  // The gradient memory of a key: elements × the job's gradient format. Writable unless lent.
  // Library memory: a push from here copies nothing over shared memory.
  std::span<std::byte> gradient_bytes(size_t key);
  std::span<float> gradient(size_t key);  // REQUIRES: gradient_dtype f32
  // The key's parameters (optimizer none: its sum or mean), in the job's parameter format. Valid
  // from wait() to the next push().
  std::span<const std::byte> parameter_bytes(size_t key) const;
  std::span<const float> parameters(size_t key) const;  // REQUIRES: parameter_dtype f32

  // Memory of the caller's own for a key (nullptr: none): push() then copies from `gradient` and
  // wait() copies into `parameters`. Must outlive the worker or be unset. bytes_copied counts it.
  void use_memory(size_t key, const void* gradient, void* parameters);

  // Initial parameters, f32, of all keys one after another (no padding). Rank 0's count; others may
  // pass an empty span. Returns when every key is here. REQUIRES: spec.initial == "broadcast".
  // On a rank that joined later, or with initial "zeros", it only waits for the present parameters.
  void broadcast(std::span<const float> initial);

  // Starts the exchange of a key: lends the gradient, gives up the parameters. Higher priority
  // first.
  Pushed push(size_t key, int32_t priority = 0);
  // As push, for a gradient that is zero: nothing is sent, the rank counts as having taken part.
  Pushed push_null(size_t key);
  // Until the key's result is here. A key that was never pushed: until its present parameters are.
  void wait(size_t key);
  void wait_all();
  bool test(size_t key);  // wait() would not block
  size_t poll();          // moves what can move without waiting; how many keys are not here yet
  // Until the result of one of them is here: its index. Nothing: wake() was called. One thread.
  std::optional<size_t> wait_any(std::span<const Pushed> pushed);
  void wake();  // ends the wait_any() that runs, or else the next one
  void push_pull(size_t key, int32_t priority = 0) {
    push(key, priority);
    wait(key);
  }
  // Copies the key's parameters (in the job's format) into private memory that stays valid.
  void pull(size_t key, std::span<std::byte> into);

  uint64_t round(size_t key) const;  // rounds whose result is here

  // Hyperparameters for the next round that no chunk has completed yet. Rank 0 only.
  void set_hyper(const std::map<std::string, double>& values);
  // Ranks whose gradients the round waits for, as the server sees it now. Asks the control port.
  std::vector<uint32_t> missing_ranks();
  void barrier();  // of all live ranks, through the control port
  void leave();    // the others go on without this rank; no policy is triggered

  WorkerStats stats() const;
  std::string connection() const;  // for people: the transport, over what, from which memory

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub
