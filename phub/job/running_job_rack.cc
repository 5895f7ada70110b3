// A running job of a rack: what it passes on to the parent's job, and what comes from there.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "phub/job/running_job.h"

namespace phub {

void RunningJob::follow_parent() {
  const auto end = [this](const Error& why) {
    if (ending_) return;
    const std::string found = std::exchange(nonfinite_, "");
    const bool explains = why.code() == ErrorCode::kNonFinite && !found.empty();
    membership_.parent_ended(why.code(),
                             explains ? fmt::format("{} ({})", found, why.what()) : why.what());
    carry_out();
  };
  uplink_->on_end(end);
  if (const std::optional<Error>& already = uplink_->ended()) end(*already);
}

void RunningJob::end_at_parent() {
  if (!uplink_) return;
  if (error_.empty()) {
    savers_.add_to_news(news_);
    uplink_->leave(news_);
  } else {
    uplink_->abandon(error_);
  }
}

// The parent's job may have ended: then the answer says why. Else the connection is made again:
// the cores stop using it, there is a new offer, and they go on.
void RunningJob::parent_broke() {
  if (parent_link_ != ParentLink::kFine) return;
  parent_link_ = ParentLink::kStopping;
  uplink_->check([this] {
    if (ending_) return;
    parent_answers_ = 0;
    local_.detach(CoreReport::kNoRank);
  });
}

void RunningJob::parent_changed(CoreReport::Type type) {
  if (++parent_answers_ < job_->cores()) return;
  if (type == CoreReport::kAttached) {
    parent_link_ = ParentLink::kFine;
  } else {
    connect_parent_again();
  }
}

void RunningJob::connect_parent_again() {
  parent_link_ = ParentLink::kResuming;
  uplink_->reconnect([this](const Result<Offer>& offer) {
    if (ending_) return;
    if (!offer) {  // the next tick asks again, until the parent says that it is over
      parent_link_ = ParentLink::kMissing;
      return;
    }
    run_beside(
        host_.builder, [this, offer = *offer.value] { job_->reconnect(offer); },
        [this](const std::optional<Error>& failed) {
          if (ending_) return;
          if (failed) {
            parent_link_ = ParentLink::kMissing;
            return;
          }
          host_.notes.add(host_.clock.now_ms(),
                          fmt::format("job '{}': the connection to the parent at {} broke, and is "
                                      "there again",
                                      job_->spec().name, uplink_->parent()));
          parent_answers_ = 0;
          local_.attach(CoreReport::kNoRank, 0);
        });
  });
}

// And what else is to be done at the parent from time to time.
void RunningJob::tell_parent() {
  if (parent_link_ == ParentLink::kMissing) connect_parent_again();
  passed_state_->tick();
  admit_savers();
  news_.live.clear();
  for (const RankStatus& rank : membership_.ranks()) {
    if (rank.state != "live") continue;
    if (has_racks()) {
      std::ranges::copy(seats_[rank.rank].rack.live, std::back_inserter(news_.live));
    } else {
      news_.live.push_back(rank.rank);
    }
  }
  savers_.add_to_news(news_);
  uplink_->tell(news_);
}

void RunningJob::admit_savers() {
  if (savers_to_join_.empty() || !uplink_->has_told_of_savers()) return;
  for (const SaverToJoin& saver : std::exchange(savers_to_join_, {})) {
    membership_.join(saver.token, saver.rank, saver.replace, host_.time.now_ms());
  }
}

void RunningJob::take_news(uint32_t rank, RackNews news) {
  const bool is_rack = !job_->spec().rack_ranks.empty();
  if (!is_rack && news.failure.empty()) {
    fail(ErrorCode::kInvalid, "the ranks of job '{}' are not racks", job_->spec().name);
  }
  if (is_rack) savers_.check_news(rank, news);
  Seat& seat = seats_[rank];
  const std::string failure = std::exchange(news.failure, "");
  if (failure.empty()) {
    savers_.take_news(rank, news);
    seat.rack = std::move(news);
    return saves_.check_parts();
  }
  seat.rack.live.clear();
  lose(rank, seat.incarnation,
       is_rack ? fmt::format("rack '{}': {}", news.name, failure) : failure);
  carry_out();
}

Reply<Done> RunningJob::after_parents_barrier(Reply<Done> reply) {
  if (!uplink_) return reply;
  return [this, reply = std::move(reply)](const Result<Done>& here) {
    here ? uplink_->barrier(reply) : reply(here);
  };
}

}  // namespace phub
