#include "phub/job/savers.h"

#include <algorithm>
#include <utility>

namespace phub {

Savers::Savers(const JobContext& context)
    : host_(context.host),
      job_(context.job),
      membership_(context.membership),
      seats_(context.seats),
      uplink_(context.uplink) {}

uint64_t Savers::every() const {
  if (uplink_) return uplink_->admission().save_every;
  return job_.takes_snapshots() ? host_.checkpoints->every() : 0;
}

bool Savers::saves(uint32_t rank) const {
  const Seat& seat = seats_[rank];
  return seat.saves && membership_.ranks().is_current(rank, seat.incarnation);
}

bool Savers::any() const {
  return std::ranges::any_of(seats_.saving(), [this](uint32_t rank) { return saves(rank); });
}

std::vector<SaverStay> Savers::stays() const {
  std::vector<SaverStay> all = lost_;
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    if (!saves(rank) || seat.first_round == 0) continue;
    if (has_racks()) {
      all.insert(all.end(), seat.rack.savers.begin(), seat.rack.savers.end());
    } else {
      all.push_back({.rank = rank, .first = seat.first_round});
    }
  }
  return all;
}

bool Savers::any_lost_in(uint64_t round) const {
  return std::ranges::any_of(lost_, [round](const SaverStay& stay) { return stay.covers(round); });
}

std::vector<uint32_t> Savers::racks_to_say(uint64_t round) const {
  std::vector<uint32_t> racks;
  for (uint32_t rank = 0; rank < seats_.size() && has_racks(); ++rank) {
    const Seat& seat = seats_[rank];
    const bool was_there = seat.first_round > 0 && seat.first_round <= round;
    if (saves(rank) && was_there && seat.rack.known_round < round) racks.push_back(rank);
  }
  return racks;
}

bool Savers::lose(uint32_t rank, uint64_t durable) {
  const Seat& seat = seats_[rank];
  if (!seat.saves || seat.first_round == 0 || every() == 0) return false;
  const uint64_t last = membership_.ranks()[rank].last_round;
  std::vector<SaverStay> stays;
  if (has_racks()) {
    stays = seat.rack.savers;
    stays.push_back({.rank = ranks_of_training(job_.spec(), rank).first,
                     .first = std::max(seat.first_round, seat.rack.known_round + 1),
                     .unknown = true});
  } else {
    stays.push_back({.rank = rank, .first = seat.first_round});
  }
  for (SaverStay& stay : stays) {
    stay.last = stay.last == 0 ? last : std::min(stay.last, last);
    if (stay.first <= stay.last) lost_.push_back(stay);
  }
  forget(durable);
  return true;
}

void Savers::forget(uint64_t durable) {
  std::erase_if(lost_, [durable](const SaverStay& stay) { return stay.last <= durable; });
  if (lost_.size() <= kMostSaverStays - kMaxRanks) return;
  SaverStay all = lost_.front();  // there is no room for each by itself
  all.unknown = true;
  for (const SaverStay& stay : lost_) {
    all.first = std::min(all.first, stay.first);
    all.last = std::max(all.last, stay.last);
  }
  lost_ = {all};
}

void Savers::check_news(uint32_t rank, const RackNews& news) const {
  const RankRange ranks = ranks_of_training(job_.spec(), rank);
  const auto check = [&](uint32_t of_news) {
    if (ranks.contains(of_news)) return;
    fail(ErrorCode::kInvalid, "rack {} of job '{}' has the ranks {} to {}, and rank {} is not its",
         rank, job_.spec().name, ranks.first, ranks.end - 1, of_news);
  };
  for (const SaverStay& stay : news.savers) check(stay.rank);
  for (size_t i = 0; i < news.live.size(); ++i) {
    check(news.live[i]);
    if (i == 0 || news.live[i - 1] < news.live[i]) continue;
    fail(ErrorCode::kInvalid,
         "the news of rack {} of job '{}': its live ranks must ascend, and rank {} comes after {}",
         rank, job_.spec().name, news.live[i], news.live[i - 1]);
  }
}

// News may come out of order: older ones say nothing new.
void Savers::take_news(uint32_t rank, RackNews& news) {
  Seat& seat = seats_[rank];
  if (news.saves && !seat.saves && must_tell_parent()) {
    fail(ErrorCode::kUnavailable,
         "the parent of this box does not know yet that ranks of job '{}' save: try again",
         job_.spec().name);
  }
  if (news.saves) seats_.take_saves(rank);
  if (news.known_round >= seat.rack.known_round) return;
  news.known_round = seat.rack.known_round;
  news.savers = seat.rack.savers;
}

bool Savers::must_tell_parent() {
  if (!uplink_ || every() == 0) return false;
  tells_parent_ = true;
  return !uplink_->has_told_of_savers();
}

// While a boundary is committed, the ranks that take part may change: the last news still hold.
void Savers::add_to_news(RackNews& news) {
  news.saves = tells_parent_;
  const uint64_t every = this->every();
  if (every == 0 || !news.saves || membership_.changes().is_committing()) return;
  forget(uplink_->pulse().durable_round);
  news.savers = stays();
  news.known_round = membership_.rounds().completed() / every * every;
  for (const uint32_t rank : racks_to_say(news.known_round)) {
    const Seat& seat = seats_[rank];
    const uint64_t known = std::max(seat.rack.known_round, seat.first_round - 1);
    news.known_round = std::min(news.known_round, known);
  }
}

}  // namespace phub
