#include "worker/link/link_keeper.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "transport/greeting.h"
#include "worker/link/connect.h"
#include "worker/link/switch_link.h"
#include "worker/session/session.h"

namespace phub {
namespace {

using std::chrono::milliseconds;
constexpr uint32_t kGoodbyeMs = 2000;
constexpr uint32_t kLeastHeartbeatMs = 100;
constexpr milliseconds kBetweenJoined{20};  // questions whether all ranks are there

// Between attempts to reconnect: each pause is twice as long as the one before, up to a second.
class Pause {
 public:
  void sleep() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(2 * next_, kLongest);
  }

 private:
  static constexpr milliseconds kLongest{1000};
  milliseconds next_{20};
};

// Errors after which a retry makes sense: the network broke, or the server has not noticed yet that
// the old connection is broken.
bool may_pass(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout ||
         error.code() == ErrorCode::kTaken || error.code() == ErrorCode::kUnauthorized;
}

// Errors that do not concern this worker: the server did not answer, or this process had no memory
// or descriptors for the call.
bool is_silence(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout ||
         error.code() == ErrorCode::kFull;
}

// What the control port says of a rank that is out, or whose server began anew.
bool is_of_this_rank(const Error& error) {
  return error.code() == ErrorCode::kRewound || error.code() == ErrorCode::kRankLost ||
         error.code() == ErrorCode::kFenced;
}

// A connection may break during set-up; then the server offers another, if the transport can. Over
// shared memory it cannot; but when it gave up waiting for the ticket, that ticket is still good.
std::unique_ptr<WorkerLink> connect_link(ControlClient& control, const WorkerOptions& options,
                                         const Joined& joined, const Credential& credential) {
  if (!options.nic_budget.empty() && !joined.reply.through_switch.streams.empty()) {
    fail(ErrorCode::kInvalid,
         "nic_budget is '{}', and what goes through a switch that adds, as this server has one, "
         "keeps to none; leave it out, or use another format than int32",
         options.nic_budget);
  }
  const uint32_t timeout_ms = options.connect_timeout_ms;
  const JoinReply& reply = joined.reply;
  const SteadyTime give_up = now() + milliseconds(timeout_ms);
  Offer offer = reply.offer;
  bool ticket_unseen = false;
  Pause pause;
  for (std::optional<Error> first;;) {
    try {
      if (first && !ticket_unseen) offer = control.reconnect(credential, timeout_ms);
      const bool as_safe = offer.tls || !reply.offer.tls;
      if (as_safe) {
        return through_switch(
            connect(options, joined.server, joined.reached, offer, link_layout_of(reply)), reply);
      }
    } catch (const Error& error) {
      if (!first) first = error;
      if (is_of_this_rank(error)) throw;  // why the connection was refused
      if (!may_pass(error) || now() > give_up) throw Error(*first);
      ticket_unseen = offer.transport == "shm" && error.code() == ErrorCode::kTimeout;
    }
    if (reply.offer.tls && !offer.tls) {
      fail(ErrorCode::kUnauthorized,
           "the server at {} offered TLS for data, and now a connection without it", joined.server);
    }
    pause.sleep();
  }
}

}  // namespace

LinkKeeper::LinkKeeper(const WorkerOptions& options, Joined joined)
    : options_(options),
      joined_(std::move(joined)),
      control_(server(), options.token, options.tls),
      pulse_(server(), {}, options.tls),
      calls_(server(), options.token, options.tls),
      credential_{spec().name, reply().rank, reply().incarnation, reply().offer.ticket,
                  reply().epoch} {}

void LinkKeeper::connect(std::function<void()> on_failure) {
  on_failure_ = std::move(on_failure);
  // Heartbeats come first: connecting may take longer than the lease.
  heartbeat_ =
      start("phub-heartbeat", [this](const std::stop_token& stop) { heartbeat_loop(stop); });
  link_ = unless_gone([this] { return connect_link(control_, options_, joined_, credential_); });
  linked_ = true;
}

void LinkKeeper::stop() noexcept {
  heartbeat_.request_stop();
  pulse_.cancel();
  if (heartbeat_.joinable()) heartbeat_.join();
  if (std::exchange(stopped_, true) || failure_.happened()) return;
  try {
    control_.leave(credential_, kGoodbyeMs);
  } catch (...) {  // NOLINT(bugprone-empty-catch): then the lease expires
  }
}

void LinkKeeper::heartbeat_loop(const std::stop_token& stop) {
  const milliseconds period = milliseconds(std::min(spec().lease_ms, options_.silence_limit_ms));
  const auto patience = std::max(kLeastHeartbeatMs, static_cast<uint32_t>(period.count() / 2));
  SteadyTime last_answer = now();
  std::unique_lock lock(heartbeat_mutex_);
  while (!stop.stop_requested() && !failure_.happened()) {
    lock.unlock();
    const SteadyTime give_up = now() + milliseconds(patience);
    try {
      const Pulse pulse = pulse_.heartbeat(credential_, patience);
      if (pulse.standby_lost && !has_forgone_) forgo_standby(patience);
      last_answer = now();
      ++answers_;
    } catch (const Error& error) {
      // What it took longer, this process was stopped for: that is not the server's silence.
      last_answer += std::max(now() - give_up, {});
      no_answer(error, now() - last_answer);
    }
    lock.lock();
    heartbeat_wake_.wait_for(lock, stop, period / 3, [] { return false; });
  }
}

// It is decided before the server hears of it. The call is made again after the next heartbeat if
// it failed.
void LinkKeeper::forgo_standby(uint32_t patience) {
  Side side = Side::kUndecided;
  side_.compare_exchange_strong(side, Side::kThisServer);
  if (side == Side::kAnyServer) return;  // this worker has failed
  pulse_.forgo_standby(credential_, patience);
  has_forgone_ = true;
}

void LinkKeeper::no_answer(const Error& error, std::chrono::steady_clock::duration silence) {
  // While the connection is alive, the box may still sum from this process's memory. So wait for
  // its answer, up to silence_limit_ms.
  const bool not_asked = error.code() == ErrorCode::kFull;
  const bool lease_over = silence > milliseconds(spec().lease_ms);
  if (!is_silence(error) || (lease_over && (not_asked || (linked_ && !link_->connected())))) {
    fail_without_server(error.code(), error.what());
  } else if (silence > milliseconds(options_.silence_limit_ms)) {
    fail_without_server(
        ErrorCode::kUnavailable,
        fmt::format("the phub server at {} has answered no heartbeat for {} ms (the limit is "
                    "{}), although the connection is there: {}",
                    server(), std::chrono::duration_cast<milliseconds>(silence).count(),
                    options_.silence_limit_ms, error.what()));
  }
}

// What a server that is gone means for the worker of a job that outlives it: it may join again.
void LinkKeeper::fail_without_server(ErrorCode code, const std::string& message) {
  const bool gone = code == ErrorCode::kUnavailable || code == ErrorCode::kTimeout;
  if (!gone || reply().epoch == 0) return fail_with(code, message);
  fail_with(ErrorCode::kRewound,
            fmt::format("{}; job '{}' goes on when its server, or its standby, is there: rejoin() "
                        "waits for that",
                        message, spec().name));
}

void LinkKeeper::fail_with(ErrorCode code, const std::string& message) {
  failure_.keep(code, message);
  on_failure_();
  calls_.cancel();
  pulse_.cancel();
}

void LinkKeeper::fail_with_exception() noexcept {
  const Error error = error_in_flight();
  try {
    fail_with(error.code(), error.what());
  } catch (...) {
    failure_.keep_without_message();  // no memory was left for it
  }
}

void LinkKeeper::await_ranks() {
  for (milliseconds pause{1};; pause = std::min(2 * pause, between_questions(kBetweenJoined))) {
    failure_.check();
    try {
      const auto heartbeat = [&](ControlClient& client) { return client.heartbeat(credential_); };
      if (!ask(heartbeat).assembling) return;
    } catch (const Error& error) {
      if (!may_pass(error)) throw;  // the heartbeat thread decides when to give up
    }
    std::this_thread::sleep_for(pause);
  }
}

bool LinkKeeper::check_link() {
  failure_.check();
  if (link_->connected()) return true;
  if (link_->can_reconnect()) return false;
  const SteadyTime give_up = now() + milliseconds(2 * spec().lease_ms);
  while (!failure_.happened()) {
    try {
      ask([&](ControlClient& client) { client.heartbeat(credential_, kAskMs); });
      if (now() > give_up) {
        fail_with(ErrorCode::kFenced,
                  fmt::format("the connection of rank {} to the server at {} closed",
                              credential_.rank, server()));
      }
      std::this_thread::sleep_for(milliseconds(10));
    } catch (const Error& error) {
      // After this process was stopped its deadlines have passed: only the server's answer tells
      // whether the rank is still alive.
      if (error.code() != ErrorCode::kTimeout || now() > give_up) {
        fail_without_server(error.code(), error.what());
      }
    } catch (...) {
      fail_with_exception();
    }
  }
  failure_.check();
  return true;
}

void LinkKeeper::reconnect() {
  const SteadyTime give_up = now() + milliseconds(2 * spec().lease_ms);
  Pause pause;
  while (!failure_.happened()) {
    try {
      link_->reconnect(ask([&](ControlClient& client) {
        return client.reconnect(credential_, std::max(1000u, spec().lease_ms));
      }));
      return;
    } catch (...) {
      const Error error = error_in_flight();
      if (!may_pass(error) || now() > give_up) {
        fail_without_server(error.code(),
                            fmt::format("the connection of rank {} to the server at {} broke: {}",
                                        credential_.rank, server(), error.what()));
      }
    }
    pause.sleep();
  }
}

void LinkKeeper::end(const std::string& why) {
  heartbeat_.request_stop();
  fail_with(ErrorCode::kFenced, why);
}

void LinkKeeper::abandon() {
  const bool failed = failure_.happened();  // then the server knows
  end(fmt::format("rank {} has given up job '{}'", credential_.rank, spec().name));
  if (failed) return;
  try {
    control_.tell(credential_, {.failure = "its program gave it up"}, kGoodbyeMs);
  } catch (...) {  // NOLINT(bugprone-empty-catch): its connections end, or its lease
  }
}

void LinkKeeper::tell_server(uint32_t timeout_ms) { control_.leave(credential_, timeout_ms); }

}  // namespace phub
