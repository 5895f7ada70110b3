#include "phub/job/standby_desk.h"

#include <fmt/format.h>

#include <algorithm>

#include "phub/job/standby.h"

namespace phub {

StandbyDesk::StandbyDesk(const JobContext& context)
    : host_(context.host),
      job_(context.job),
      membership_(context.membership),
      local_(context.local),
      uplink_(*context.standby),
      driver_(context.driver),
      seats_(context.seats) {}

void StandbyDesk::begin() {
  const auto lose_it = [this](const Error& why) { lose(why.what()); };
  uplink_.on_end(lose_it);
  if (const std::optional<Error>& already = uplink_.ended()) lose_it(*already);
}

void StandbyDesk::tick() {
  if (stage_ == Stage::kLost) return check();
  if (stage_ == Stage::kAlone) return;
  RackNews members;
  for (const RankStatus& rank : membership_.statuses()) {
    if (rank.state != "live") continue;
    members.live.push_back(rank.rank);
    members.incarnations.push_back(seats_[rank.rank].incarnation);
  }
  uplink_.tell(members);
}

void StandbyDesk::end(const std::string& error) {
  if (error.empty()) {
    uplink_.leave();
  } else {
    uplink_.abandon(error);
  }
}

void StandbyDesk::link_broke() { lose("its connection broke"); }

void StandbyDesk::lose(const std::string& why) {
  if (stage_ != Stage::kThere || driver_.has_ended()) return;
  stage_ = Stage::kLost;
  why_ = why;
  may_know_ = uplink_.told();
  uplink_.abandon("it was given up: " + why);
  host_.notes.add(host_.clock.now_ms(),
                  fmt::format("job '{}': the standby at {} is lost: {}; the job goes on when more "
                              "than half of its ranks have said that they will not join it",
                              job_.spec().name, uplink_.parent(), why));
  check();
  driver_.carry_out();
}

void StandbyDesk::forgone(uint32_t rank, uint32_t incarnation) {
  forgone_.emplace(rank, incarnation);
  if (stage_ == Stage::kLost) check();
}

void StandbyDesk::check() {
  // Who has left will never join the standby.
  const auto has_forgone = [this](uint32_t rank, uint32_t incarnation) {
    const RankRecord& record = membership_.ranks()[rank];
    const bool has_left =
        record.stage == RankRecord::Stage::kLeft && record.incarnation == incarnation;
    return has_left || forgone_.contains({rank, incarnation});
  };
  const auto may_forgo = [&](uint32_t rank, uint32_t incarnation) {
    return has_forgone(rank, incarnation) || membership_.ranks().is_current(rank, incarnation);
  };
  const auto all = [this](const auto& counts) {
    return std::ranges::all_of(may_know_, [&counts](const RackNews& members) {
      return members.live.empty() || is_majority(members, counts);
    });
  };
  if (all(has_forgone)) {
    stage_ = Stage::kAlone;
    host_.notes.add(host_.clock.now_ms(),
                    fmt::format("job '{}' goes on without a standby", job_.spec().name));
    return local_.attach(CoreReport::kNoRank, 0);
  }
  if (all(may_forgo)) return;
  membership_.fail(
      ErrorCode::kRewound,
      fmt::format("the standby at {} was lost ({}), and so was half or more of the ranks "
                  "that it knows: the job may have gone on there; join again",
                  uplink_.parent(), why_));
}

std::string StandbyDesk::status() const {
  switch (stage_) {
    case Stage::kThere:
      return uplink_.parent();
    case Stage::kLost:
      return fmt::format("{} is lost, and ranks are still to forgo it: {}", uplink_.parent(), why_);
    case Stage::kAlone:
      break;
  }
  return fmt::format("{} was lost: {}", uplink_.parent(), why_);
}

}  // namespace phub
