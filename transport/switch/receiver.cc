#include "transport/switch/receiver.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "transport/error.h"

namespace phub {

SwitchReceiver::SwitchReceiver(const SwitchReceiverOptions& options)
    : workers_(options.workers),
      generation_(options.generation),
      first_slot_(options.first_slot),
      acknowledged_(2u * options.slots),
      lacking_(options.slots) {
  uint64_t sums = 0;
  uint32_t parts = 0;
  for (const uint32_t elements : options.elements) {
    PHUB_CHECK(elements > 0);
    Chunk chunk{.first = sums, .first_part = parts, .elements = elements};
    chunk.parts = (elements + kSwitchElements - 1) / kSwitchElements;
    sums += uint64_t{chunk.parts} * kSwitchElements;
    parts += chunk.parts;
    chunks_.push_back(chunk);
  }
  sums_.resize(sums);
  parts_.resize(parts);
  for (Chunk& chunk : chunks_) open(chunk, options.first_round);
}

uint64_t SwitchReceiver::bytes(std::span<const uint32_t> elements, uint32_t slots) {
  constexpr uint64_t kPart = kSwitchElements * sizeof(int32_t) + 1;  // with its bit, rounded up
  uint64_t bytes = uint64_t{slots} * (2 * sizeof(Acknowledged) + sizeof(Lacking));
  bytes += elements.size() * sizeof(Chunk);
  for (const uint32_t count : elements) {
    bytes += (count + kSwitchElements - 1) / kSwitchElements * kPart;
  }
  return bytes;
}

void SwitchReceiver::open(Chunk& chunk, uint32_t round) {
  chunk.round = round;
  chunk.left = chunk.parts;
  std::fill_n(parts_.begin() + chunk.first_part, chunk.parts, false);
}

void SwitchReceiver::begin_next(uint32_t chunk) {
  PHUB_CHECK(closed(chunk));
  open(chunks_[chunk], chunks_[chunk].round + 1);
}

std::span<const int32_t> SwitchReceiver::sums(uint32_t chunk) const {
  PHUB_CHECK(closed(chunk));
  return std::span(sums_).subspan(chunks_[chunk].first, chunks_[chunk].elements);
}

void SwitchReceiver::begin(uint64_t generation, uint32_t first_round) {
  PHUB_CHECK(ended());
  generation_ = generation;
  why_ = nullptr;
  std::ranges::fill(acknowledged_, Acknowledged());
  std::ranges::fill(lacking_, Lacking());
  for (Chunk& chunk : chunks_) open(chunk, first_round);
}

void SwitchReceiver::end(const char* why) {
  if (!ended()) why_ = why;
}

SwitchReceiver::Answer SwitchReceiver::receive(std::span<const std::byte> bytes) {
  Answer answer;
  SwitchHeader& header = answer.header;
  if (bytes.size() != sizeof(SwitchPacket)) return answer;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kSwitchMagic) return answer;
  const bool from_workers =
      header.kind == kSwitchPart || header.kind == kSwitchSum || header.kind == kSwitchWaiting;
  if (!from_workers) return answer;
  answer.to = To::kSender;
  if (header.generation == generation_ && !ended()) {
    if (header.kind == kSwitchWaiting) {
      const Acknowledged* const known = acknowledged(header);
      if (known != nullptr && header.turn > known->turn) note_lacking(header);
      if (known == nullptr || known->turn != header.turn) return answer;
      header.kind = kSwitchTaken;
      header.next_exponent = known->next_exponent;
      return answer;
    }
    const bool taken = take(header, bytes.subspan(sizeof header), answer);
    header.kind = taken ? kSwitchTaken : kSwitchEnded;
    if (!taken) answer.to = To::kAll;
    return answer;
  }
  header.kind = kSwitchEnded;
  return answer;
}

// Null: the slot is none of this job's.
SwitchReceiver::Acknowledged* SwitchReceiver::acknowledged(const SwitchHeader& header) {
  const uint32_t slot = uint32_t{header.slot} - first_slot_;
  if (header.slot < first_slot_ || slot >= acknowledged_.size() / 2) return nullptr;
  return &acknowledged_[2 * slot + header.turn % 2];
}

void SwitchReceiver::note_lacking(const SwitchHeader& header) {
  Lacking& lacking = lacking_[header.slot - first_slot_];
  if (header.turn < lacking.turn) return;
  const uint64_t lacked = header.turn == lacking.turn ? lacking.workers : workers_;
  note_heard(lacked & header.workers);
  lacking = {workers_ & ~header.workers, header.turn, header.chunk};
}

void SwitchReceiver::note_heard(uint64_t workers) {
  for (; workers != 0; workers &= workers - 1) ++heard_[std::countr_zero(workers)];
}

void SwitchReceiver::find_lacking(std::span<uint64_t> by_chunk) const {
  PHUB_CHECK(by_chunk.size() == chunks_.size());
  std::ranges::fill(by_chunk, 0);
  const uint32_t next = first_open();
  for (const Lacking& lacking : lacking_) {
    if (lacking.workers == 0) continue;
    // Exponents alone are of a chunk that is still to come.
    by_chunk[lacking.chunk < chunks_.size() ? lacking.chunk : next] |= lacking.workers;
  }
}

// The next to be closed, as far as is known here.
uint32_t SwitchReceiver::first_open() const {
  uint32_t first = 0;
  for (uint32_t i = 1; i < chunks_.size(); ++i) {
    const bool before = closed(first) || chunks_[i].round < chunks_[first].round;
    if (!closed(i) && before) first = i;
  }
  return first;
}

// False: the generation has ended with it.
bool SwitchReceiver::take(const SwitchHeader& header, std::span<const std::byte> codes,
                          Answer& answer) {
  Acknowledged* const known = acknowledged(header);
  if (header.kind == kSwitchPart) return end("the switch did not add a part"), false;
  if (header.workers != workers_) return end("a sum is not of all workers"), false;
  if (known == nullptr) return end("a sum is of a slot that is not planned"), false;
  if (header.turn < known->turn) return true;  // it is late
  if (header.turn > known->turn + 2) return end("a sum is of a turn that cannot have begun"), false;
  const bool is_new = header.turn > known->turn;
  if (is_new) note_heard(workers_);
  *known = {header.turn, header.next_exponent};
  Lacking& lacking = lacking_[header.slot - first_slot_];
  if (header.turn >= lacking.turn) lacking = {};
  if (header.chunk != kSwitchNoChunk) return take_part(header, codes, answer);
  if (is_new) answer.to = To::kAll;
  return true;
}

bool SwitchReceiver::take_part(const SwitchHeader& header, std::span<const std::byte> codes,
                               Answer& answer) {
  if (header.chunk >= chunks_.size()) return end("a sum is of a chunk that is not planned"), false;
  Chunk& chunk = chunks_[header.chunk];
  if (header.part >= chunk.parts) return end("a sum is of a part that is not planned"), false;
  const auto ahead = static_cast<int16_t>(header.round - chunk.round);
  if (ahead < 0) return true;  // closed long ago
  if (ahead > 0) return end("a sum is of a later round"), false;
  const uint32_t part = chunk.first_part + header.part;
  if (parts_[part]) return true;
  if (chunk.left == chunk.parts) chunk.exponent = header.exponent;
  if (chunk.exponent != header.exponent) {
    return end("the sums of a chunk have different exponents"), false;
  }
  parts_[part] = true;
  std::memcpy(sums_.data() + chunk.first + size_t{header.part} * kSwitchElements, codes.data(),
              codes.size());
  answer.closed = --chunk.left == 0;
  answer.to = To::kAll;
  return true;
}

}  // namespace phub
