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
  // The constructor returns when all ranks of world_size are there, or, once join_limit_ms is over,
  // min_ranks of them; with fewer it throws kRankLost, which names those who are missing. False: it
  // returns at once, and the first wait() waits for them.
  bool await_ranks = true;
  std::string transport = "auto";  // shm, tcp or verbs; auto: as choose_transport() says
  uint32_t connect_timeout_ms = 5000;
  uint32_t wait_timeout_ms =
      0;  // how long wait() and barrier() wait at most; 0: as the job's policy
  // A server that answers no heartbeat for so long is gone, though its connection is there: it
  // hangs, or packets are lost. Whatever waits then ends with kUnavailable.
  uint32_t silence_limit_ms = 60'000;
  // How long wait() spins before it sleeps; -1: 50 where CPUs are left over when every rank of the
  // job on this host has one.
  int32_t spin_us = -1;
  uint32_t local_world_size = 0;  // how many those are; 0: over shm all, else as if there were one
  // What its threads waited for and how long exchanges took is written to this file when the worker
  // ends, for ui.perfetto.dev (Chrome's trace events); %r in it becomes the rank. Empty: no trace.
  std::string trace;
  size_t trace_events = 200'000;  // the last ones; 48 bytes each
};

// PHUB_SERVER, PHUB_JOB, PHUB_TRANSPORT, PHUB_MIN_RANKS, PHUB_WORKER_TRACE; rank and world size
// from RANK/WORLD_SIZE, OMPI_COMM_WORLD_RANK/_SIZE or SLURM_PROCID/SLURM_NTASKS, in this order; the
// ranks on this host from LOCAL_WORLD_SIZE or OMPI_COMM_WORLD_LOCAL_SIZE. Throws Error(kInvalid) on
// values that are no numbers or a rank outside the world.
WorkerOptions options_from_environment();

struct WorkerStats {
  uint64_t pushes = 0, chunks_pushed = 0, chunks_received = 0;
  uint64_t bytes_copied = 0;  // between memory of the caller's and phub's; 0 for library memory
  uint64_t sleeps = 0;        // times a wait had to sleep
  uint64_t reconnections = 0;
};

struct Pushed {
  size_t key = 0;
  uint64_t round = 0;
};

struct PushOptions {
  // Where something has to wait, on this side or at the server, the keys with higher priorities
  // (KeySpec::priority) go first. This is added to it on this side, for this push.
  int32_t priority = 0;
  bool null = false;  // the gradient is zero: nothing is sent, the rank counts as having taken part
  bool announced = false;  // next() says how it ended
  void* tag = nullptr;     // and gives this back
};

// How an announced push ended: its result is here, or `error` says why not. kTimeout: it was not
// here wait_timeout_ms after the push, but may come.
struct Completion {
  Pushed pushed;
  void* tag = nullptr;
  std::optional<Error> error;
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
  bool initial_counts() const;   // what broadcast() will say
  const JobSpec& spec() const;
  size_t keys() const;
  size_t key(std::string_view name) const;  // index; throws kNotFound

  // The gradient memory of a key: elements × the job's gradient format. Writable unless lent.
  // Library memory: a push from here copies nothing over shared memory.
  std::span<std::byte> gradient_bytes(size_t key);
  std::span<float> gradient(size_t key);  // REQUIRES: gradient_dtype f32
  // The key's parameters (optimizer none: its sum or mean), in the job's parameter format. Valid
  // from wait() to the next push(). It can be read and not written, whatever the transport: that
  // is a SIGSEGV, and so is touching it, or a gradient, when the worker is gone.
  std::span<const std::byte> parameter_bytes(size_t key) const;
  std::span<const float> parameters(size_t key) const;  // REQUIRES: parameter_dtype f32

  // Memory of the caller's own for a key (nullptr: none): push() then copies from `gradient` and
  // wait() copies into `parameters`. Must outlive the worker or be unset. bytes_copied counts it.
  void use_memory(size_t key, const void* gradient, void* parameters);

  // Initial parameters, f32, of all keys one after another (no padding). Rank 0's count; others may
  // pass an empty span. Returns when every key is here: true if `initial` became the parameters of
  // the job. False: this is not rank 0, the job was under way already, or its initial is "zeros";
  // what is here are its present parameters.
  bool broadcast(std::span<const float> initial);

  // Starts the exchange of a key: lends the gradient, gives up the parameters. Waits for the key's
  // previous result, if that is not here yet.
  Pushed push(size_t key, const PushOptions& how);
  Pushed push(size_t key, int32_t priority = 0) { return push(key, {.priority = priority}); }
  Pushed push_null(size_t key) { return push(key, {.null = true}); }
  // Until the key's result is here. A key that was not pushed since: its present parameters, those
  // of round(key). Every rank pushes every key once a round: when others have waited for a tenth of
  // progress_limit_ms (5 s at most) for a key that this rank passed over, the wait that meets them
  // is kInvalid and names the key. The worker goes on: the key can still be pushed.
  void wait(size_t key);
  void wait_all();
  bool test(size_t key);  // wait() would not block
  size_t poll();          // moves what can move without waiting; how many keys are not here yet
  // Until an announced push ends; in the order in which they do, each once, those that a failure
  // of the worker ends too. Nothing: wake() was called. Throws the failure when none is left. One
  // thread.
  std::optional<Completion> next();
  void wake();  // ends the next() that runs, or else the next one
  // next() names none of the pushes that were announced so far. REQUIRES: no next() runs.
  void forget_announced();
  // Ends what any thread waits for, and every later call, with kFenced and these words. The server
  // is not told: the others lose this rank when its lease is over.
  void end(const std::string& why);
  void push_pull(size_t key, int32_t priority = 0) {
    push(key, priority);
    wait(key);
  }
  // Copies the key's parameters (in the job's format) into private memory that stays valid.
  void pull(size_t key, std::span<std::byte> into);

  uint64_t round(size_t key) const;  // rounds whose result is here

  // Hyperparameters (training.md has their names) from `round` on, and for all keys from the same
  // one; 0: from the next push on, that is, from the first round in which this rank has pushed no
  // key. Returns the round that they got: a later one where chunks of `round` are complete already,
  // or where a change was made beyond it. Rank 0 only.
  uint64_t set_hyper(const std::map<std::string, double>& values, uint64_t round = 0);
  // Ranks whose gradients the round waits for, as the server sees it now. Asks the control port.
  std::vector<uint32_t> missing_ranks();
  // "rank 1 has not sent key 'w2' of round 3 for 7.5 s": what holds up a wait that has lasted as
  // long as described at wait(), as the server sees it; it is also said on stderr, once for each
  // key and round. Empty: nothing does. Timeouts say it too.
  std::string waits_for() const;
  void barrier();  // of all live ranks, through the control port
  // The others go on without this rank; no policy is triggered, unless the job has not begun: then
  // it is a loss. What other threads wait for ends at once, with kFenced; the server has
  // `timeout_ms` to answer.
  void leave(uint32_t timeout_ms = 10'000);

  WorkerStats stats() const;
  std::string connection() const;  // for people: the transport, over what, from which memory

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub
