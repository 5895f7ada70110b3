// The boxes that serve under this server (`phub serve --join`): who is there, and the mail to and
// from them. Control thread only.
//
// Orders wait here until the shard has said that it received them, its reports count once, so a
// connection that breaks loses nothing. A shard that sends no mail for a lease is lost, with what
// it has of every job. One that has sent none yet gets no part: perhaps it does not know that it
// has joined.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "numa/topology.h"
#include "transport/control/shard_messages.h"

namespace phub {

struct ShardBox {
  uint64_t id = 0;
  ShardHello about;
};

class Shards {
 public:
  static constexpr uint32_t kLeaseMs = 10'000;  // if not said otherwise
  static constexpr size_t kMost = 256;

  explicit Shards(uint32_t lease_ms = kLeaseMs) : lease_ms_(lease_ms) {}
  uint32_t lease_ms() const { return lease_ms_; }

  // Throws Error(kFull).
  ShardWelcome join(ShardHello hello, uint64_t now_ms);
  // Returns the reports that are new. Answers with the orders that the shard has not received: at
  // once if there are some or it does not wait. Throws Error: kNotFound, it was lost, or never
  // there; kInvalid, reports are missing.
  std::vector<ShardReport> mail(uint64_t shard, ShardMail mail, Reply<ShardOrders> reply,
                                uint64_t now_ms);
  // It has sent nonsense, or leaves: from now on it is not known. REQUIRES: it is there.
  ShardBox remove(uint64_t shard);
  bool has(uint64_t shard) const { return find(shard) < shards_.size(); }
  // A piece moves between here and the shard. False: not the next one.
  bool goes_on(uint64_t shard, const CopyPlace& place);
  // Nothing happens if it is lost.
  void send(uint64_t shard, ShardOrder order);
  // Answers those that have waited long enough, and returns those that are lost since.
  std::vector<ShardBox> tick(uint64_t now_ms);

  std::vector<ShardBox> boxes() const;  // that have sent mail, in the order in which they joined

 private:
  struct Shard {
    ShardBox box;
    uint64_t heard_ms = 0;
    bool serves = false;   // it has sent mail
    uint64_t reports = 0;  // that were taken
    uint64_t first = 0;    // number of the first of the orders
    std::optional<CopyPlace> last_piece;
    std::deque<ShardOrder> orders;
    std::optional<Reply<ShardOrders>> waits;
    uint64_t waits_until_ms = 0;
  };
  size_t find(uint64_t shard) const;  // among shards_; their number: it is not there
  static void answer(Shard& shard, const Reply<ShardOrders>& reply);
  static void answer_waiting(Shard& shard);

  uint32_t lease_ms_;
  std::deque<Shard> shards_;
};

// The nodes, cores and NICs of this transport that a shard has, behind those that are there.
void add_box(numa::Topology& topology, const ShardHello& hello, std::string_view transport,
             uint32_t box);

}  // namespace phub
