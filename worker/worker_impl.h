// The worker over its three parts: the link keeper (membership, connection, failure), the session
// (what is sent and received), and the sleeper (how threads share the session and wait for it).
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "worker/link/join.h"
#include "worker/link/link_keeper.h"
#include "worker/memory/gradient_coder.h"
#include "worker/memory/registered_memory.h"
#include "worker/progress/completion_queue.h"
#include "worker/progress/sleeper.h"
#include "worker/progress/stalls.h"
#include "worker/progress/worker_trace.h"
#include "worker/save/saver.h"
#include "worker/session/session.h"
#include "worker/worker.h"

namespace phub {

struct Worker::Impl {
  using Lock = Sleeper::Lock;
  Impl(const WorkerOptions& worker_options, Joined joined)
      : options(worker_options),
        keeper(options, std::move(joined)),
        stalls(keeper),
        sleeper(keeper, stalls),
        order(parse_send_order(options.send_order)),
        coder(keeper.reply(), options.carry_over > 0),
        saver(keeper, coder) {}
  ~Impl() {
    say_left_out();
    sleeper.stop();
    const bool fails = made && std::uncaught_exceptions() > exceptions;
    if (fails) keeper.abandon();
    if (!fails) saver.finish(std::chrono::seconds(2));
    keeper.stop();
  }

  // `stop` ends it.
  static std::unique_ptr<Impl> started(const WorkerOptions& options, Joined joined,
                                       const std::string& trace, const std::stop_token& stop = {});
  // For a worker that had this answer, and lost the server.
  static std::unique_ptr<Impl> joined_again(const WorkerOptions& options, JoinReply lost,
                                            const std::stop_token& stop);
  void start(const std::string& trace_file);
  void release_memory();
  // Puts the gradient into the key's slots. Returns whether bytes were copied.
  using CopyIn = std::function<bool(Lock& lock)>;
  Pushed push(size_t key, const PushOptions& how);
  Pushed push(size_t key, const PushOptions& how, const CopyIn& copy_in);
  void wait(size_t key);
  void carry_over(size_t key);
  void check_key(size_t key) const;
  void check_factors(size_t key, std::span<const FactorPairs> factors) const;
  std::vector<uint32_t> in_order(size_t key, const GradientRows& rows) const;
  void copy_out(size_t key);
  void received(size_t key);
  void save_before_push(size_t key);
  // `given`: the caller has initial parameters. Throws Error(kInvalid) if nobody would look at
  // them.
  void check_begins_with(bool given) const;
  bool broadcast(const std::function<const float*(size_t key)>& initial_of);
  void check_between_rounds();  // throws Error(kInvalid)
  uint64_t this_or_next(uint64_t round);
  void say_left_out() noexcept;
  BranchReply change_branches(BranchRequest request);
  uint64_t change_branch(BranchAction action, uint32_t branch, uint64_t round);

  const WorkerOptions options;
  LinkKeeper keeper;
  StallWatch stalls;
  Sleeper sleeper;
  const SendOrder order;
  GradientCoder coder;
  Saver saver;
  std::unordered_map<std::string_view, size_t> key_by_name;

  // Guarded by the sleeper's lock.
  std::unique_ptr<WorkerTrace> trace;  // null: no trace
  std::unique_ptr<Session> session;
  std::optional<CompletionQueue> completions;
  std::optional<RegisteredMemory> memory;
  std::map<size_t, KeyMemory> registered;  // for the worker that comes after this one
  uint64_t pushes = 0;

  std::stop_source over;  // ends rejoin()
  std::mutex rejoining;
  bool replaced = false;  // guarded by rejoining
  std::mutex states;      // a rank gets or sets states once at a time
  std::mutex leaving;
  bool left = false;  // guarded by leaving
  std::atomic<bool> said_left_out = false;
  // An exception that destroys a worker is a failure of the rank: it has not left.
  bool made = false;                                  // the constructor has returned
  const int exceptions = std::uncaught_exceptions();  // when it was made
};

}  // namespace phub
