// What a simulated process saves of its own: its parts of checkpoints, as worker/save/saver.h sends
// them.
#include <fmt/format.h>

#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tests/sim/rack.h"
#include "tests/sim/trainer.h"
#include "tests/sim/virtual_clock.h"
#include "worker/save/rank_state.h"

namespace phub::sim {
namespace {

constexpr uint32_t kMostPartsOut = 2;
constexpr const char* kEntry = "state";

}  // namespace

// What it goes on from, before it trains.
void Trainer::restore() {
  restored_bytes_.clear();
  restore_more();
}

void Trainer::restore_more() {
  const bool goes_on = job_.restored_round > 0 && reply_->first_round == job_.restored_round + 1;
  if (reply_->part_bytes(reply_->rank) == 0) {
    if (goes_on) {
      job_.oracle.restored({{reply_->rank, reply_->incarnation}, job_.restored_round}, {});
    }
    return;
  }
  if (!goes_on) {
    return rack_.fail(fmt::format("rank {} begins with round {}, and has a part of round {}",
                                  reply_->rank, reply_->first_round, job_.restored_round));
  }
  state_ = State::kRestoring;
  control().call<PartBytes>(
      "restored part", mail_,
      [this, who = credential()](const Reply<PartBytes>& reply) {
        server().restored_part(who, who.rank, restored_bytes_.size(), reply);
      },
      [this](const Result<PartBytes>& result) { on_restored(result); });
}

void Trainer::on_restored(const Result<PartBytes>& result) {
  if (done()) return;
  if (!result && result.code == ErrorCode::kTimeout) return restore_more();
  lacks_part_ = !result;
  if (!result) return on_error(result.code, result.message);
  restored_bytes_ += result.value->bytes;
  if (restored_bytes_.size() < reply_->part_bytes(reply_->rank)) return restore_more();
  const RankState state = unpack(restored_bytes_);
  std::optional<std::string> own;
  if (const auto entry = state.find(kEntry); entry != state.end()) {
    own.emplace(reinterpret_cast<const char*>(entry->second.data()), entry->second.size());
  }
  job_.oracle.restored({{reply_->rank, reply_->incarnation}, reply_->first_round - 1}, own);
  const auto residuals = state.find(std::string(GradientCoder::kStateName));
  if (residuals != state.end()) {
    coder_->restore(residuals->second);
    ++job_.residuals_restored;
  }
  ++job_.parts_restored;
  state_ = State::kRunning;
}

// All results of the round are here: its part is sent before anything else is pushed.
void Trainer::save(uint64_t round) {
  saved_rounds_->next();
  Part part{round, part_after(round)};
  if (parts_out_ < kMostPartsOut) return send_part(part);
  parts_.push_back(std::move(part));
}

std::string Trainer::part_after(uint64_t round) const {
  RankState state;
  if (saves_) {
    const std::string own = job_.oracle.part_of({{reply_->rank, reply_->incarnation}, round});
    const auto bytes = std::as_bytes(std::span(own));
    state[kEntry].assign(bytes.begin(), bytes.end());
  }
  if (coder_->residual_bytes() > 0) {
    state[std::string(GradientCoder::kStateName)] = coder_->residuals();
  }
  return pack(state, kMaxStateBytes + coder_->residual_bytes());
}

// The next piece of it; most parts are one.
void Trainer::send_part(const Part& part) {
  ++parts_out_;
  rack_.net().trace("part", id_, part.round);
  const uint64_t left = part.bytes.size() - part.sent;
  const uint64_t bytes = rack_.random().below(4) > 0 ? left : 1 + rack_.random().below(left);
  const PartPiece place{
      .whose = reply_->rank, .round = part.round, .offset = part.sent, .all = part.bytes.size()};
  control().call<Done>(
      "part", mail_,
      [this, who = credential(), place,
       piece = part.bytes.substr(part.sent, bytes)](const Reply<Done>& reply) {
        // Its bytes come later than the question whether they are wanted.
        server().check_part(who, place, piece.size());
        rack_.net().after(rack_.random().below(kMs / 10),
                          [this, who, place, piece, reply, life = rack_.box_life(box())] {
                            if (life != rack_.box_life(box())) return;
                            try {
                              server().take_part(who, place, piece, nullptr, reply);
                            } catch (const Error& error) {
                              reply({error.code(), error.what()});
                            }
                          });
      },
      [this, part, bytes](const Result<Done>& result) { part_answered(result, part, bytes); });
}

void Trainer::part_answered(const Result<Done>& result, Part part, uint64_t piece_bytes) {
  if (done() || state_ == State::kLeaving) return;
  if (!result && result.code == ErrorCode::kRewound) return on_error(result.code, result.message);
  if (!result && end_of_part(result.code) == PartEnd::kAgain) return send_later(part);
  const bool is_there = result || end_of_part(result.code) == PartEnd::kThere;
  part.sent += piece_bytes;
  if (!is_there || part.sent == part.bytes.size()) return part_ended();
  --parts_out_;
  send_part(part);
}

void Trainer::send_later(const Part& part) {
  std::weak_ptr<Mail> mail = mail_;
  rack_.net().after(kMs, [this, mail, part] {
    auto open = mail.lock();
    if (open == nullptr) return;
    open->push_back([this, part] {
      --parts_out_;
      send_part(part);
    });
  });
}

void Trainer::part_ended() {
  --parts_out_;
  if (parts_.empty()) return;
  const Part next = std::move(parts_.front());
  parts_.pop_front();
  send_part(next);
}

}  // namespace phub::sim
