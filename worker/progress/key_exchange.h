// The exchange of keys, as the threads of a worker share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "worker/link/link_keeper.h"
#include "worker/memory/gradient_coder.h"
#include "worker/memory/registered_memory.h"
#include "worker/progress/completion_queue.h"
#include "worker/progress/key_rounds.h"
#include "worker/progress/sleeper.h"
#include "worker/progress/stalls.h"
#include "worker/progress/worker_trace.h"
#include "worker/session/session.h"
#include "worker/worker.h"

namespace phub {

// Has the session, the announced pushes, the memory of the keys and the trace, and the lock that
// guards all of them. Copies gradients in and results out, on the thread that calls. A worker owns
// one for its life. Thread-safe, except for connect(), start() and stop().
class KeyExchange {
 public:
  using Lock = Sleeper::Lock;

  // REQUIRES: the arguments outlive this. Throws Error(kInvalid) for the options.
  KeyExchange(LinkKeeper& keeper, StallWatch& stalls, GradientCoder& coder);
  ~KeyExchange() { stop(); }
  KeyExchange(const KeyExchange&) = delete;
  KeyExchange& operator=(const KeyExchange&) = delete;

  void connect();  // the keeper; the worker's failure then ends all waits
  // An empty path: no trace. REQUIRES: it is connected. Everything below requires that it started.
  void start(const std::string& trace_file);
  void stop();

  KeyRounds& rounds() { return *rounds_; }

  // The library's memory of a key.
  std::span<std::byte> gradient(size_t key);
  std::span<const std::byte> parameters(size_t key) const { return session_->result(key); }
  // The caller's memory: see Worker::register_memory().
  void register_memory(size_t key, const KeyMemory& memory);
  // Registers what another worker of this rank had registered, which does not use it any more.
  // REQUIRES: that one has failed or ended.
  void take_over(KeyExchange& before);
  // The caller may free its memory afterwards. REQUIRES: the worker has failed or ended.
  void release_memory();
  // Frees the ports that another worker of this rank may need. REQUIRES: this one has failed.
  void give_up_ports();

  // Returns once the key can be pushed. Throws Error(kInvalid) if this rank has no part in it.
  void await_turn(size_t key);
  // Puts the gradient into the key's slots. Returns whether bytes were copied.
  using CopyIn = std::function<bool(RegisteredMemory& memory, Lock& lock)>;
  // REQUIRES: await_turn(key) has returned since the key was pushed last.
  Pushed push(size_t key, const PushOptions& how, const CopyIn& copy_in);
  // As Worker::parts(), part() and push_part(). REQUIRES: for part 0 as push().
  size_t parts(size_t key) const;
  SessionKeys::Elements part(size_t key, size_t part) const;
  Pushed push_part(size_t key, size_t part, const PushOptions& how);
  void flush();                   // what was pushed goes out
  void set_weight(float weight);  // as Worker

  // As in Worker; but for what the saver needs.
  bool may_encode(size_t key) const;
  CodedSlots begin_encoding(size_t key);  // REQUIRES: as push()
  void end_encoding(size_t key);

  // Sends the initial parameters, if the job needs this rank's, and waits for all keys. Returns
  // whether it sent them. `initial_of` throws if the caller's are not as they should be.
  bool broadcast(const std::function<const float*(size_t key)>& initial_of);

  // `key` may be Session::kAllKeys. The results are where the caller wants them.
  void wait(size_t key);
  // Throws Error(kInvalid) if others wait for this key, and this rank left it out.
  void check_not_left_out(size_t key);
  bool test(size_t key);
  size_t poll();  // returns the number of keys in progress
  std::optional<Completion> wait_any();
  void wake() { sleeper_.wake(); }
  void forget_announced();
  // Copies the latest result to the caller's memory. REQUIRES: the key is ready.
  void copy_result(size_t key, std::span<std::byte> into);

  WorkerStats stats();

 private:
  [[noreturn]] void fail_partly_pushed(size_t key) const;
  void carry_over(size_t key);
  void copy_out(size_t key);

  LinkKeeper& keeper_;
  StallWatch& stalls_;
  GradientCoder& coder_;
  const WorkerOptions& options_;
  const SendOrder order_;
  Sleeper sleeper_;

  // Guarded by the sleeper's lock; the pointers do not change after start().
  std::unique_ptr<WorkerTrace> trace_;  // null: no trace
  std::unique_ptr<Session> session_;
  std::optional<CompletionQueue> completions_;
  std::optional<RegisteredMemory> memory_;
  std::map<size_t, KeyMemory> registered_;  // for the worker that comes after this one
  uint64_t pushes_ = 0;

  std::optional<KeyRounds> rounds_;
};

}  // namespace phub
