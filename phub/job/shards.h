// The boxes that serve under this server (`phub serve --join`), and the mail to and from them.
// Control thread only.
//
// Orders wait here until the shard has said that it received them, and its reports count once, so a
// broken connection loses no message. A shard that sends no mail for a lease is lost, with its
// parts of all jobs. A shard that has sent no mail yet gets no part: perhaps it does not know that
// it has joined.
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
  static constexpr uint32_t kLeaseMs = 10'000;  // the default
  static constexpr size_t kMost = 256;

  explicit Shards(uint32_t lease_ms = kLeaseMs) : lease_ms_(lease_ms) {}
  uint32_t lease_ms() const { return lease_ms_; }

  // Throws Error(kFull).
  ShardWelcome join(ShardHello hello, uint64_t now_ms);
  // Returns the reports that are new. Answers with the orders that the shard has not received: at
  // once if there are some or the shard does not wait. Throws Error: kNotFound, the shard was lost
  // or never there; kInvalid, reports are missing.
  std::vector<ShardReport> mail(uint64_t shard, ShardMail mail, Reply<ShardOrders> reply,
                                uint64_t now_ms);
  // Forgets a shard that has sent nonsense, or leaves. REQUIRES: it is there.
  ShardBox remove(uint64_t shard);
  bool has(uint64_t shard) const { return find(shard) < shards_.size(); }
  // A piece moves between this box and the shard. Returns false if it is not the next one.
  bool goes_on(uint64_t shard, const CopyPlace& place);
  // Does nothing if the shard is lost.
  void send(uint64_t shard, ShardOrder order);
  // Answers shards that have waited long enough, and returns those that were lost since the last
  // call.
  std::vector<ShardBox> tick(uint64_t now_ms);

  std::vector<ShardBox> boxes() const;  // those that have sent mail, in the order of their joins

 private:
  struct Shard {
    ShardBox box;
    uint64_t heard_ms = 0;
    bool serves = false;   // it has sent mail
    uint64_t reports = 0;  // reports that were taken
    uint64_t first = 0;    // number of the first of the orders
    std::optional<CopyPlace> last_piece;
    std::deque<ShardOrder> orders;
    std::optional<Reply<ShardOrders>> waits;
    uint64_t waits_until_ms = 0;
  };
  size_t find(uint64_t shard) const;  // index in shards_; shards_.size(): it is not there
  static void answer(Shard& shard, const Reply<ShardOrders>& reply);
  static void answer_waiting(Shard& shard);

  uint32_t lease_ms_;
  std::deque<Shard> shards_;
};

// Adds a shard's nodes, cores and NICs of this transport behind those in `topology`.
void add_box(numa::Topology& topology, const ShardHello& hello, std::string_view transport,
             uint32_t box);

}  // namespace phub
