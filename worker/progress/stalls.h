// The ranks and keys that hold a job up, as the server sees it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/control/messages.h"
#include "worker/link/link_keeper.h"
#include "worker/session/session.h"

namespace phub {

// A rank that has sent nothing for a while, and the key for which the others wait.
struct Stall {
  uint32_t rank = 0;
  std::string key;  // the key of the oldest chunk that the others wait for
  uint64_t round = 0;
  uint64_t chunks = 0;
  double seconds = 0;  // time since the rank last sent anything

  friend bool operator==(const Stall&, const Stall&) = default;
};

// The stalls of at least `least_s`.
std::vector<Stall> stalls_of(const JobStatus& job, double least_s);

// "rank 1 has not sent key 'w2' of round 3"
std::string describe(const Stall& stall);

// The latest answer of the server about stalls. Long waits ask it. Thread-safe.
class StallWatch {
 public:
  // REQUIRES: `keeper` outlives this.
  explicit StallWatch(LinkKeeper& keeper);

  // The time after which a wait asks the server.
  std::chrono::milliseconds stall_after() const { return stall_after_; }

  // Asks the server, unless another thread has just done so.
  void ask();
  // Writes each stall to stderr once.
  void warn();
  // "rank 1 has not sent key 'w2' of round 3 for 7.5 s; ..."; empty: no stall is known.
  std::string describe() const;
  // An error if others wait for a key that this rank passed over, while it waits for `key` in a
  // later round: neither would go on. REQUIRES: the caller holds the session's lock.
  std::optional<Error> passed_over(const Session& session, size_t key) const;
  // An error if others wait for `key` itself, since this rank did not push it in an earlier round.
  // REQUIRES: the caller holds the session's lock.
  std::optional<Error> passed_over_itself(const Session& session, size_t key) const;
  // The error of a wait for `key` that took longer than wait_timeout_ms. Asks the server.
  Error timeout_of(size_t key);

 private:
  std::string describe_missing();

  LinkKeeper& keeper_;
  const std::chrono::milliseconds stall_after_;
  std::atomic<bool> any_{false};  // `stalls_` is not empty
  mutable std::mutex mutex_;
  std::vector<Stall> stalls_;  // guarded by mutex_, as the members below
  SteadyTime asked_at_;
  std::vector<Stall> warned_;
};

}  // namespace phub
