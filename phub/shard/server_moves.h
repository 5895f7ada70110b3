// What moves, piece by piece, between a shard's part of a job and the server: the part's share of a
// checkpoint, of the state of keys, or of a branch that comes from files. The other side is
// phub/job/box_moves.h. Control thread.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <optional>

#include "phub/job/saved_image.h"
#include "phub/shard/shard_piece.h"
#include "transport/control/shard_messages.h"
#include "transport/error.h"

namespace phub {

class ServerMoves {
 public:
  using Done = std::function<void(const std::optional<Error>& failed)>;

  // Moves the image, and calls `done` once: at once, if it is empty. `what`: the job, and a round
  // or the number of a state. The image's memory lives until then, or until drop() returns false.
  void begin(const CopyPlace& what, bool to_server, SavedImage image, Done done);
  // Nobody wants the rest of that state. True: a piece is under way, and `done` is called when it
  // has arrived.
  bool drop(uint64_t state);
  // Nobody wants anything any more, and no `done` is called.
  void drop_all();
  bool is_busy() const;  // a piece is under way

  // The next piece of a state, or of what is none; nullopt: all of them wait, or there is none.
  std::optional<ShardPiece> next(bool of_state);
  // What became of a piece that next() returned.
  void moved(const ShardPiece& piece, const std::optional<Error>& failed);

 private:
  struct Move {
    CopyPlace place;  // of the next piece
    bool to_server = false;
    SavedImage image;
    Done done;
    bool is_busy = false;  // a piece is under way
    bool is_over = false;  // nobody wants the rest
  };
  std::list<Move> moves_;
};

}  // namespace phub
