#include "phub/job/hyper_desk.h"

#include <algorithm>
#include <utility>

namespace phub {

HyperDesk::HyperDesk(const JobContext& context, const SaveDesk& saves)
    : job_(context.job),
      membership_(context.membership),
      seats_(context.seats),
      uplink_(context.uplink),
      has_standby_(context.standby != nullptr),
      requests_(context.requests),
      driver_(context.driver),
      saves_(saves) {}

void HyperDesk::set(uint32_t rank, const HyperChange& change, Reply<HyperReply> reply) {
  check(change.values);
  if (uplink_) {
    return uplink_->ask(std::move(reply), [&](Parent& parent, const Credential& who, auto answer) {
      parent.set_hyper(who, {.round = change.round, .values = change.values}, std::move(answer));
    });
  }
  if (has_standby_) {
    fail(ErrorCode::kInvalid,
         "job '{}' has a standby, which makes the same steps: give it a schedule; values cannot be "
         "set while it runs",
         job_.spec().name);
  }
  if (change.values.empty()) fail(ErrorCode::kInvalid, "there are no values to set");
  check_room();
  const uint64_t token =
      requests_.expect(std::move(reply), [](uint64_t from) { return HyperReply{from}; });
  membership_.changes().decide(token, rank, change);
  driver_.carry_out();
}

void HyperDesk::check(const std::map<std::string, double>& values, bool of_fork) const {
  check_hyper(values, hyper_groups(job_.spec()));
  check_for_job(values, job_.spec(), of_fork);
  // A fork of a job without an optimizer tells it the ranks.
  const std::string fixed = fixed_value_in(values);
  if (!fixed.empty() && job_.spec().optimizer != "none") {
    fail(ErrorCode::kInvalid, "{} cannot change: it decides how much state there is", fixed);
  }
  if (uplink_) return;  // the parent checks that for its own job
  if (values.contains("max_norm") && !job_.rules().gated) {
    fail(ErrorCode::kInvalid,
         "max_norm can be set in a job that began with one (0: none, at first): job '{}' did not",
         job_.spec().name);
  }
}

void HyperDesk::check_room() const {
  if (job_.hyper().full(lowest_needed())) {
    fail(ErrorCode::kFull,
         "{} changes of hyperparameters are still needed: some key is in round {}, or changes were "
         "made far ahead; push every key in every round",
         HyperTable::kMostChanges, membership_.rounds().completed() + 1);
  }
}

uint64_t HyperDesk::lowest_needed() const {
  const uint64_t round = membership_.rounds().completed() + 1;
  const bool may_lag =
      std::ranges::any_of(seats_, [](const Seat& s) { return !s.interest.empty(); });
  const uint64_t lowest = may_lag ? std::min(round, membership_.rounds().lowest()) : round;
  // The manifest of the snapshot that is copied has the changes from there on.
  const uint64_t copying = saves_.copying_round();
  return copying > 0 ? std::min(lowest, copying + 1) : lowest;
}

}  // namespace phub
