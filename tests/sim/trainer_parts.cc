// What a simulated process saves of its own: its parts of checkpoints, as worker/saver.h sends
// them.
#include <fmt/format.h>

#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tests/sim/rack.h"
#include "tests/sim/trainer.h"
#include "worker/rank_state.h"

namespace phub::sim {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint32_t kMostPartsOut = 2;
constexpr const char* kEntry = "state";

}  // namespace

// What it goes on from, before it trains.
void Trainer::restore() {
  const bool goes_on = job_.restored_round > 0 && reply_->first_round == job_.restored_round + 1;
  if (reply_->part_bytes == 0) {
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
        server().restored_part(who, reply);
      },
      [this](const Result<PartBytes>& result) { on_restored(result); });
}

void Trainer::on_restored(const Result<PartBytes>& result) {
  if (done()) return;
  if (!result && result.code == ErrorCode::kTimeout) return restore();
  lacks_part_ = !result;
  if (!result) return on_error(result.code, result.message);
  const RankState state = unpack(result.value->bytes);
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
  return pack(state);
}

void Trainer::send_part(const Part& part) {
  ++parts_out_;
  rack_.net().trace("part", id_, part.round);
  control().call<Done>(
      "part", mail_,
      [this, who = credential(), part](const Reply<Done>& reply) {
        // Its bytes come later than the question whether they are wanted.
        server().check_part(who, part.round, part.bytes.size());
        rack_.net().after(rack_.random().below(kMs / 10),
                          [this, who, part, reply, life = rack_.box_life()] {
                            if (life != rack_.box_life()) return;
                            try {
                              server().take_part(who, part.round, part.bytes, nullptr, reply);
                            } catch (const Error& error) {
                              reply({error.code(), error.what()});
                            }
                          });
      },
      [this, part](const Result<Done>& result) {
        if (done() || state_ == State::kLeaving) return;
        if (!result && result.code == ErrorCode::kRewound) {
          return on_error(result.code, result.message);
        }
        if (result || end_of_part(result.code) != PartEnd::kAgain) return part_ended();
        std::weak_ptr<Mail> mail = mail_;
        rack_.net().after(kMs, [this, mail, part] {
          auto open = mail.lock();
          if (open == nullptr) return;
          open->push_back([this, part] {
            --parts_out_;
            send_part(part);
          });
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
