// Moves of state, piece by piece, between this box and the other boxes that have parts of its jobs:
// their parts of a checkpoint, of the state of keys, or of a branch that comes from files
// (transport/control/shard_messages.h). A desk of the job begins a move and ends it. The other box
// asks for one piece after the other, and asks again if it has heard no answer.
//
// Control thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "phub/job/saved_image.h"
#include "transport/control/shard_messages.h"

namespace phub {

class BoxMoves {
 public:
  enum class Direction : uint8_t {
    kSend,     // to the box, which reads the image
    kReceive,  // from the box, which writes it
  };
  // A new number, by which other boxes know the state of keys, or the branch, that moves between
  // boxes.
  uint64_t new_number() { return ++numbers_; }
  // `box` is its index in the plan, from 1 on. `what` has a round, or the number of a state; its
  // offset and job do not count. The image's memory lives until end().
  void begin(uint32_t box, Direction direction, const CopyPlace& what, SavedImage image);
  void end(const CopyPlace& what);  // ends the moves of all boxes
  // The box has written all of it.
  bool is_here(uint32_t box, const CopyPlace& what) const;

  // These throw Error(kInvalid) if that piece does not move now.
  PartBytes read(uint32_t box, const CopyPlace& place) const;
  void check(uint32_t box, const CopyPlace& place, uint64_t bytes) const;
  // A piece that comes twice is copied once: a reader may be at work on the copy.
  void write(uint32_t box, const CopyPlace& place, std::string_view piece);

 private:
  struct Move {
    uint32_t box = 0;
    Direction direction = Direction::kSend;
    CopyPlace what;
    SavedImage image;
    uint64_t here = 0;  // kReceive: bytes that have come
  };
  const Move* find(uint32_t box, Direction direction, const CopyPlace& what) const;

  std::vector<Move> moves_;
  uint64_t numbers_ = 0;  // the latest of new_number()
};

}  // namespace phub
