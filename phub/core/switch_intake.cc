#include "phub/core/switch_intake.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "phub/core/messages.h"
#include "transport/error.h"
#include "transport/switch/generation.h"
#include "transport/switch/stream.h"

namespace phub {
namespace {

constexpr uint64_t kMostWaited = uint64_t{1} << 20;      // rounds between two generations
constexpr uint32_t kPackets = 4 * SwitchSocket::kBatch;  // taken in one pass

}  // namespace

SwitchIntake::SwitchIntake(const Options& options, std::unique_ptr<Datagrams> datagrams)
    : ranks_(options.ranks),
      first_generation_(options.generation),
      first_slot_(options.first_slot),
      rounds_between_(options.rounds_between),
      generation_(options.generation),
      first_round_(options.first_round),
      waits_for_(options.rounds_between),
      to_all_(options.to_all),
      datagrams_(std::move(datagrams)),
      receiver_({.workers = switch_workers(options.ranks),
                 .generation = options.generation,
                 .first_slot = options.first_slot,
                 .slots = options.slots,
                 .first_round = static_cast<uint32_t>(options.first_round),
                 .elements = options.elements}),
      number_(options.all_chunks, kNone),
      chunk_(options.chunks),
      lacking_(options.chunks.size()) {
  PHUB_CHECK(options.chunks.size() == options.elements.size());
  for (uint32_t i = 0; i < chunk_.size(); ++i) number_[chunk_[i]] = i;
  closed_.reserve(chunk_.size());
}

uint64_t SwitchIntake::bytes(std::span<const uint32_t> elements, uint32_t slots,
                             uint32_t all_chunks) {
  uint64_t bytes = sizeof(SwitchIntake) + SwitchSocket::bytes();
  bytes += SwitchReceiver::bytes(elements, slots);
  bytes += (2 * elements.size() + all_chunks) * sizeof(uint32_t);
  return bytes + elements.size() * sizeof(uint64_t);
}

uint32_t SwitchIntake::poll() {
  uint32_t taken = 0;
  for (drained_ = false; taken < kPackets; ++taken) {
    const std::optional<Datagram> got = datagrams_->receive();
    drained_ = !got;
    if (drained_) break;
    const SwitchReceiver::Answer made = receiver_.receive(got->bytes);
    if (made.closed) {
      closed_.push_back(chunk_[made.header.chunk]);
      ++chunks_;
    }
    if (made.to == SwitchReceiver::To::kNobody) continue;
    answer(made.header, made.to == SwitchReceiver::To::kAll ? to_all_ : got->from);
  }
  datagrams_->flush();
  return taken;
}

uint32_t SwitchIntake::next_closed() {
  if (closed_.empty()) return kNone;
  const uint32_t chunk = closed_.back();
  closed_.pop_back();
  return chunk;
}

void SwitchIntake::wait_from(uint64_t round) {
  const uint64_t lasted = round > first_round_ ? round - first_round_ : 0;
  if (lasted >= waits_for_) {
    waits_for_ = rounds_between_;
  } else if (index_ > 0) {
    waits_for_ = std::min(2 * waits_for_, kMostWaited);
  }
  const bool begins_again = rounds_between_ > 0 && index_ + 1 < kMostSwitchGenerations;
  waits_until_ = begins_again ? round + waits_for_ : kNever;
}

void SwitchIntake::begin_again(uint64_t first_round) {
  PHUB_CHECK(closed_.empty());
  generation_ = switch_generation(first_generation_, first_slot_, ++index_);
  first_round_ = first_round;
  why_rank_ = kNone;
  receiver_.begin(generation_, static_cast<uint32_t>(first_round));
}

void SwitchIntake::end(const char* why, uint32_t rank) {
  if (ended()) return;
  receiver_.end(why);
  why_rank_ = rank;
  answer({.magic = kSwitchMagic, .kind = kSwitchEnded, .generation = generation_}, to_all_);
  datagrams_->flush();
}

void SwitchIntake::answer(const SwitchHeader& header, const sockaddr_in& to) {
  datagrams_->send(std::as_bytes(std::span(&header, 1)), to);
}

}  // namespace phub
