// The rounds that the keys of a rank are in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "transport/control/messages.h"
#include "transport/verdict.h"
#include "worker/progress/sleeper.h"
#include "worker/session/session.h"

namespace phub {

// Reads them in a worker's session, under the sleeper's lock, for calls that ask or tell the server
// something about rounds. A KeyExchange owns it. Thread-safe.
class KeyRounds {
 public:
  // REQUIRES: the arguments outlive this.
  KeyRounds(const JoinReply& reply, const Session& session, Sleeper& sleeper)
      : reply_(reply), session_(session), sleeper_(sleeper) {}

  uint64_t of(size_t key) const;  // the latest round whose result is here
  // The latest round of which the results of all keys are here.
  uint64_t complete() const;
  // `round`, or if that is 0 the first round in which this rank has pushed no key.
  uint64_t this_or_next(uint64_t round) const;
  // A key whose result of `round` is not here, if there is one.
  std::optional<size_t> key_before(uint64_t round) const;
  // Throws Error(kInvalid) if some keys are pushed in a round, and others are not. Others go on to
  // complete that round, for which this rank's keys may be missing: it would wait for itself.
  void check_between() const;
  // In a job with gated rounds, the verdict on the latest round of which a result is here.
  std::optional<RoundVerdict> verdict() const;
  // A key that no rank pushes holds nobody up, and stays as it began: says so on stderr, once.
  void say_never_pushed() noexcept;

 private:
  size_t keys() const { return reply_.spec.keys.size(); }

  const JoinReply& reply_;
  const Session& session_;
  Sleeper& sleeper_;
  std::atomic<bool> said_never_pushed_ = false;
};

}  // namespace phub
