#include "transport/switch/sender.h"

#include <algorithm>
#include <limits>

#include "transport/error.h"

namespace phub {
namespace {

constexpr uint32_t kLastTurn = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMostRetries = 8;  // times retry_ns

}  // namespace

SwitchSender::SwitchSender(const SwitchSenderOptions& options, SwitchOwner& owner)
    : options_(options), owner_(owner), slots_(options.slots), chunks_(options.max_chunks) {
  PHUB_CHECK(options.slots > 0 && options.max_chunks > 0);
  PHUB_CHECK(options.worker < kSwitchWorkers && (options.workers >> options.worker & 1) != 0);
  begin(options.generation);
  probes_ = false;
}

void SwitchSender::begin(uint64_t generation) {
  options_.generation = generation;
  for (size_t slot = 0; slot < slots_.size(); ++slot) slots_[slot] = {.part = slot};
  first_ = count_ = 0;
  parts_pushed_ = 0;
  out_ = 0;
  probes_ = true;
  ended_ = false;
}

SwitchSender::Pushed* SwitchSender::find(uint64_t part) {
  if (part >= parts_pushed_) return nullptr;
  // The last that does not begin behind it.
  size_t low = 0, high = count_;
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    (chunks_[(first_ + middle) % chunks_.size()].first_part <= part ? low : high) = middle;
  }
  return &chunks_[(first_ + low) % chunks_.size()];
}

int16_t SwitchSender::exponent_of(uint64_t part) {
  const Pushed* pushed = find(part);
  return pushed ? pushed->chunk.exponent : int16_t{kSwitchUnknown};
}

void SwitchSender::push(const Chunk& chunk, uint64_t now_ns) {
  PHUB_CHECK(!full() && chunk.elements > 0);
  Pushed& pushed = chunks_[(first_ + count_++) % chunks_.size()];
  const uint32_t parts = (chunk.elements + kSwitchElements - 1) / kSwitchElements;
  pushed = {chunk, parts_pushed_, parts, parts};
  parts_pushed_ += parts;
  if (ended_) return;
  const auto first = static_cast<uint32_t>(pushed.first_part % slots_.size());
  const size_t touched = std::min<size_t>(parts, slots_.size());
  for (size_t i = 0; i < touched; ++i) {
    advance(static_cast<uint16_t>((first + i) % slots_.size()), now_ns);
  }
}

// Begins the slot's next turn, if nothing is out and its next part is here.
void SwitchSender::advance(uint16_t number, uint64_t now_ns) {
  Slot& slot = slots_[number];
  if (slot.out || slot.part >= parts_pushed_) return;
  if (slot.turn == kLastTurn) return end();
  if (out_++ == 0) heard_ns_ = now_ns;
  ++slot.turn;
  slot.out = true;
  slot.retry_ns = options_.retry_ns;
  slot.next_exponent = exponent_of(slot.part + (slot.agreed ? slots_.size() : 0));
  send(number, now_ns);
}

void SwitchSender::send(uint16_t number, uint64_t now_ns) {
  Slot& slot = slots_[number];
  SwitchHeader& header = packet_.header;
  header = {.magic = kSwitchMagic,
            .kind = kSwitchPart,
            .worker = options_.worker,
            .slot = static_cast<uint16_t>(options_.first_slot + number),
            .generation = options_.generation,
            .turn = slot.turn,
            .chunk = kSwitchNoChunk,
            .exponent = kSwitchNothing,
            .next_exponent = slot.next_exponent,
            .workers = options_.workers};
  std::ranges::fill(packet_.codes, 0);
  if (slot.agreed) {
    const Pushed& pushed = *find(slot.part);
    const auto part = static_cast<uint32_t>(slot.part - pushed.first_part);
    header.round = static_cast<uint16_t>(pushed.chunk.round);
    header.chunk = pushed.chunk.chunk;
    header.part = static_cast<uint16_t>(part);
    header.exponent = slot.exponent;
    if (slot.exponent != kSwitchNothing && slot.exponent != kSwitchNoNumber) {
      owner_.fill(pushed.chunk.handle, part * kSwitchElements, slot.exponent, packet_.codes);
    }
  }
  slot.due_ns = now_ns + slot.retry_ns;
  slot.retry_ns = std::min(2 * slot.retry_ns, kMostRetries * options_.retry_ns);
  ++packets_;
  owner_.send(packet_);
}

void SwitchSender::receive(const SwitchHeader& header, uint64_t now_ns) {
  if (ended_ || header.magic != kSwitchMagic || header.generation != options_.generation) return;
  if (header.kind == kSwitchEnded) return end();
  if (header.kind != kSwitchTaken && header.kind != kSwitchWaiting) return;
  heard_ns_ = now_ns;
  probes_ = false;
  const int number = header.slot - options_.first_slot;
  if (header.kind == kSwitchWaiting || number < 0 || number >= options_.slots) return;
  Slot& slot = slots_[static_cast<size_t>(number)];
  if (!slot.out || header.turn != slot.turn) return;            // once more, of an earlier turn
  if (header.next_exponent < slot.next_exponent) return end();  // the largest is below one of them
  acknowledged(slot, header.next_exponent);
  advance(static_cast<uint16_t>(number), now_ns);
}

void SwitchSender::acknowledged(Slot& slot, int16_t next_exponent) {
  slot.out = false;
  --out_;
  if (slot.agreed) {
    --find(slot.part)->left;
    slot.part += slots_.size();
    while (count_ > 0 && chunks_[first_].left == 0) {
      first_ = (first_ + 1) % chunks_.size();
      --count_;
    }
  }
  slot.agreed = next_exponent != kSwitchUnknown;
  slot.exponent = next_exponent;
}

void SwitchSender::poll(uint64_t now_ns) {
  if (ended_ || out_ == 0) return;
  if (now_ns >= gives_up_at_ns()) return end();
  for (size_t number = 0; number < slots_.size(); ++number) {
    const Slot& slot = slots_[number];
    if (!slot.out || slot.due_ns > now_ns) continue;
    ++repeats_;
    send(static_cast<uint16_t>(number), now_ns);
  }
}

uint64_t SwitchSender::due_ns() const {
  uint64_t due = std::numeric_limits<uint64_t>::max();
  if (ended_ || out_ == 0) return due;
  due = gives_up_at_ns();
  for (const Slot& slot : slots_) {
    if (slot.out) due = std::min(due, slot.due_ns);
  }
  return due;
}

}  // namespace phub
