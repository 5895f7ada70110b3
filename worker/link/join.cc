#include "worker/link/join.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "transport/control/control_client.h"
#include "transport/control/server_address.h"
#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/paced/nic_budget.h"
#include "worker/link/connect.h"
#include "worker/memory/gradient_coder.h"
#include "worker/memory/memory_device.h"
#include "worker/session/send_order.h"

namespace phub {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
constexpr milliseconds kBetweenSweeps{50};

// A limit of the caller must not be 0, which means no limit.
uint32_t sum_ms(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(uint64_t{a} + b, 1, ~uint32_t{0}));
}

// Whether to ask again: nobody was there, or somebody who may be gone soon.
enum class Next { kStop, kOtherServer, kAgain };

Next after_join(ErrorCode code, bool several) {
  // kRewound: the job goes on from its checkpoint right now.
  if (code == ErrorCode::kUnavailable || code == ErrorCode::kRewound) return Next::kAgain;
  return code == ErrorCode::kTimeout && several ? Next::kAgain : Next::kStop;
}

Next after_rejoin(ErrorCode code, bool several) {
  switch (code) {
    case ErrorCode::kUnavailable:
    case ErrorCode::kTimeout:
    case ErrorCode::kRewound:
    case ErrorCode::kTaken:  // the server has not noticed yet that this rank's connection broke
      return Next::kAgain;
    case ErrorCode::kFenced:
    case ErrorCode::kNotFound:
      return several ? Next::kOtherServer : Next::kStop;
    default:
      return Next::kStop;
  }
}

Joined join_at(const std::string& server, const WorkerOptions& options, JoinRequest request,
               const std::stop_token& stop) {
  ControlClient control(server, options.token, options.tls);
  const std::stop_callback cancel(stop, [&control] { control.cancel(); });
  // A server that hangs must not take the time of a join, which waits for other ranks.
  const bool several = options.server.find(',') != std::string::npos;
  if (several || request.epoch > 0) control.ping(std::max(options.connect_timeout_ms, 1u));
  request.transport = choose_transport(options, server);
  JoinReply reply =
      control.join(request, sum_ms(options.connect_timeout_ms, options.spec.join_limit_ms));
  // The caller's memory has the size of the caller's keys: another answer must not be trusted.
  JobSpec expected = options.spec;
  expected.rank_hosts = reply.spec.rank_hosts;  // where ranks were when the job was planned
  if (const std::string other = difference(expected, reply.spec); !other.empty()) {
    fail(ErrorCode::kInternal, "the server's answer is about another job: {}", other);
  }
  if (reply.interest != request.interest) {
    fail(ErrorCode::kInternal, "the server's answer is about another interest in job '{}'",
         options.spec.name);
  }
  if (reply.epoch < request.epoch) {
    fail(ErrorCode::kFenced,
         "the server at {} has an earlier life of job '{}' ({}, this worker {})", server,
         options.spec.name, reply.epoch, request.epoch);
  }
  return {server, std::move(reply), control.reached()};
}

// All attempts have one id, so that they are one join.
Joined join_somewhere(const WorkerOptions& options, const JoinRequest& request,
                      Clock::time_point give_up, Next (*after)(ErrorCode code, bool several),
                      const std::stop_token& stop) {
  const std::vector<std::string> servers = servers_of(options.server);
  constexpr auto kNever = Clock::time_point::max();
  auto taken_since = kNever;
  for (;;) {
    std::optional<Error> last;
    bool again = false, taken = false;
    for (const std::string& server : servers) {
      try {
        return join_at(server, options, request, stop);
      } catch (const Error& error) {
        if (stop.stop_requested()) fail(ErrorCode::kFenced, "this worker ended while it rejoined");
        const Next next = after(error.code(), servers.size() > 1);
        if (next == Next::kStop) throw;
        taken = taken || error.code() == ErrorCode::kTaken;
        again = again || next == Next::kAgain;
        last.emplace(error.code(), error.what());
      }
    }
    if (!taken) taken_since = kNever;
    if (taken && taken_since == kNever) taken_since = Clock::now();
    // For longer than any lease: another worker has it.
    const bool for_good =
        taken && Clock::now() - taken_since > milliseconds(2 * options.spec.lease_ms);
    if (!again || for_good || Clock::now() > give_up) throw Error(last->code(), last->what());
    std::this_thread::sleep_for(kBetweenSweeps);
  }
}

// What can be known before the server is asked.
void check_sending(const WorkerOptions& options) {
  parse_send_order(options.send_order);
  if (options.carry_over > 0) check_carries(options.spec);
  if (options.nic_budget.empty()) return;
  parse_rate(options.nic_budget);
  if (options.transport == "shm") {
    fail(ErrorCode::kInvalid,
         "nic_budget is '{}', and over transport 'shm' nothing is sent; leave one of both out",
         options.nic_budget);
  }
}

}  // namespace

bool has_state(const WorkerOptions& options) {
  return options.saver != nullptr || saves_residuals(options.spec);
}

Joined join(const WorkerOptions& options) {
  if (options.rank < 0 && !options.rank_error.empty()) {
    fail(ErrorCode::kInvalid, "{}", options.rank_error);
  }
  validate(options.spec);
  if (options.silence_limit_ms == 0) {
    fail(ErrorCode::kInvalid, "silence_limit_ms is 0: a server that hangs would never be noticed");
  }
  check_interest(options.interest, options.spec);
  check_sending(options);
  check_memory_device(options);
  // Retries, since the server may be started at the same time as its workers.
  return join_somewhere(options,
                        {.spec = options.spec,
                         .rank = options.rank,
                         .replace = options.replace,
                         .id = make_ticket(),
                         .saves = has_state(options),
                         .interest = options.interest},
                        Clock::now() + milliseconds(options.connect_timeout_ms), after_join, {});
}

bool may_rejoin_after(const Error& error) {
  return error.code() == ErrorCode::kRewound || error.code() == ErrorCode::kUnavailable ||
         error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kRankLost;
}

Joined rejoin(const WorkerOptions& options, const JoinReply& lost, Clock::time_point give_up,
              std::stop_token stop) {
  return join_somewhere(options,
                        {.spec = options.spec,
                         .rank = static_cast<int32_t>(lost.rank),
                         .id = make_ticket(),
                         .epoch = lost.epoch,
                         .incarnation = lost.incarnation,
                         .saves = has_state(options),
                         .interest = options.interest},
                        give_up, after_rejoin, stop);
}

}  // namespace phub
