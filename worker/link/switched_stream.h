// What a rank sends of one stream of a switch that adds: to one core of the box
// (transport/switch/stream.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/fixed_point.h"
#include "transport/control/messages.h"
#include "transport/layout.h"
#include "transport/switch/generation.h"
#include "transport/switch/sender.h"
#include "transport/switch/socket.h"
#include "transport/switch/stream.h"
#include "transport/transport.h"
#include "worker/link/switch_link.h"

namespace phub {

struct SwitchedChunk {
  uint64_t gradient_offset = 0;
  uint32_t elements = 0;
  uint32_t queue = 0, index = 0;
  uint64_t round = 0;  // of the latest post, or before the first
  Write write = {};    // that, if it is
  enum State : uint8_t {
    kIdle,     // posted directly, or its result is here
    kWaits,    // for its turn
    kThrough,  // the switch
    kDirect    // its generation has ended: it is to be posted
  } state = kIdle;
};

// What one core of the box takes.
class SwitchedStream final : public SwitchOwner {
 public:
  static constexpr uint64_t kNever = ~uint64_t{0};

  SwitchedStream(const Layout& layout, const SwitchStream& stream, const JoinReply& reply,
                 const SwitchPatience& patience, Datagrams& datagrams,
                 std::span<const std::byte> gradients)
      : box_(switch_address(stream.address)),
        first_slot_(stream.first_slot),
        slots_(stream.slots),
        first_generation_(reply.through_switch.generation),
        first_round_(reply.first_round),
        datagrams_(datagrams),
        gradients_(gradients) {
    for (const uint32_t id : switch_chunks(layout, stream.queues)) {
      const ChunkLayout& chunk = layout.chunks[id];
      chunks_.push_back({.gradient_offset = chunk.gradient_offset,
                         .elements = chunk.elements,
                         .queue = chunk.queue,
                         .index = chunk.index,
                         .round = reply.first_round - 1});
    }
    sender_.emplace(
        SwitchSenderOptions{.worker = static_cast<uint8_t>(reply.rank),
                            .workers = switch_workers(reply.through_switch.workers),
                            .generation = reply.through_switch.generation,
                            .first_slot = static_cast<uint16_t>(stream.first_slot),
                            .slots = static_cast<uint16_t>(stream.slots),
                            .max_chunks = static_cast<uint32_t>(chunks_.size()) + stream.slots + 1,
                            .retry_ns = patience.retry_ns,
                            .give_up_ns = patience.silence_ns,
                            .probe_ns = patience.probe_ns},
        *this);
    if (reply.through_switch.later) leave();
  }

  std::vector<SwitchedChunk>& chunks() { return chunks_; }
  SwitchSender& sender() { return *sender_; }
  // Nothing goes through the switch until another generation begins. False: so it was.
  bool leave() {
    sender_->end();
    return !std::exchange(has_left_, true);
  }
  bool has_left() const { return has_left_; }
  // For good: the program's order would hold up another generation as well.
  void stay_away() { stays_away_ = true; }
  bool stays_away() const { return stays_away_; }
  // Whether this round goes through the switch.
  bool takes(uint64_t round) const { return !has_left_ && round >= first_round_; }

  // Another generation. REQUIRES: has_left(), and no chunk waits or is on its way.
  void begin(const SwitchBeginning& beginning) {
    sender_->begin(switch_generation(first_generation_, first_slot_, beginning.index));
    index_ = beginning.index;
    first_round_ = beginning.round;
    next_ = waiting_ = 0;
    has_left_ = false;
  }
  uint32_t index() const { return index_; }  // of the generation
  // That a generation can begin with: nothing of it is posted.
  bool is_before(uint64_t round) const {
    return std::ranges::all_of(chunks_, [round](const auto& each) { return each.round < round; });
  }
  bool has(uint32_t slot) const { return slot >= first_slot_ && slot - first_slot_ < slots_; }
  // Since when chunks wait for one that this worker has not posted; kNever: none does.
  uint64_t misses_one_since_ns() const {
    return waiting_ > 0 && chunks_[next_].state == SwitchedChunk::kIdle ? moved_ns_ : kNever;
  }

  void take(SwitchedChunk& chunk, const Write& write, uint64_t now) {
    ++chunk.round;
    chunk.write = write;
    chunk.state = SwitchedChunk::kWaits;
    if (waiting_++ == 0) moved_ns_ = now;
    advance(now);
  }
  void answered(SwitchedChunk& chunk, uint64_t now) {
    if (chunk.state == SwitchedChunk::kWaits) --waiting_;
    chunk.state = SwitchedChunk::kIdle;
    moved_ns_ = now;
  }

  // Sends what may go now.
  void advance(uint64_t now) {
    while (chunks_[next_].state == SwitchedChunk::kWaits && !sender_->full() && !sender_->ended()) {
      SwitchedChunk& chunk = chunks_[next_];
      chunk.state = SwitchedChunk::kThrough;
      --waiting_;
      moved_ns_ = now;
      const bool null = decode(chunk.write.imm).kind == ImmKind::kNull;
      const int exponent =
          null ? kSwitchNothing
               : kernels::exponent_of(gradients_.data() + chunk.gradient_offset, chunk.elements);
      const uint32_t number = next_;
      next_ = next_ + 1 < chunks_.size() ? next_ + 1 : 0;
      sender_->push({.handle = chunk.round << 32 | number,
                     .round = static_cast<uint32_t>(chunk.round),
                     .chunk = number,
                     .elements = chunk.elements,
                     .exponent = static_cast<int16_t>(exponent)},
                    now);
    }
  }

  // Of a chunk whose result is here nobody takes the numbers any more, and its gradient may be
  // another one.
  void fill(uint64_t handle, uint32_t first, int exponent, std::span<int32_t> codes) override {
    const SwitchedChunk& chunk = chunks_[static_cast<uint32_t>(handle)];
    const bool there = chunk.state == SwitchedChunk::kThrough &&
                       static_cast<uint32_t>(chunk.round) == handle >> 32;
    const bool null = decode(chunk.write.imm).kind == ImmKind::kNull;
    if (!there || null) return void(std::ranges::fill(codes, 0));
    kernels::align(gradients_.data() + chunk.gradient_offset, chunk.elements, exponent, first,
                   codes);
  }
  void send(const SwitchPacket& packet) override {
    datagrams_.send(std::as_bytes(std::span(&packet, 1)), box_);
  }

 private:
  const sockaddr_in box_;
  const uint32_t first_slot_, slots_;
  const uint64_t first_generation_;
  uint64_t first_round_;  // of this one
  uint32_t index_ = 0;
  bool has_left_ = false;  // it
  bool stays_away_ = false;
  Datagrams& datagrams_;
  const std::span<const std::byte> gradients_;
  std::vector<SwitchedChunk> chunks_;
  std::optional<SwitchSender> sender_;
  uint32_t next_ = 0;
  uint32_t waiting_ = 0;
  uint64_t moved_ns_ = 0;  // when a chunk was taken, or began to wait, last
};

}  // namespace phub
