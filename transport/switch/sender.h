// A worker's side of a switch that adds: chunks in parts over the switch's slots, repeated until
// the box acknowledges them.
//
// All workers push the same chunks in the same order. The parts of all chunks, one after another,
// are a stream; part p goes through slot p % slots. When the worker does not have the chunk that a
// slot's next part is of yet, it asks for kSwitchUnknown, and all workers begin that part with a
// packet that carries exponents only.
//
// A generation ends when the box says so, and when nothing was heard for give_up_ns while something
// was out: the switch or the box is gone, or full. (A worker that is late ends nothing: the box
// answers for it.) It ends with an acknowledgement that cannot be, too. The sender's owner then
// sends every chunk that has no result yet to the box directly. Another begins with begin(); one
// that begins behind a switch that is still gone holds nobody up for long, as until something of it
// was heard it ends after probe_ns. One thread; nothing allocates after construction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/switch/packet.h"

namespace phub {

// The requests of the sender to its owner. The calls come from within its own.
class SwitchOwner {
 public:
  virtual ~SwitchOwner() = default;
  // Elements [first, first + codes.size()) of the chunk, as multiples of 2^exponent, zeros behind
  // its end. It is not called if the exponent is kSwitchNothing or kSwitchNoNumber. It gives the
  // same every time.
  virtual void fill(uint64_t chunk, uint32_t first, int exponent, std::span<int32_t> codes) = 0;
  virtual void send(const SwitchPacket& packet) = 0;
};

struct SwitchSenderOptions {
  uint8_t worker = 0;
  uint64_t workers = 1;  // a bit for each, this one among them
  uint64_t generation = 1;
  uint16_t first_slot = 0;
  uint16_t slots = 1;
  // The most chunks that are pushed and not acknowledged. The result of a chunk may come before the
  // last acknowledgement, and a slot that waits for its own lets others go on: in lock-step there
  // are at most as many as a round has chunks, `slots`, and one.
  uint32_t max_chunks = 1;
  uint64_t retry_ns = 20'000'000;  // twice as long each time, up to 8 times
  uint64_t give_up_ns = 5'000'000'000;
  uint64_t probe_ns = 500'000'000;
};

class SwitchSender {
 public:
  struct Chunk {
    uint64_t handle = 0;  // the owner's
    uint32_t round = 0;
    uint32_t chunk = 0;
    uint32_t elements = 1;
    int16_t exponent = kSwitchNothing;  // this worker's
  };

  // REQUIRES: slots > 0; worker is one of workers; owner lives as long.
  SwitchSender(const SwitchSenderOptions& options, SwitchOwner& owner);

  bool full() const { return count_ == chunks_.size(); }
  // The chunk's numbers stay until it is acknowledged, its result is there, or the generation has
  // ended. (With the result, the box has every part of it, and takes none of them again.)
  // REQUIRES: !full(); chunk.elements > 0.
  void push(const Chunk& chunk, uint64_t now_ns);
  // Something came from the box. A header that is not for this generation changes nothing.
  void receive(const SwitchHeader& header, uint64_t now_ns);
  // Repeats the packets that are due.
  void poll(uint64_t now_ns);
  // The time when poll() has something to do; ~0 means never.
  uint64_t due_ns() const;
  // Ends the generation, since the box says so in another way, or since somebody sends directly:
  // nothing is sent any more.
  void end() { ended_ = true; }
  // Begins another generation, in which nothing has been pushed.
  void begin(uint64_t generation);

  bool ended() const { return ended_; }
  // All that was pushed is acknowledged.
  bool idle() const { return count_ == 0; }
  uint64_t packets() const { return packets_; }
  uint64_t repeats() const { return repeats_; }

 private:
  struct Slot {
    uint32_t turn = 0;
    uint64_t part = 0;          // the next part, in the stream
    bool out = false;           // a packet of this turn is not acknowledged
    bool agreed = false;        // exponent is that of `part`
    int16_t exponent = 0;       // the exponent of the part that is out, if one is
    int16_t next_exponent = 0;  // asked for
    uint64_t due_ns = 0;
    uint64_t retry_ns = 0;
  };
  struct Pushed {
    Chunk chunk;
    uint64_t first_part = 0;  // in the stream
    uint32_t parts = 0;
    uint32_t left = 0;  // not acknowledged
  };

  // The chunk of a part of the stream; null: it is not pushed yet.
  Pushed* find(uint64_t part);
  int16_t exponent_of(uint64_t part);
  void advance(uint16_t slot, uint64_t now_ns);
  void send(uint16_t slot, uint64_t now_ns);
  uint64_t gives_up_at_ns() const {
    const uint64_t patience_ns = probes_ ? options_.probe_ns : options_.give_up_ns;
    return heard_ns_ + patience_ns;
  }
  void acknowledged(Slot& slot, int16_t next_exponent);

  SwitchSenderOptions options_;
  SwitchOwner& owner_;
  std::vector<Slot> slots_;
  std::vector<Pushed> chunks_;  // a ring: the oldest at first_
  size_t first_ = 0;
  size_t count_ = 0;
  uint64_t parts_pushed_ = 0;
  uint32_t out_ = 0;  // slots with something out
  uint64_t heard_ns_ = 0;
  bool probes_ = false;  // nothing was heard of this generation, which is not the first
  bool ended_ = false;
  uint64_t packets_ = 0;
  uint64_t repeats_ = 0;
  SwitchPacket packet_{};
};

}  // namespace phub
