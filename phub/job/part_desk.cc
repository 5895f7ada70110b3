#include "phub/job/part_desk.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace phub {

PartDesk::PartDesk(const JobContext& context, const Savers& savers, std::function<void()> changed)
    : host_(context.host),
      job_(context.job),
      seats_(context.seats),
      life_(context.life),
      uplink_(context.uplink),
      driver_(context.driver),
      savers_(savers),
      changed_(std::move(changed)) {}

void PartDesk::check(const Credential& who, const PartPiece& place, uint64_t bytes) const {
  const JobSpec& spec = job_.spec();
  if (!savers_.saves(who.rank)) {
    fail(ErrorCode::kInvalid,
         "rank {} of job '{}' did not say at its join that it saves its own state", who.rank,
         who.job);
  }
  if (!ranks_of_training(spec, who.rank).contains(place.whose)) {
    fail(ErrorCode::kInvalid, "rank {} may not upload the saved state of rank {}", who.rank,
         place.whose);
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
  if (savers_.every() == 0) {
    fail(ErrorCode::kNotFound, "job '{}' is not saved by the server above", who.job);
  }
}

void PartDesk::take(const Credential& who, const PartPiece& place, std::string piece,
                    std::shared_ptr<void> charge, Reply<Done> reply) {
  const uint64_t bytes = piece.size();
  check(who, place, bytes);
  if (uplink_) {
    const Reply<Done> keeps_charge = [charge = std::move(charge), reply = std::move(reply)](
                                         const Result<Done>& result) { reply(result); };
    return uplink_->ask(keeps_charge, [&](Parent& parent, const Credential& rack, auto answer) {
      parent.send_part(rack, place, std::move(piece), std::move(answer));
    });
  }
  struct Upload {
    std::string bytes;
    std::shared_ptr<void> charge;
  };
  const auto upload = std::make_shared<Upload>(Upload{std::move(piece), std::move(charge)});
  const CheckpointId id{.epoch = life_.epoch, .round = place.round};
  const bool is_last = place.offset + bytes == place.all;
  parts_.coming(place, bytes);
  driver_.run_beside(
      host_.writer,
      [this, id, whose = place.whose, is_last, upload] {
        host_.checkpoints->add_part(job_.spec().name, id, whose, upload->bytes, is_last);
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
        if (driver_.has_ended() || parts_.round() != round) return;
        if (failed) {
          parts_.make_void(fmt::format("the part of rank {}: {}", whose, failed->what()));
        } else {
          parts_.written(whose, bytes);
        }
        changed_();
      });
}

void PartDesk::drop() {
  if (!parts_.any()) return parts_.end();
  parts_.end();
  driver_.run_beside(
      host_.writer, [this] { host_.checkpoints->drop_parts(job_.spec().name); },
      [](const std::optional<Error>&) {});
}

// A rank whose first round is a later one begins with nothing.
std::vector<RankPart> PartDesk::parts_for(uint32_t rank) const {
  std::vector<RankPart> parts;
  if (seats_[rank].first_round != life_.from.round + 1) return parts;
  const RankRange ranks = ranks_of_training(job_.spec(), rank);
  const auto end = life_.part_bytes.lower_bound(ranks.end);
  for (auto at = life_.part_bytes.lower_bound(ranks.first); at != end; ++at) {
    parts.push_back({at->first, at->second});
  }
  return parts;
}

void PartDesk::read(uint32_t rank, uint32_t whose, uint64_t offset, Reply<PartBytes> reply) {
  const std::vector<RankPart> parts = parts_for(rank);
  const auto part = std::ranges::find(parts, whose, &RankPart::rank);
  if (part == parts.end()) {
    fail(ErrorCode::kNotFound, "rank {} of job '{}' goes on from no part of rank {}", rank,
         job_.spec().name, whose);
  }
  const uint64_t bytes = part->bytes;
  if (offset >= bytes) {
    fail(ErrorCode::kInvalid, "the part of rank {} of job '{}' has {} bytes, and none from {} on",
         whose, job_.spec().name, bytes, offset);
  }
  if (uplink_) {
    return uplink_->ask(std::move(reply), [&](Parent& parent, const Credential& who, auto answer) {
      parent.restored_part(who, whose, offset, std::move(answer));
    });
  }
  const auto piece = std::make_shared<PartBytes>();
  driver_.run_beside(
      host_.builder,
      [this, whose, offset, bytes, piece] {
        piece->bytes.resize(std::min(kPartPieceBytes, bytes - offset));
        host_.checkpoints->read_part(job_.spec().name, life_.from, whose, bytes, offset,
                                     piece->bytes);
      },
      [piece, reply](const std::optional<Error>& failed) {
        if (failed) return reply({failed->code(), failed->what()});
        reply(std::move(*piece));
      });
}

}  // namespace phub
