// A running job: what its ranks save of their own, as parts of a snapshot.
//
// A part is needed of every rank that saves and took part in the snapshot's round to its end. One
// that is lost before it has sent its part makes the snapshot void, unless it took no part in the
// round: then the job goes on from that round without it.
//
// Below a parent, parts go on to it as they come, each under the number of its rank in the
// training; so a checkpoint of the root has the files of one box's. The root does not have the
// ranks of racks in its membership: a rack says which of them save, from which round on and, of
// those that are gone, until which, and up to which round that is known. What the root needs of a
// round it finds in there, however long the round is over. A rack is known to save before the first
// of its ranks that does is admitted, so no snapshot begins without their parts.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/job/running_job.h"

namespace phub {

// The rounds whose parts are sent are multiples of it; 0: none are.
uint64_t RunningJob::save_every() const {
  if (uplink_) return uplink_->admission().save_every;
  return job_->takes_snapshots() ? host_.checkpoints->every() : 0;
}

bool RunningJob::saves(uint32_t rank) const {
  const Seat& seat = seats_[rank];
  return seat.saves && membership_.is_current(rank, seat.incarnation);
}

bool RunningJob::any_saves() const {
  return std::ranges::any_of(saving_ranks_, [this](uint32_t rank) { return saves(rank); });
}

// --- who saves -----------------------------------------------------------------------------------

// Those of the training.
std::vector<SaverStay> RunningJob::savers() const {
  std::vector<SaverStay> all = lost_savers_;
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

// The racks that have not said yet who of them took part in the round.
std::vector<uint32_t> RunningJob::racks_to_say(uint64_t round) const {
  std::vector<uint32_t> racks;
  for (uint32_t rank = 0; rank < seats_.size() && has_racks(); ++rank) {
    const Seat& seat = seats_[rank];
    const bool was_there = seat.first_round > 0 && seat.first_round <= round;
    if (saves(rank) && was_there && seat.rack.known_round < round) racks.push_back(rank);
  }
  return racks;
}

// A rank is gone from every core.
void RunningJob::lose_saver(uint32_t rank) {
  const Seat& seat = seats_[rank];
  if (!seat.saves || seat.first_round == 0 || save_every() == 0) return;
  const uint64_t last = membership_.last_round(rank);
  std::vector<SaverStay> stays;
  if (has_racks()) {
    stays = seat.rack.savers;
    stays.push_back({.rank = ranks_of_training(job_->spec(), rank).first,
                     .first = std::max(seat.first_round, seat.rack.known_round + 1),
                     .unknown = true});
  } else {
    stays.push_back({.rank = rank, .first = seat.first_round});
  }
  for (SaverStay& stay : stays) {
    stay.last = stay.last == 0 ? last : std::min(stay.last, last);
    if (stay.first <= stay.last) lost_savers_.push_back(stay);
  }
  forget_savers();
  continue_snapshot();
}

// Those that no snapshot will ask for.
void RunningJob::forget_savers() {
  const uint64_t durable = uplink_ ? uplink_->pulse().durable_round : durable_round_;
  std::erase_if(lost_savers_, [durable](const SaverStay& stay) { return stay.last <= durable; });
  if (lost_savers_.size() <= kMostSaverStays - kMaxRanks) return;
  SaverStay all = lost_savers_.front();  // for which there is no room
  all.unknown = true;
  for (const SaverStay& stay : lost_savers_) {
    all.first = std::min(all.first, stay.first);
    all.last = std::max(all.last, stay.last);
  }
  lost_savers_ = {all};
}

// --- a rack's ------------------------------------------------------------------------------------

// A boundary that is committed may have changed who takes part: what was said before holds.
void RunningJob::find_news_of_savers() {
  const uint64_t every = save_every();
  if (every == 0 || !news_.saves || membership_.is_committing()) return;
  forget_savers();
  news_.savers = savers();
  news_.known_round = membership_.completed_round() / every * every;
  for (const uint32_t rank : racks_to_say(news_.known_round)) {
    const Seat& seat = seats_[rank];
    const uint64_t known = std::max(seat.rack.known_round, seat.first_round - 1);
    news_.known_round = std::min(news_.known_round, known);
  }
}

// Before the first rank that saves is admitted, the parent must know that there is one.
bool RunningJob::must_tell_of_savers() {
  if (!uplink_ || save_every() == 0) return false;
  news_.saves = true;
  return !uplink_->has_told_of_savers();
}

void RunningJob::admit_savers() {
  if (savers_to_join_.empty() || !uplink_->has_told_of_savers()) return;
  for (const SaverToJoin& saver : std::exchange(savers_to_join_, {})) {
    membership_.join(saver.token, saver.rank, saver.replace, host_.time.now_ms());
  }
}

// --- a rack's parent -----------------------------------------------------------------------------

void RunningJob::check_news(uint32_t rank, const RackNews& news) const {
  const RankRange ranks = ranks_of_training(job_->spec(), rank);
  const auto check = [&](uint32_t of_news) {
    if (ranks.contains(of_news)) return;
    fail(ErrorCode::kInvalid, "rack {} of job '{}' has the ranks {} to {}, and rank {} is not its",
         rank, job_->spec().name, ranks.first, ranks.end - 1, of_news);
  };
  for (const SaverStay& stay : news.savers) check(stay.rank);
  for (size_t i = 0; i < news.live.size(); ++i) {
    check(news.live[i]);
    if (i == 0 || news.live[i - 1] < news.live[i]) continue;
    fail(ErrorCode::kInvalid,
         "the news of rack {} of job '{}': its live ranks must ascend, and rank {} comes after {}",
         rank, job_->spec().name, news.live[i], news.live[i - 1]);
  }
}

// News may come out of their order: the ones that are known to be older say nothing new.
void RunningJob::take_news_of_savers(uint32_t rank, RackNews& news) {
  Seat& seat = seats_[rank];
  if (news.saves && !seat.saves && must_tell_of_savers()) {
    fail(ErrorCode::kUnavailable,
         "the parent of this box does not know yet that ranks of job '{}' save: try again",
         job_->spec().name);
  }
  if (news.saves && !std::exchange(seat.saves, true)) saving_ranks_.insert(rank);
  if (news.known_round >= seat.rack.known_round) return;
  news.known_round = seat.rack.known_round;
  news.savers = seat.rack.savers;
}

// --- pieces --------------------------------------------------------------------------------------

void RunningJob::check_part(const Credential& who, const PartPiece& place, uint64_t bytes) const {
  const JobSpec& spec = job_->spec();
  if (!saves(who.rank)) {
    fail(ErrorCode::kInvalid,
         "rank {} of job '{}' did not say at its join that it saves its own state", who.rank,
         who.job);
  }
  if (!ranks_of_training(spec, who.rank).contains(place.whose)) {
    fail(ErrorCode::kInvalid, "rank {} of job '{}' sends a part of rank {}, which is another",
         who.rank, who.job, place.whose);
  }
  if (const uint64_t most = most_part_bytes(spec); place.all == 0 || place.all > most) {
    fail(ErrorCode::kInvalid, "a rank's part of a checkpoint has 1 to {} bytes, not {}", most,
         place.all);
  }
  const bool lies_within = place.offset <= place.all && bytes <= place.all - place.offset;
  if (bytes == 0 || bytes > kPartPieceBytes || !lies_within) {
    fail(ErrorCode::kInvalid, "a piece of 1 to {} bytes is wanted, not {} from byte {} of {} on",
         kPartPieceBytes, bytes, place.offset, place.all);
  }
  if (seats_[who.rank].first_round > place.round) {
    fail(ErrorCode::kNotFound, "rank {} of job '{}' was not in round {}: its first is {}", who.rank,
         who.job, place.round, seats_[who.rank].first_round);
  }
  if (!uplink_) return parts_.check(place);
  if (save_every() == 0) {
    fail(ErrorCode::kNotFound, "job '{}' is not saved by the server above", who.job);
  }
}

void RunningJob::take_part(const Credential& who, const PartPiece& place, std::string piece,
                           std::shared_ptr<void> charge, Reply<Done> reply) {
  const uint64_t bytes = piece.size();
  check_part(who, place, bytes);
  if (uplink_) {
    return uplink_->send_part(place, std::move(piece),
                              [charge = std::move(charge), reply = std::move(reply)](
                                  const Result<Done>& result) { reply(result); });
  }
  struct Upload {
    std::string bytes;
    std::shared_ptr<void> charge;
  };
  const auto upload = std::make_shared<Upload>(Upload{std::move(piece), std::move(charge)});
  const CheckpointId id{.epoch = life_.epoch, .round = place.round};
  const bool is_last = place.offset + bytes == place.all;
  parts_.coming(place, bytes);
  run_beside(
      host_.writer,
      [this, id, whose = place.whose, is_last, upload] {
        host_.checkpoints->add_part(job_->spec().name, id, whose, upload->bytes, is_last);
        upload->bytes = {};
      },
      [this, round = place.round, whose = place.whose, bytes, upload,
       reply](const std::optional<Error>& failed) {
        upload->charge.reset();
        if (failed) {
          reply({failed->code(), failed->what()});
        } else {
          reply(Done{});
        }
        if (ending_ || parts_.round() != round) return;
        if (failed) {
          parts_.make_void(fmt::format("the part of rank {}: {}", whose, failed->what()));
        } else {
          parts_.written(whose, bytes);
        }
        continue_snapshot();
      });
}

// What has come is worth nothing: there will be no checkpoint of its round.
void RunningJob::drop_parts() {
  if (!parts_.any()) return parts_.end();
  parts_.end();
  run_beside(
      host_.writer, [this] { host_.checkpoints->drop_parts(job_->spec().name); },
      [](const std::optional<Error>&) {});
}

// --- what it goes on from ------------------------------------------------------------------------

// With the round behind its checkpoint, that is; later ones begin with nothing.
std::vector<RankPart> RunningJob::parts_for(uint32_t rank) const {
  std::vector<RankPart> parts;
  if (seats_[rank].first_round != life_.from.round + 1) return parts;
  const RankRange ranks = ranks_of_training(job_->spec(), rank);
  const auto end = life_.part_bytes.lower_bound(ranks.end);
  for (auto at = life_.part_bytes.lower_bound(ranks.first); at != end; ++at) {
    parts.push_back({at->first, at->second});
  }
  return parts;
}

void RunningJob::restored_part(uint32_t rank, uint32_t whose, uint64_t offset,
                               Reply<PartBytes> reply) {
  const std::vector<RankPart> parts = parts_for(rank);
  const auto part = std::ranges::find(parts, whose, &RankPart::rank);
  if (part == parts.end()) {
    fail(ErrorCode::kNotFound, "rank {} of job '{}' goes on from no part of rank {}", rank,
         job_->spec().name, whose);
  }
  const uint64_t bytes = part->bytes;
  if (offset >= bytes) {
    fail(ErrorCode::kInvalid, "the part of rank {} of job '{}' has {} bytes, and none from {} on",
         whose, job_->spec().name, bytes, offset);
  }
  if (uplink_) return uplink_->restored_part(whose, offset, std::move(reply));
  const auto piece = std::make_shared<PartBytes>();
  run_beside(
      host_.builder,
      [this, whose, offset, bytes, piece] {
        piece->bytes.resize(std::min(kPartPieceBytes, bytes - offset));
        host_.checkpoints->read_part(job_->spec().name, life_.from, whose, bytes, offset,
                                     piece->bytes);
      },
      [piece, reply](const std::optional<Error>& failed) {
        if (failed) return reply({failed->code(), failed->what()});
        reply(std::move(*piece));
      });
}

}  // namespace phub
