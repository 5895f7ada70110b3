#include "phub/job/rack_desk.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace phub {

RackDesk::RackDesk(const JobContext& context, Savers& savers)
    : host_(context.host),
      job_(context.job),
      membership_(context.membership),
      seats_(context.seats),
      local_(context.local),
      uplink_(*context.uplink),
      driver_(context.driver),
      savers_(savers),
      states_(job_.spec().name, uplink_) {}

void RackDesk::begin() {
  const auto end = [this](const Error& why) {
    if (driver_.has_ended()) return;
    const std::string found = std::exchange(nonfinite_, "");
    const bool explains = why.code() == ErrorCode::kNonFinite && !found.empty();
    membership_.fail(why.code(), explains ? fmt::format("{} ({})", found, why.what()) : why.what());
    driver_.carry_out();
  };
  uplink_.on_end(end);
  if (const std::optional<Error>& already = uplink_.ended()) end(*already);
}

void RackDesk::tick() {
  if (link_ == Link::kMissing) reconnect();
  states_.tick();
  admit_delayed();
  news_.live.clear();
  for (const RankStatus& rank : membership_.statuses()) {
    if (rank.state != "live") continue;
    if (!job_.spec().rack_ranks.empty()) {
      std::ranges::copy(seats_[rank.rank].rack.live, std::back_inserter(news_.live));
    } else {
      news_.live.push_back(rank.rank);
    }
  }
  savers_.add_to_news(news_);
  uplink_.tell(news_);
}

void RackDesk::delay_join(uint64_t token, int32_t rank, bool replace) {
  delayed_.push_back({token, rank, replace});
  tick();
}

void RackDesk::admit_delayed() {
  if (delayed_.empty() || !uplink_.has_told_of_savers()) return;
  for (const Delayed& join : std::exchange(delayed_, {})) {
    membership_.join(join.token, join.rank, join.replace, host_.time.now_ms());
  }
}

void RackDesk::end(const std::string& error) {
  if (error.empty()) {
    savers_.add_to_news(news_);
    uplink_.leave(news_);
  } else {
    uplink_.abandon(error);
  }
}

Reply<Done> RackDesk::above(Reply<Done> reply) {
  return [this, reply = std::move(reply)](const Result<Done>& here) {
    here ? uplink_.barrier(reply) : reply(here);
  };
}

// --- the connection ------------------------------------------------------------------------------

// The parent's job may have ended: then its answer says why. Otherwise the cores stop using the
// connection, there is a new offer, and they go on.
void RackDesk::link_broke() {
  broke_again_ |= link_ == Link::kResuming;
  if (link_ != Link::kFine) return;
  link_ = Link::kStopping;
  uplink_.check([this] {
    if (driver_.has_ended()) return;
    answers_ = 0;
    local_.detach(CoreReport::kNoRank);
  });
}

void RackDesk::core_answered(CoreReport::Type type) {
  if (++answers_ < job_.cores()) return;
  if (type == CoreReport::kAttached) {
    link_ = Link::kFine;
    if (std::exchange(broke_again_, false)) link_broke();
  } else {
    reconnect();
  }
}

void RackDesk::reconnect() {
  link_ = Link::kResuming;
  uplink_.reconnect([this](const Result<Offer>& offer) {
    if (driver_.has_ended()) return;
    if (!offer) {  // the next tick asks again, until the parent says that it is over
      link_ = Link::kMissing;
      return;
    }
    driver_.run_beside(
        host_.builder, [this, offer = *offer.value] { job_.reconnect(offer); },
        [this](const std::optional<Error>& failed) {
          if (driver_.has_ended()) return;
          if (failed) {
            link_ = Link::kMissing;
            return;
          }
          host_.notes.add(host_.clock.now_ms(),
                          fmt::format("job '{}': the connection to the parent at {} broke, and is "
                                      "there again",
                                      job_.spec().name, uplink_.parent()));
          answers_ = 0;
          broke_again_ = false;
          local_.attach(CoreReport::kNoRank, 0);
        });
  });
}

}  // namespace phub
