// What boxes that serve under a server ask of it, as the control port sees it.
#pragma once

#include <cstdint>
#include <string_view>

#include "transport/control/shard_messages.h"

namespace phub {

// Control thread only. A call may reply before it returns, or later. An Error that it throws
// instead is the reply.
class ShardCalls {
 public:
  virtual ~ShardCalls() = default;
  // A box comes to serve under this server; then its mail (transport/control/shard_messages.h).
  virtual void join(ShardHello hello, Reply<ShardWelcome> reply) = 0;
  virtual void take_mail(uint64_t shard, ShardMail mail, Reply<ShardOrders> reply) = 0;
  // A piece of a shard's part of a job's checkpoint of that round: the job goes on from it, or it
  // is to be written; or of the state of keys that a rank sets, or reads. As with a rank's part,
  // one that comes is checked before its bytes are read.
  virtual void read_copy(uint64_t shard, const CopyPlace& place, Reply<PartBytes> reply) = 0;
  virtual void check_copy(uint64_t shard, const CopyPlace& place, uint64_t bytes) = 0;
  virtual void write_copy(uint64_t shard, const CopyPlace& place, std::string_view piece,
                          Reply<Done> reply) = 0;
};

}  // namespace phub
