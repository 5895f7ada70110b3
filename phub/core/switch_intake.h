// A core's end of a switch that adds: takes the sums of a job's int32 chunks from datagrams of its
// own, acknowledges them, and tells the core job which chunks are complete.
//
// No contribution counts twice: a chunk's round is the switch's, if all its parts have come before
// the generation ended; else it is that of the slots to which ranks send directly. The core job
// ends the generation with the first direct contribution, and when ranks change. It begins another
// after some rounds (transport/switch/generation.h): twice as many each time, unless the generation
// lasted as long.
//
// Owned by the core's thread. Nothing allocates after construction.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/switch/receiver.h"
#include "transport/switch/socket.h"

namespace phub {

class SwitchIntake {
 public:
  struct Options {
    uint32_t ranks = 1;  // the ranks below this send through the switch
    uint64_t generation = 1;
    uint16_t first_slot = 0;
    uint16_t slots = 1;
    uint64_t first_round = 1;
    uint32_t rounds_between = 0;     // at least, between two generations; 0: no second one
    std::vector<uint32_t> elements;  // elements of the stream's chunks
    std::vector<uint32_t> chunks;    // the index of each among the core's `all_chunks`
    uint32_t all_chunks = 0;
    sockaddr_in to_all = {};  // the address for answers to all workers
  };
  SwitchIntake(const Options& options, std::unique_ptr<Datagrams> datagrams);
  // The bytes that an intake of this size holds.
  static uint64_t bytes(std::span<const uint32_t> elements, uint32_t slots, uint32_t all_chunks);

  // Takes the packets that are there, up to some hundred. Returns how many there were.
  uint32_t poll();
  // A chunk of the core that is complete; ~0: none. Returns each once.
  uint32_t next_closed();

  // Data of a complete chunk, valid until begin_next().
  std::span<const int32_t> sums(uint32_t chunk) const { return receiver_.sums(number_[chunk]); }
  int exponent(uint32_t chunk) const { return receiver_.exponent(number_[chunk]); }
  uint32_t round(uint32_t chunk) const { return receiver_.round(number_[chunk]); }  // low bits
  void begin_next(uint32_t chunk) { receiver_.begin_next(number_[chunk]); }

  // Whether this round of the chunk comes through the switch.
  bool takes(uint32_t chunk, uint64_t round) const {
    return !ended() && number_[chunk] != kNone && round >= first_round_;
  }
  std::span<const uint32_t> stream() const { return chunk_; }  // the chunks that may come so
  uint32_t ranks() const { return ranks_; }
  uint64_t first_round() const { return first_round_; }
  uint64_t chunks() const { return chunks_; }  // that were complete, ever
  uint64_t heard(uint32_t rank) const { return receiver_.heard(rank); }
  // Calls visit(chunk, ranks) for chunks that some ranks have sent parts of, and sent again, and
  // others have not: a bit for each of these (SwitchReceiver::find_lacking()).
  template <typename Visit>
  void for_each_lacking(const Visit& visit) {
    if (ended()) return;
    receiver_.find_lacking(lacking_);
    for (uint32_t i = 0; i < chunk_.size(); ++i) {
      if (lacking_[i] != 0) visit(chunk_[i], lacking_[i]);
    }
  }
  // Calls visit(chunk) for chunks of whose round some rank has sent a part, as far as this box
  // knows.
  template <typename Visit>
  void for_each_begun(const Visit& visit) {
    for_each_lacking([&visit](uint32_t chunk, uint64_t) { visit(chunk); });
    for (uint32_t i = 0; i < chunk_.size() && !ended(); ++i) {
      if (receiver_.begun(i)) visit(chunk_[i]);
    }
  }

  // Ends the generation: takes no more packets, and tells all ranks. `why` lives for ever; `rank`
  // is the cause, or ~0 for none.
  void end(const char* why, uint32_t rank = kNone);
  bool ended() const { return receiver_.ended(); }
  const char* why() const { return receiver_.why(); }
  uint32_t why_rank() const { return why_rank_; }

  // The generation's index, from 0.
  uint32_t generation() const { return index_; }
  // The end of the generation was seen while this round was in progress: sets from which round on
  // to begin another.
  void wait_from(uint64_t round);
  uint64_t waits_until() const { return waits_until_; }  // a round
  void wait_until(uint64_t round) { waits_until_ = round; }
  // REQUIRES: it has ended; no chunk of the stream is complete and waits for begin_next().
  void begin_again(uint64_t first_round);

  // Readable when packets have come; -1: the giver of the datagrams wakes the core.
  int fd() const { return datagrams_->fd(); }
  // The latest poll() took all there was.
  bool drained() const { return drained_; }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  void answer(const SwitchHeader& header, const sockaddr_in& to);

  const uint32_t ranks_;
  const uint64_t first_generation_;
  const uint16_t first_slot_;
  const uint32_t rounds_between_;
  uint32_t index_ = 0;
  uint64_t generation_;  // its number
  uint64_t first_round_;
  uint64_t waits_for_;  // rounds
  uint64_t waits_until_ = 0;
  uint32_t why_rank_ = kNone;
  const sockaddr_in to_all_;
  const std::unique_ptr<Datagrams> datagrams_;
  SwitchReceiver receiver_;
  std::vector<uint32_t> number_;  // in the stream, by chunk of the core
  std::vector<uint32_t> chunk_;   // chunks of the core, by number in the stream
  std::vector<uint32_t> closed_;  // chunks of the core; room for all
  uint64_t chunks_ = 0;
  std::vector<uint64_t> lacking_;  // by chunk of the stream, from the latest look
  bool drained_ = false;
};

}  // namespace phub
