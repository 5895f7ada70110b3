// A rack's membership in the job of its parent: it joins, keeps its lease, and learns of its end.
// A state machine apart from threads and sockets, which the parent's client has (parent.h).
// Control thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phub/clock.h"
#include "phub/job/parent.h"
#include "transport/control/messages.h"
#include "transport/error.h"

namespace phub {

// Whether a call that failed with this code may succeed later, or has succeeded and lost its
// answer.
constexpr bool may_pass(ErrorCode code) {
  return code == ErrorCode::kUnavailable || code == ErrorCode::kTimeout;
}

class Uplink : public std::enable_shared_from_this<Uplink> {
 public:
  // The parent and the time outlive this. `request` goes to the parent as it is.
  Uplink(Parent& parent, const ServedTime& time, JoinRequest request);
  ~Uplink();
  Uplink(const Uplink&) = delete;
  Uplink& operator=(const Uplink&) = delete;

  // Asks again while the rank is taken by an earlier incarnation of this rack that the parent still
  // has. `done` is called once.
  void join(Reply<Done> done);
  void tick();

  // REQUIRES: it has joined.
  const JoinReply& admission() const { return admission_; }
  std::unique_ptr<WorkerLink> connect(const LinkLayout& layout) const {  // any thread
    return parent_.connect(admission_.offer, layout);
  }
  std::string parent() const { return parent_.name(); }
  const Pulse& pulse() const { return pulse_; }  // the latest

  // The parent's job has ended, or goes on without this rack: called once, with the reason.
  void on_end(std::function<void(const Error& why)> call) { on_end_ = std::move(call); }
  const std::optional<Error>& ended() const { return end_; }
  bool has_ended() const { return ended_; }  // or was given up, or left

  // Sends a heartbeat at once, then calls `done`, unless the answer ended this.
  void check(std::function<void()> done);
  // Answered when the ranks of all racks are there. All calls before the answer are one at the
  // parent.
  void barrier(Reply<Done> reply);
  // Makes a call of a rank to the parent: call(parent, who, answer). Replies with the answer, or
  // refuses when this ends or has left.
  template <typename T, typename Call>
  void ask(Reply<T> reply, const Call& call) {
    if (ended_) return reply({ErrorCode::kUnavailable, kHasEnded});
    call(parent_, who(), or_refused(std::move(reply)));
  }
  void reconnect(Reply<Offer> reply);
  // All ranks have left; `last` is about those that save. After this no call goes to the parent.
  void leave(const RackNews& last = {});
  // The rack cannot go on: the parent loses it.
  void abandon(const std::string& why);
  // The server ends, as if its process had died.
  void drop();

  // Tells the parent news of this rack: the latest, once the parent has answered those before.
  void tell(RackNews news);
  // The news that the parent may have: the latest that it has answered, and all that were sent
  // after them.
  std::vector<RackNews> told() const;
  // The parent knows that ranks save their state here, and counts on it.
  bool has_told_of_savers() const { return request_.saves || news_.saves; }

 private:
  static constexpr const char* kHasEnded = "the job has ended at the box above";

  Credential who() const;
  void try_to_join();
  void beat();
  bool answered(const Result<Pulse>& result);
  void end(ErrorCode code, const std::string& why);
  void refuse_waiting(ErrorCode code, const std::string& why);
  // A reply that does nothing when this is gone, or has ended.
  template <typename T>
  Reply<T> guarded(std::function<void(Result<T>)> reply);
  // A reply that is refused when this ends, or has left.
  template <typename T>
  Reply<T> or_refused(Reply<T> reply);

  Parent& parent_;
  // Measures time only while this box runs, so a pause does not count against an answer.
  const ServedTime& time_;
  JoinRequest request_;
  const uint32_t lease_ms_;
  Reply<Done> joined_;                           // null: it has joined, or was refused
  uint64_t join_at_ms_ = 0, join_until_ms_ = 0;  // 0: a join is under way
  JoinReply admission_;
  bool in_ = false, ended_ = false;
  std::optional<Error> end_;  // the reason, if the parent ended it
  bool beating_ = false;
  uint64_t beat_at_ms_ = 0, answered_ms_ = 0;
  std::vector<std::function<void()>> checks_;  // called after the next answer
  Pulse pulse_;
  RackNews news_;  // the latest that the parent was told
  bool is_telling_ = false;
  uint64_t told_ = 0;                 // the number of the latest news
  std::vector<RackNews> unanswered_;  // sent after news_
  std::vector<Reply<Done>> barrier_;
  using Refuse = std::function<void(ErrorCode code, const std::string& why)>;
  uint64_t next_call_ = 0;
  std::map<uint64_t, Refuse> calls_;  // calls that the parent has not answered
  std::function<void(const Error& why)> on_end_;
};

template <typename T>
Reply<T> Uplink::guarded(std::function<void(Result<T>)> reply) {
  return [weak = weak_from_this(), reply = std::move(reply)](Result<T> result) {
    const std::shared_ptr<Uplink> alive = weak.lock();
    if (alive && !alive->ended_) reply(std::move(result));
  };
}

template <typename T>
Reply<T> Uplink::or_refused(Reply<T> reply) {
  const uint64_t number = next_call_++;
  calls_[number] = [reply](ErrorCode code, const std::string& why) { reply({code, why}); };
  return guarded<T>([this, number, reply = std::move(reply)](Result<T> result) {
    calls_.erase(number);
    reply(std::move(result));
  });
}

}  // namespace phub
