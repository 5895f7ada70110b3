// A worker's membership in a job that it has joined: connects, renews the lease with heartbeats,
// reconnects, and leaves.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "transport/control/control_client.h"
#include "transport/transport.h"
#include "worker/any_error.h"
#include "worker/link/control_calls.h"
#include "worker/link/failure.h"
#include "worker/link/join.h"
#include "worker/worker.h"

namespace phub {

using SteadyTime = std::chrono::steady_clock::time_point;
inline SteadyTime now() { return std::chrono::steady_clock::now(); }

inline constexpr uint32_t kAskMs = 1000;  // limit of a call that only explains a delay

// Thread-safe, except for connect() and stop().
class LinkKeeper {
 public:
  // REQUIRES: `options` outlives this.
  LinkKeeper(const WorkerOptions& options, Joined joined);
  ~LinkKeeper() { stop(); }
  LinkKeeper(const LinkKeeper&) = delete;
  LinkKeeper& operator=(const LinkKeeper&) = delete;

  // Starts the heartbeats and connects. When the worker fails, the thread that notices it calls
  // `on_failure`. Throws Error.
  void connect(std::function<void()> on_failure);
  // Ends the heartbeats, and leaves the job unless the worker has failed or left. `on_failure` is
  // not called afterwards. REQUIRES: no other call is in progress.
  void stop() noexcept;

  const WorkerOptions& options() const { return options_; }
  const std::string& server() const { return joined_.server; }
  // REQUIRES: this worker has failed. The only server at which the job may go on for this rank, as
  // the rank has forgone its standby; "": any, and the rank forgoes none from now on.
  std::string only_server() {
    Side side = Side::kUndecided;
    side_.compare_exchange_strong(side, Side::kAnyServer);
    return side == Side::kThisServer ? server() : "";
  }
  const JoinReply& reply() const { return joined_.reply; }
  const JobSpec& spec() const { return reply().spec; }
  const Credential& credential() const { return credential_; }
  WorkerLink& link() { return *link_; }  // REQUIRES: connect() returned

  const WorkerFailure& failure() const { return failure_; }
  void fail_with(ErrorCode code, const std::string& message);
  void fail_with_exception() noexcept;  // REQUIRES: called in a catch block

  // Returns body(ControlClient&), a call to the control port. If the worker fails meanwhile, the
  // call ends and throws the worker's failure.
  template <typename Body>
  auto ask(Body body) {
    failure_.check();
    try {
      return calls_.call(body);
    } catch (...) {
      if (error_in_flight().code() == ErrorCode::kRewound) fail_with_exception();
      failure_.check();  // the reason why the call ended
      throw;
    }
  }
  // Does the same for a call to a server that may just have died: if the worker may rejoin,
  // kUnavailable is thrown only if the server answers heartbeats.
  template <typename Body>
  auto ask_server(Body body) {
    return unless_gone([&] { return ask(body); });
  }
  // Between two questions of a rank that waits: `least`, but with many ranks longer, so that all of
  // them ask the server at most a thousand times in a second.
  std::chrono::milliseconds between_questions(std::chrono::milliseconds least) const {
    return std::max(least, std::chrono::milliseconds(spec().world_size));
  }
  void cancel_calls() { calls_.cancel(); }  // those of ask(), and every later one
  // Starts a thread. An exception that `body` throws becomes the worker's failure.
  template <typename Body>
  std::jthread start(const char* name, Body body) {
    return start_thread(name, [this, body](const std::stop_token& stop) {
      try {
        body(stop);
      } catch (...) {
        fail_with_exception();
      }
    });
  }

  // Returns when all first ranks have joined. Throws Error(kRankLost), which names the missing
  // ones, if they do not in time.
  void await_ranks();
  // Whether the connection is alive. If it broke and the transport cannot reconnect, the worker
  // fails, with the reason that the server gives.
  bool check_link();
  // Reconnects, retrying for as long as the server says that this rank is alive; then the worker
  // fails.
  void reconnect();

  // Frees the ports that another worker of this rank may need. REQUIRES: this one has failed; the
  // sleeper's lock is held.
  void give_up_ports() {
    if (linked_) link_->give_up_ports();
  }
  // Fails the worker with kFenced and this message. No more heartbeats are sent.
  void end(const std::string& why);
  void abandon();                         // the same; to the server, this rank has failed
  void tell_server(uint32_t timeout_ms);  // reports that this rank leaves

 private:
  template <typename Call>
  auto unless_gone(Call call) {
    try {
      return call();
    } catch (const Error& error) {
      const uint64_t enough = answers_ + 2;  // one may have been on its way
      while (error.code() == ErrorCode::kUnavailable && reply().epoch > 0 && answers_ < enough) {
        failure_.check();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      throw;
    }
  }
  void heartbeat_loop(const std::stop_token& stop);
  void forgo_standby(uint32_t patience);
  void no_answer(const Error& error, std::chrono::steady_clock::duration silence);
  void fail_without_server(ErrorCode code, const std::string& message);

  const WorkerOptions& options_;
  const Joined joined_;
  ControlClient control_;  // for connecting and leaving
  ControlClient pulse_;    // for the heartbeat thread
  ControlCalls calls_;     // for all other calls
  const Credential credential_;
  std::unique_ptr<WorkerLink> link_;
  std::atomic<bool> linked_{false};  // `link_` is set
  std::function<void()> on_failure_ = [] {};

  WorkerFailure failure_;

  std::mutex heartbeat_mutex_;
  std::condition_variable_any heartbeat_wake_;
  std::jthread heartbeat_;
  std::atomic<uint64_t> answers_ = 0;  // the server's answers to heartbeats
  // Where the job may go on for this rank: decided once (phub/job/standby.h).
  enum class Side : uint8_t { kUndecided, kThisServer, kAnyServer };
  std::atomic<Side> side_ = Side::kUndecided;
  bool has_forgone_ = false;  // heartbeat thread: the standby, and the server knows
  bool stopped_ = false;
};

}  // namespace phub
