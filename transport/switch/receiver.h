// The box's side of a switch that adds: takes sums, acknowledges them, and closes a chunk when all
// its parts are there, each with all workers in it.
//
// It has no clock and repeats nothing: the workers do. It acknowledges again whatever it has
// acknowledged, also when the switch has forgotten that all had sent it. A generation ends with the
// first packet that the switch did not add or that disagrees with the plan, and when its owner says
// so, as it does when a rank sends a chunk directly. Parts of chunks that are not closed are
// dropped then, and their owner takes these from all workers directly. Closed ones stay: packets
// that come for them again are acknowledged and change nothing. Another generation begins with
// begin(). One thread; nothing allocates after construction.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/switch/packet.h"

namespace phub {

struct SwitchReceiverOptions {
  uint64_t workers = 1;
  uint64_t generation = 1;
  uint16_t first_slot = 0;
  uint16_t slots = 1;
  uint32_t first_round = 1;        // the first round of all chunks
  std::vector<uint32_t> elements;  // by chunk
};

class SwitchReceiver {
 public:
  explicit SwitchReceiver(const SwitchReceiverOptions& options);
  // The memory of one with so many chunks and slots.
  static uint64_t bytes(std::span<const uint32_t> elements, uint32_t slots);

  enum class To : uint8_t { kNobody, kSender, kAll };
  struct Answer {
    To to = To::kNobody;
    SwitchHeader header{};
    bool closed = false;  // this packet closed chunk header.chunk
  };
  // `bytes` is a packet of whatever size.
  Answer receive(std::span<const std::byte> bytes);

  // The sums of a closed chunk, until its next round begins.
  std::span<const int32_t> sums(uint32_t chunk) const;
  int exponent(uint32_t chunk) const { return chunks_[chunk].exponent; }
  // The round that is being received, or, if the chunk is closed, that has been.
  uint32_t round(uint32_t chunk) const { return chunks_[chunk].round; }
  bool closed(uint32_t chunk) const { return chunks_[chunk].left == 0; }
  // Begins the next round of a closed chunk: its result is made, parts of the next round may come.
  // REQUIRES: closed(chunk).
  void begin_next(uint32_t chunk);

  // Some of the round's parts are there.
  bool begun(uint32_t chunk) const { return chunks_[chunk].left < chunks_[chunk].parts; }
  // Finds for each chunk the workers whose part others have sent, and sent again: a bit for each,
  // as the switch said last of every slot whose sum has not come since.
  void find_lacking(std::span<uint64_t> by_chunk) const;
  // The number of packets of this worker that are known of, ever: as parts of sums, or as the
  // switch said. It grows while the worker does its part, also where no chunk is complete for long.
  uint64_t heard(uint32_t worker) const { return heard_[worker]; }

  // Begins another generation, with this round of all chunks. REQUIRES: the one before has ended,
  // and no caller asks about it any more.
  void begin(uint64_t generation, uint32_t first_round);
  // `why` lives for ever.
  void end(const char* why);
  bool ended() const { return why_ != nullptr; }
  const char* why() const { return why_; }  // REQUIRES: ended()

 private:
  struct Chunk {
    uint64_t first = 0;       // in sums_
    uint32_t first_part = 0;  // in parts_
    uint32_t elements = 0;
    uint32_t round = 0;
    uint32_t parts = 0;
    uint32_t left = 0;
    int exponent = 0;
  };
  // The acknowledgement of a slot's turn; there are two sets, as in the switch.
  struct Acknowledged {
    uint32_t turn = 0;
    int16_t next_exponent = 0;
  };
  // The latest turn of a slot that waits for workers; none: it does not wait.
  struct Lacking {
    uint64_t workers = 0;
    uint32_t turn = 0;
    uint32_t chunk = 0;  // or kSwitchNoChunk
  };
  void open(Chunk& chunk, uint32_t round);
  void note_heard(uint64_t workers);
  void note_lacking(const SwitchHeader& header);
  uint32_t first_open() const;
  Acknowledged* acknowledged(const SwitchHeader& header);
  bool take(const SwitchHeader& header, std::span<const std::byte> codes, Answer& answer);
  bool take_part(const SwitchHeader& header, std::span<const std::byte> codes, Answer& answer);

  const uint64_t workers_;
  uint64_t generation_;
  const uint16_t first_slot_;
  std::vector<Acknowledged> acknowledged_;
  std::vector<Lacking> lacking_;  // by slot
  std::array<uint64_t, kSwitchWorkers> heard_{};
  std::vector<Chunk> chunks_;
  std::vector<int32_t> sums_;
  std::vector<bool> parts_;    // there
  const char* why_ = nullptr;  // it has ended; null: it has not
};

}  // namespace phub
