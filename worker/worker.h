// The client, which a training process links.
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
// Errors are exceptions of one type, phub::Error; after kFenced, kRankLost or kRewound every call
// throws it. After kRewound the job goes on without this worker's latest rounds:
//   worker = worker->rejoin();  round = worker->first_round();
// and the caller's own state is the one that WorkerOptions::saver saved: worker->restored(name).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/control/messages.h"
#include "transport/tls/client_options.h"
#include "transport/verdict.h"

namespace phub {

class MemoryDevice;  // transport/memory_device.h; Device (device/device.h) is one

// State that a rank needs beside the job's parameters to go on to the bit: that of its random
// numbers, its position in the data; by name. All together at most 64 MiB.
using RankState = std::map<std::string, std::vector<std::byte>>;

struct WorkerOptions {
  std::string server = "127.0.0.1:7717";  // or several, with commas: one of them has the job
  std::string token;                      // for a server that asks for one
  ClientTls tls = client_tls_from_environment();  // for a server at https://
  JobSpec spec;
  int32_t rank = -1;  // -1: the server chooses
  // A complaint about the rank or size that the launcher's environment names. The worker fails with
  // it, kInvalid, if `rank` is still -1. Empty: there is none.
  std::string rank_error = {};
  bool replace = false;  // take over the rank from an incarnation that still has its lease
  // The elements of each key that this rank writes and reads; keys that are not named count whole.
  // Chunks without any such element do not travel, and nobody waits for this rank there:
  // training.md, "What a rank touches". Empty: everything.
  std::vector<KeyInterest> interest = {};
  // True: the constructor returns when world_size ranks have joined or, after join_limit_ms, at
  // least min_ranks; with fewer it throws kRankLost, which names the missing ranks. False: it
  // returns at once, and the first wait() waits for them.
  bool await_ranks = true;
  std::string transport = "auto";  // shm, tcp, verbs or ofi; auto: see choose_transport()
  uint32_t connect_timeout_ms = 5000;
  uint32_t wait_timeout_ms = 0;  // limit of wait() and barrier(); 0: none but the job's policy
  uint32_t rejoin_limit_ms = 600'000;  // limit of rejoin()'s wait for a server
  // A server that answers no heartbeat for so long counts as gone, even if its connection is alive:
  // it hangs, or packets are lost. All waits end with kUnavailable, or kRewound.
  uint32_t silence_limit_ms = 60'000;
  // The time that wait() spins before it sleeps. -1: 50 if this host has more CPUs than ranks (over
  // shared memory and the server), else 0.
  int32_t spin_us = -1;
  uint32_t local_world_size = 0;  // ranks of the job on this host; 0: over shm all, else one
  // The rate at which this worker may send from each NIC of its host, measured on the wire:
  // "250mbit", "1gbit", or bytes per second. Chunks wait for it in `send_order`. Empty: as fast as
  // it goes. Over shared memory nothing is sent, and it has no effect; with transport "shm" it is
  // an error.
  std::string nic_budget;
  // Chooses which of the waiting chunks goes first: "priority" (by key, KeySpec::priority), "fifo",
  // "random", or "magnitude" (the largest gradient, relative to its parameters, chunk by chunk).
  std::string send_order = "priority";
  // Out of lock-step: wait() does not wait until a chunk is sent for which there is no budget yet.
  // Its gradient is added to the next one of this chunk, for at most so many rounds in a row, and
  // in SSP at most `slack`. For gradients in f32 and coded formats, of jobs that are not saved.
  // 0: everything is sent in its round.
  uint32_t carry_over = 0;
  // At its end the worker writes the waits of its threads and the times of its exchanges to this
  // file, for ui.perfetto.dev (Chrome's trace events). %r becomes the rank. Empty: no trace.
  std::string trace;
  size_t trace_events = 200'000;  // the latest are kept; 48 bytes each
  // Returns this process's state after `round`, with which the next round begins. It is then a part
  // of the job's checkpoint of that round, which does not exist without it, and comes back with
  // restored(). Called after some rounds (the server's --checkpoint-every), if the server saves the
  // job: by the wait, test or wait_any that returns the last key's result of the round, on its
  // thread; or by the first push of the next round, if that comes before. It must neither push nor
  // wait; that call throws its exceptions (wait_any() returns them in the completion), and then
  // there is no checkpoint of this round.
  // REQUIRES: before its first push of the next round the program has pushed every key in this one.
  // With a geeps::Cache it is called by Cache::save_point() only, in lock-step.
  std::function<RankState(uint64_t round)> saver;
  // If it is not null, gradients and parameters of all keys lie in memory of this device, which the
  // NIC reads and writes itself, by DMA: verbs or ofi, and a device whose memory the NIC reaches.
  // Then gradient() and parameters() are addresses of the device, which it has poisoned at first
  // (NaN), register_memory() takes no memory, and options that need the host to compute are
  // refused: coded formats, carry_over, the send_order "magnitude". The device has budget for both,
  // and once more for both while rejoin() makes the next worker, which has other addresses. It
  // outlives the worker. With DeviceKeys (device_keys.h) on the same device, keys are pushed and
  // pulled in its streams.
  MemoryDevice* memory_device = nullptr;
};

// The launcher's environment: PHUB_SERVER, PHUB_TRANSPORT, PHUB_MIN_RANKS, PHUB_WORKER_TRACE,
// PHUB_WORKER_NIC_BUDGET, PHUB_SEND_ORDER, PHUB_CARRY_OVER; PHUB_TOKEN, or PHUB_TOKEN_FILE of mode
// 0600; the job's name, rank and world size from PHUB_JOB, PHUB_RANK and PHUB_WORLD_SIZE, else of
// the first launcher in the table of training.md; the ranks on this host from LOCAL_WORLD_SIZE,
// OMPI_COMM_WORLD_LOCAL_SIZE or MPI_LOCALNRANKS. Throws Error(kInvalid) if one of these values is
// not a number. A complaint about rank and world size (one variable of a pair is missing, the rank
// is outside of the world) is in `rank_error`. Says on stderr if launchers contradict each other.
WorkerOptions options_from_environment();

struct WorkerStats {
  uint64_t pushes = 0, chunks_pushed = 0, chunks_received = 0;
  uint64_t bytes_copied = 0;  // between the caller's and the library's memory
  uint64_t sleeps = 0;        // the number of times that a wait slept
  uint64_t reconnections = 0;
  uint64_t chunks_carried_over = 0;  // to the next round
};

// The caller's own memory for a key. Over TCP it is sent from and received into directly if formats
// are the job's, and not coded, and the scale is 1. A gradient in a coded format is encoded from
// it. Otherwise it is copied, and converted in the same pass.
struct KeyMemory {
  const void* gradient = nullptr;  // push() sends it; null: gradient()
  // wait() leaves the result here; null: only in parameters(). May be the gradient's memory: then
  // only the results of later pushes are written here, by copying.
  void* parameters = nullptr;
  // Formats of this memory: f32, bf16 or f16; empty: the job's (for a gradient,
  // gradient_memory_format()).
  std::string gradient_dtype, parameter_dtype;
  float gradient_scale = 1;  // multiplies every element of the gradient
  // True: the memory may be read and written at any time from push() to wait(), and parameters()
  // may not have the result. False: push() reads it, wait() writes it, parameters() has the result.
  bool in_place = true;
};

// The gradient of a matrix as a sum: outer products of `pairs` pairs of vectors.
struct FactorPairs {
  const float* left = nullptr;   // pair after pair, a vector of as many elements as it has rows
  const float* right = nullptr;  // likewise, of as many as it has columns
  uint32_t pairs = 0;
};

// The rows of a matrix's gradient that are not zero: their indices, and their elements row after
// row. Rows with the same index are added up, in this order.
struct GradientRows {
  std::span<const int64_t> indices;
  std::span<const float> elements;  // as many of each row as the matrix has columns
};

// The slots of a key in a coded format, which its caller fills, as kernels::encode
// (kernels/encode.h) does: chunk after chunk, of which the last may have fewer elements.
struct CodedSlots {
  uint32_t chunk_elements = 0;
  uint32_t chunk_bytes = 0;    // from the beginning of a slot to that of the next
  uint64_t first_element = 0;  // kernels::Rounding::element of the first chunk
  std::span<float> residual;   // the worker's for this key
};

struct Pushed {
  size_t key = 0;
  uint64_t round = 0;
  uint32_t part = 0;  // push_part(): which one
};

struct PushOptions {
  // Keys with a higher priority (KeySpec::priority) overtake others that wait, here and at the
  // server. Here, `priority` is added for this push.
  int32_t priority = 0;
  bool null = false;       // a gradient of zero: nothing is sent, and the rank takes part
  bool announced = false;  // wait_any() returns this push when it ends
  void* tag = nullptr;     // is in its Completion
};

// The end of an announced push: its result is here, or `error` tells why not. After kTimeout
// (wait_timeout_ms since the push) the result may still come.
struct Completion {
  Pushed pushed;
  void* tag = nullptr;
  std::optional<Error> error;
  std::optional<Error> saver_error;  // the saver's exception, if it saved this round
};

// The state of a key at the server: f32, whatever the job's formats are.
struct KeyState {
  size_t key = 0;
  // The caller's memory for the parameters, and for each of state_names(); the key's elements each.
  std::vector<std::span<float>> arrays;
  uint64_t step = 0;  // the number of steps that the optimizer has made
};

class Worker {
 public:
  explicit Worker(const WorkerOptions& options);
  // Leaves the job if leave() was not called. If an exception destroys it, as abandon().
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // After kRewound (the server of a job that it saves died, or answers no more): waits for a server
  // that goes on with the job, and joins as the same rank. The new worker's first_round() may be
  // earlier than this one's latest round, and all parameters are those of the round before: call
  // broadcast(), and go on from there. With a quorum what was pushed for an earlier round, without
  // a result so far, counted once or never will. Memory that was registered is registered there,
  // and this worker does not use it any more. Throws Error, and may be called again: kUnavailable
  // or kTimeout after rejoin_limit_ms; kRankLost, the other ranks did not come until then;
  // kNotFound, the job has ended; kTaken, another worker has the rank; kFenced, only servers with
  // an earlier state of the job answer, or end() or leave() was called; kInvalid, this worker's
  // calls do not throw kRewound, or it was replaced. The new worker's trace has .EPOCH-INCARNATION
  // in its name.
  std::unique_ptr<Worker> rejoin();

  uint32_t rank() const;
  uint32_t incarnation() const;
  uint32_t world_size() const;
  uint64_t first_round() const;  // the first round in which this incarnation takes part
  bool initial_counts() const;   // broadcast() will return this
  // The state that this rank's saver returned after the round before first_round(), when the job
  // goes on from a checkpoint of that round. Valid until the worker is destroyed. Returns nullopt
  // if there is none of this name: in a job that begins, for a new rank, or after joining a job in
  // progress the state follows from first_round().
  std::optional<std::span<const std::byte>> restored(std::string_view name) const;
  bool saves() const;            // it has a saver, and the server saves the job
  bool saves_residuals() const;  // of coded gradients, with or without a saver
  // For a user that waits for results on threads of its own (geeps::WorkerExchange): while it is
  // set, only save() calls the saver, and a push beyond next_saved() throws kInvalid.
  void save_by_call(bool by_call);
  uint64_t next_saved() const;  // the round after which the state is saved next; 0: not saves()
  // Calls the saver for next_saved(), and sends its state together with `more`. Throws
  // Error(kInvalid): not save_by_call(), a result of that round is not here, or both have an entry
  // of the same name; and the saver's exceptions.
  void save(RankState more);
  const JobSpec& spec() const;
  // In the worker that created the job, where the server asks for tokens: a token that joins and
  // deletes this job, and nothing else; else "".
  const std::string& job_token() const;
  const std::string& server() const;  // HOST:PORT, the one of the options that has the job
  size_t keys() const;
  size_t queues() const;  // of the job: a core of a server and a NIC have one each
  size_t key(std::string_view name) const;  // index; throws kNotFound

  // The gradient memory of a key: elements × its gradient_memory_format(), f32 where its gradients
  // are coded, unless the caller encodes them: begin_encoding(). (kInvalid for keys that send
  // factors or rows: they have none.) Writable unless lent.
  // Library memory: a push from here copies nothing over shared memory, but for gradients that it
  // encodes.
  std::span<std::byte> gradient_bytes(size_t key);
  std::span<float> gradient(size_t key);  // REQUIRES: that format is f32
  // The key's parameters (optimizer none: its sum or mean), in parameter_memory_format(). Valid
  // from wait() to the next push(). Read-only with every transport: writing to it is a SIGSEGV, and
  // so is any access to it, or to a gradient, after the worker's destructor.
  std::span<const std::byte> parameter_bytes(size_t key) const;
  std::span<const float> parameters(size_t key) const;  // REQUIRES: that format is f32

  // From its next push on the key uses `memory`; without pointers, the library's again. Returns
  // when the memory that was registered before is no longer used. REQUIRES: the memory is valid
  // until it is replaced, or leave() or the destructor has returned.
  void register_memory(size_t key, const KeyMemory& memory);

  // Sets the job's initial parameters: f32, of all keys one after another without padding. Rank 0's
  // count; others may pass an empty span. Returns when this worker has all keys. True: `initial`
  // became the job's parameters. False: this is not rank 0, or the job was in progress;
  // parameters() has the job's present ones. `initial` is not used afterwards. Throws
  // Error(kInvalid): there are some, and the job's `initial` is "zeros".
  bool broadcast(std::span<const float> initial);
  // Does the same with a pointer for each key.
  bool broadcast_keys(std::span<const float* const> initial);

  // In a job with the option `weights`: the weight of the pushes that follow, of nulls and of parts
  // as of whole keys, until another one is set; 1 at the beginning. A round adds up the gradients
  // of the ranks times their weights (transport/contribution_weight.h), and a mean divides by the
  // sum of the weights: with the number of samples or tokens as its weight, each counts the same.
  // Throws Error(kInvalid): it is below 2^-126, or not finite, or the job has no weights.
  void set_weight(float weight);
  // Starts the exchange of a key: lends the gradient to the library until wait() returns, and ends
  // the validity of the parameters. Waits for the key's previous result first.
  Pushed push(size_t key, const PushOptions& how);
  Pushed push(size_t key, int32_t priority = 0) { return push(key, {.priority = priority}); }
  Pushed push_null(size_t key) { return push(key, {.null = true}); }
  // The number of parts that push_part() can send a key in, a few MiB each. It is 1 for small keys,
  // where something is computed from, or done with, the whole gradient (coded formats that the
  // worker encodes, plain ones of a job with weights, factors, rows, carry_over, the send_order
  // "magnitude"), and where this rank exchanges only some elements.
  size_t parts(size_t key) const;
  struct Elements {
    uint64_t begin = 0, end = 0;
  };
  Elements part(size_t key,
                size_t part) const;  // where it lies in the key; kInvalid: there is none
  // Does as push() for one part of a key, from gradient_bytes(), while the rest of the gradient is
  // still to come. Part 0 begins the exchange, and all others follow, in this order, each once. An
  // announced part ends by itself (Pushed::part): its elements are in parameter_bytes() then.
  // (With gated rounds that is when all keys of the round are here, so push all parts first.)
  // wait() returns when all parts have ended. Throws Error(kInvalid): it is not the next part, or
  // memory is registered for a key of several parts.
  Pushed push_part(size_t key, size_t part, const PushOptions& how = {});
  // Does the same after copying the gradient from the caller's memory to gradient_bytes(). Throws
  // Error(kInvalid) for another number of bytes, and if memory is registered for the gradient.
  Pushed push_copy(size_t key, std::span<const std::byte> gradient, const PushOptions& how = {});
  // Does the same for a matrix whose gradient is sent as factors (KeySpec::rank_limit), in one part
  // or several: one of each device of this process, for example. They are copied before it returns.
  // The server adds up the outer products of all ranks, in the order of ranks and then of pairs
  // (kernels/slots.h). No pair at all is a null. Throws Error(kInvalid) if there are more than
  // rank_limit pairs.
  Pushed push_factors(size_t key, std::span<const FactorPairs> factors, const PushOptions& how);
  Pushed push_factors(size_t key, const FactorPairs& factors) {
    return push_factors(key, {&factors, 1}, {});
  }
  // Does the same for a matrix whose gradient is sent as the rows that are not zero
  // (KeySpec::rows_limit). They are copied before it returns. The server adds up each row, in the
  // order of the ranks that have it. No row at all is a null. Throws Error(kInvalid) if there is no
  // such row, if there are more than rows_limit different ones, or if the number of elements is
  // wrong.
  Pushed push_rows(size_t key, const GradientRows& rows, const PushOptions& how = {});
  // For a caller that encodes the gradients of a coded key itself, as DeviceKeys on a device: from
  // now on gradient_bytes() is the memory of the key's slots, which push(), push_part() and
  // push_copy() send as they are, and the key may have several parts(). Its rounding is that of
  // spec().rounding, with rounding_seed() of the job's name, rank() and the round that is pushed.
  // The caller begins with the residual and leaves in it what it has at the end. Waits for the
  // key's previous result first. Throws Error(kInvalid): not may_encode(); memory is registered for
  // the key.
  CodedSlots begin_encoding(size_t key);
  // The worker encodes it again, from the next push on. REQUIRES: no part of it is still to be
  // pushed, or the worker has failed.
  void end_encoding(size_t key);
  // Whether its caller may: its format is coded, and the same in every round; its caller does not
  // do so yet; the worker needs no residuals meanwhile (carry_over, a job whose state of ranks the
  // server saves); and this rank exchanges all of it.
  bool may_encode(size_t key) const;
  // Returns when the key's result is here; at once if the key was not pushed since. Every rank must
  // push every key once a round: if others have waited for a tenth of progress_limit_ms (5 s at
  // most) for a key that this rank left out, wait() throws kInvalid, which names the key. The
  // worker remains usable: the key can still be pushed.
  void wait(size_t key);
  void wait_all();
  bool test(size_t key);  // wait() would not block
  size_t poll();          // makes progress without waiting; returns the number of keys in progress
  // Returns the next announced push that ended, in the order of their end, each once, also those
  // that the worker's failure ended. Returns nullopt if wake() was called. Throws the failure when
  // no push is left. One thread only.
  std::optional<Completion> wait_any();
  void wake();  // ends the wait_any() in progress, or else the next one
  // Drops the pushes announced so far: wait_any() will not return them. REQUIRES: no wait_any() is
  // in progress.
  void forget_announced();
  // Ends all waits in progress, and every later call, with kFenced and this message. The server is
  // not told: the others lose this rank when its lease expires.
  void end(const std::string& why);
  void push_pull(size_t key, int32_t priority = 0) {
    push(key, priority);
    wait(key);
  }
  // Waits, and copies the key's parameters (in the job's format) to the caller's memory.
  void pull(size_t key, std::span<std::byte> into);

  uint64_t round(size_t key) const;  // the latest round whose result is here
  // The verdict on the latest round of which a result is here, in a job with gated rounds
  // (max_norm, on_nonfinite skip, optimizer lars, lamb, adafactor or muon): the norm of its
  // gradient, before it was clipped, and whether it was skipped. All ranks have the same verdict.
  // Returns nullopt in other jobs, and before the first round of this worker.
  std::optional<RoundVerdict> verdict() const;

  // Changes hyperparameters (training.md has their names) from `round` on, for all ranks; 0: from
  // the first round in which this rank has pushed no key. Returns the round from which they hold:
  // later than `round` if chunks of it are complete already (with a `batch` among the values, not
  // before the round after the one in progress), or a later change exists. Any rank may call it,
  // one or all of them: several must set the same for one round (kMismatch).
  uint64_t set_hyper(const std::map<std::string, double>& values, uint64_t round = 0);
  // Tells who looks at the job (`phub status`, the server's page and its messages) what this rank
  // has decided for it: a sentence about a subject such as "factors", which replaces the one before
  // it, of any rank; "" takes that away. Subjects have 1 to 64 bytes, texts 4096 at most
  // (kInvalid); a job has 32 subjects (kFull). Throws Error.
  void remark(const std::string& subject, const std::string& text);
  // Branches, of a job whose spec has some: states of the model with hyperparameters of their own,
  // of which one runs in each round, for all ranks. The job begins as branch 0. Any rank may call
  // these; usually one decides, or a program beside the training. All decisions about branches and
  // hyperparameters hold from rounds that do not descend; `round` 0: as soon as possible. Each
  // returns the round from which it holds, which may be later. Throws Error: kNotFound, there is no
  // such branch; kFull, all of the job's `branches` are there, or too many changes are still to
  // come; kInvalid, another job, or turns that are not as described.
  //
  // From its round on there is another branch, a copy of `parent` as that is before the round: its
  // parameters, the optimizer's states and its steps; and its hyperparameters but for `values`.
  // Until it is scheduled, nothing changes it. Returns its number, as `branch`, too.
  BranchReply fork(uint32_t parent, const std::map<std::string, double>& values = {},
                   uint64_t round = 0);
  // From its round R on the branches run one after another, each for so many rounds; the last, for
  // which that is 0, until another schedule. The parameters of the first of them take the place of
  // those that round R−1 made, and are its result. There may be at most kMostBranchTurns turns.
  uint64_t schedule(std::span<const BranchTurn> turns, uint64_t round = 0);
  // The branch is gone, and there is room for another. kInvalid: it is the one that runs when all
  // is done that was scheduled.
  uint64_t discard(uint32_t branch, uint64_t round = 0);
  // The branch goes to files, where the server keeps checkpoints (else kInvalid): with the next one
  // after a round that is complete before the kill holds, which the server takes by itself. From
  // then on branches() has it `on_disk`, and there is room for another. It can be discarded, or
  // revived: then it is as if it had never been killed, if there is room (kFull). At most
  // kMostKilledBranches are killed at a time. kInvalid, too: it runs when all is done that was
  // scheduled. revive() returns when the files are read; kInvalid or kNotFound, also: they are
  // damaged or gone, and the job goes on without.
  uint64_t kill(uint32_t branch, uint64_t round = 0);
  uint64_t revive(uint32_t branch, uint64_t round = 0);
  // The decisions so far. The number of rounds that each branch has run is as of the server's
  // latest look at the job.
  BranchReply branches();
  // In a job without an optimizer: the values that the branch and those that it comes from were
  // forked with; also of one that is discarded, until the rounds are over in which it runs. Throws
  // kNotFound.
  std::map<std::string, double> branch_values(uint32_t branch);
  // The branch that runs in `round`. The answer is final for the round after the latest result that
  // this rank has, and for earlier ones as far as they are remembered.
  uint32_t branch_in(uint64_t round);
  // The hyperparameter `batch` of that branch in `round`: samples of a rank's gradient; 0: none is
  // set, and the program decides. The answer is as final as that of branch_in(). Throws kNotFound:
  // the round is over.
  uint64_t batch_in(uint64_t round);
  // Tells the server this rank's loss in `round`; 0: in the first round in which it has pushed no
  // key. REQUIRES: it has not pushed that round; rounds ascend. Any number may be reported, also
  // one that is not finite. The server keeps the means of the latest rounds, of all ranks that
  // report, with the branch that ran, for a program that drives the branches from outside (`phub
  // tune`), and shows the latest. A job may report several losses, each by a name: such as "train"
  // and "validation"; 1 to 32 letters, digits and '_', '-', '.', '/'. Throws Error; kFull: the job
  // has eight other names.
  void report_loss(double loss, uint64_t round = 0, const std::string& name = "loss");
  // The names of the optimizer's state of each key, beside its parameters: "momentum_buffer";
  // "exp_avg", "exp_avg_sq"; … The files of a checkpoint have the same names.
  std::vector<std::string> state_names() const;
  // Copies the state of these keys to their arrays and steps. Returns R: it is as it was after
  // round R, on all cores of the server. Call it between rounds: when this rank has the results of
  // all keys, and has pushed none since. For jobs in lock-step with an optimizer. Throws Error:
  // kInvalid, an array has another size, or this job has no such state; kTaken, another rank reads
  // or sets it: try again; kFull, the server has no memory for it: ask for fewer keys.
  uint64_t get_state(std::span<KeyState> states);
  // Sets the state of these keys, of all ranks, from the same call. Returns R: the optimizer works
  // on the new state from round R on, so the results of R are the new parameters after one more
  // step. A rank that is to compute its gradients of round R with the new parameters loads them
  // itself, or waits for the others with barrier() and calls get_state(). Until R is complete a
  // second set throws kTaken. A job that goes on from a checkpoint of a round before R goes on
  // without it. Errors as above.
  uint64_t set_state(std::span<const KeyState> states);
  // Asks for a checkpoint as soon as possible. Returns its round: the latest that is complete; or,
  // if ranks save their own state, the next one that they save. A server that is taking one anyway
  // takes no other. Throws Error(kInvalid): the server keeps no checkpoints, the job is not saved,
  // or no round is complete.
  uint64_t checkpoint();
  // Returns when a checkpoint of `round` or a later one survives the server. Throws Error: kTimeout
  // after `timeout_ms` (0: no limit); or why it was not written: kRankLost, a rank was lost that
  // had to send its part; kFull or kInternal, the disk; then the one before stands.
  void await_checkpoint(uint64_t round, uint32_t timeout_ms = 0);
  // Asks the server for the ranks whose gradients the current round lacks.
  std::vector<uint32_t> missing_ranks();
  // "rank 1 has not sent key 'w2' of round 3 for 7.5 s": why a wait takes longer than described at
  // wait(), as the server sees it. It is also written to stderr, once for each key and round, and
  // part of the message of a timeout. Empty: nothing holds the job up.
  std::string waits_for() const;
  void barrier();  // waits for all live ranks, through the control port
  // Leaves the job. The others go on without this rank, whatever the job's policy; but before the
  // job has begun it counts as a loss. Waits of other threads end at once, with kFenced. The server
  // has `timeout_ms` to answer.
  void leave(uint32_t timeout_ms = 10'000);
  // Ends this worker as if its process had died: to the others its rank is lost, at once, or after
  // lease_ms if the server does not answer within 2 s, and `on_loss` decides. Otherwise as leave().
  void abandon();

  WorkerStats stats() const;
  MemoryDevice* memory_device() const;  // the one in the options
  std::string connection() const;       // for people: the transport, its devices and memory

 private:
  struct Impl;
  explicit Worker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub
