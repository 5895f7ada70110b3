// A piece of what a shard has of a checkpoint, or of the state of keys, on its way between the
// shard and its server.
#pragma once

#include <cstddef>
#include <span>

#include "transport/control/shard_messages.h"

namespace phub {

struct ShardPiece {
  CopyPlace place;
  bool to_server = false;
  std::span<std::byte> bytes;  // of the part, which keeps them until it is told what became of this
};

}  // namespace phub
