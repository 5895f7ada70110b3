#include "phub/job/shards.h"

#include <algorithm>
#include <random>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

// In one answer; an order that is larger by itself comes alone.
constexpr size_t kMostOrders = 4096;
constexpr uint64_t kMostInterestBytes = 8 << 20;

// About the size of the interest as JSON; the rest of an order is small beside it.
uint64_t interest_bytes(const ShardOrder& order) {
  constexpr uint64_t kBytesOfKey = 64, kBytesOfRange = 48;
  uint64_t bytes = 0;
  for (const KeyInterest& key : order.interest) {
    bytes += kBytesOfKey + key.key.size() + kBytesOfRange * (key.writes.size() + key.reads.size());
  }
  return bytes;
}

uint64_t random_id() {
  std::random_device source;
  return (uint64_t{source()} << 32 | source()) >> 12;  // as JSON's readers take it
}

}  // namespace

ShardWelcome Shards::join(ShardHello hello, uint64_t now_ms) {
  if (shards_.size() >= kMost) {
    fail(ErrorCode::kFull, "{} boxes serve under this server, which is the limit", kMost);
  }
  Shard& shard = shards_.emplace_back();
  shard.box = {.id = random_id(), .about = std::move(hello)};
  shard.heard_ms = now_ms;
  return {.shard = shard.box.id, .lease_ms = lease_ms_};
}

size_t Shards::find(uint64_t id) const {
  const auto at = std::ranges::find(shards_, id, [](const Shard& shard) { return shard.box.id; });
  return static_cast<size_t>(at - shards_.begin());
}

void Shards::answer(Shard& shard, const Reply<ShardOrders>& reply) {
  ShardOrders answer{.first = shard.first, .orders = {}};
  uint64_t bytes = 0;
  for (const ShardOrder& order : shard.orders) {
    bytes += interest_bytes(order);
    const bool is_full = answer.orders.size() == kMostOrders || bytes > kMostInterestBytes;
    if (is_full && !answer.orders.empty()) break;
    answer.orders.push_back(order);
  }
  reply(std::move(answer));
}

void Shards::answer_waiting(Shard& shard) {
  if (!shard.waits) return;
  const Reply<ShardOrders> reply = std::move(*shard.waits);
  shard.waits.reset();
  answer(shard, reply);
}

std::vector<ShardReport> Shards::mail(uint64_t id, ShardMail mail, Reply<ShardOrders> reply,
                                      uint64_t now_ms) {
  const size_t at = find(id);
  if (at == shards_.size()) {
    fail(ErrorCode::kNotFound, "this server does not know the shard {}: join again", id);
  }
  Shard& shard = shards_[at];
  if (mail.first > shard.reports || mail.received > shard.first + shard.orders.size()) {
    fail(ErrorCode::kInvalid,
         "mail: reports from number {} on, orders up to {}; this server has {} reports and gave {} "
         "orders",
         mail.first, mail.received, shard.reports, shard.first + shard.orders.size());
  }
  shard.heard_ms = now_ms;
  shard.serves = true;
  for (; shard.first < mail.received; ++shard.first) shard.orders.pop_front();
  const size_t known = std::min<uint64_t>(shard.reports - mail.first, mail.reports.size());
  mail.reports.erase(mail.reports.begin(), mail.reports.begin() + static_cast<ptrdiff_t>(known));
  shard.reports += mail.reports.size();
  if (mail.wait) {
    answer_waiting(shard);  // its connection broke
    shard.waits = std::move(reply);
    shard.waits_until_ms = now_ms + lease_ms_ / 3;
    if (!shard.orders.empty()) answer_waiting(shard);
  } else {
    reply(ShardOrders{.first = shard.first});
  }
  return std::move(mail.reports);
}

ShardBox Shards::remove(uint64_t id) {
  const size_t at = find(id);
  PHUB_CHECK(at < shards_.size());
  ShardBox box = std::move(shards_[at].box);
  shards_.erase(shards_.begin() + static_cast<ptrdiff_t>(at));
  return box;
}

bool Shards::goes_on(uint64_t id, const CopyPlace& place) {
  const size_t at = find(id);
  if (at == shards_.size()) return false;
  std::optional<CopyPlace>& last = shards_[at].last_piece;
  const bool is_same =
      last && last->job == place.job && last->state == place.state && last->round == place.round;
  if (is_same && place.offset <= last->offset) return false;
  last = place;
  return true;
}

void Shards::send(uint64_t id, ShardOrder order) {
  const size_t at = find(id);
  if (at == shards_.size()) return;
  shards_[at].orders.push_back(std::move(order));
  answer_waiting(shards_[at]);
}

std::vector<ShardBox> Shards::tick(uint64_t now_ms) {
  std::vector<ShardBox> lost;
  std::erase_if(shards_, [&](Shard& shard) {
    if (shard.waits && now_ms >= shard.waits_until_ms) answer_waiting(shard);
    if (shard.waits || now_ms <= shard.heard_ms + lease_ms_) return false;
    if (shard.serves) lost.push_back(shard.box);
    return true;
  });
  return lost;
}

std::vector<ShardBox> Shards::boxes() const {
  std::vector<ShardBox> boxes;
  for (const Shard& shard : shards_) {
    if (shard.serves) boxes.push_back(shard.box);
  }
  return boxes;
}

void add_box(numa::Topology& topology, const ShardHello& hello, std::string_view transport,
             uint32_t box) {
  const auto first = static_cast<uint32_t>(topology.nodes.size());
  for (const ShardNode& node : hello.nodes) {
    topology.nodes.push_back({node.node, node.memory_bytes, box, hello.host});
  }
  for (const ShardCore& core : hello.cores) {
    topology.cores.push_back({first + core.node, core.cpu});
  }
  for (const ShardNic& nic : hello.nics) {
    if (nic.transport == transport) topology.nics.push_back({first + nic.node, nic.name});
  }
}

}  // namespace phub
