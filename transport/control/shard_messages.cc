#include "transport/control/shard_messages.h"

#include "transport/control/shard_fields.h"

namespace phub {

std::string to_json(const ShardHello& hello) { return json::encode(hello); }
ShardHello parse_shard_hello(std::string_view text) {
  auto hello = json::decode<ShardHello>(text, "shard");
  for (const ShardCore& core : hello.cores) {
    if (core.node >= hello.nodes.size()) {
      fail(ErrorCode::kInvalid, "shard: CPU {} is on node {} of {}", core.cpu, core.node,
           hello.nodes.size());
    }
  }
  for (const ShardNic& nic : hello.nics) {
    if (nic.node >= hello.nodes.size()) {
      fail(ErrorCode::kInvalid, "shard: a NIC is on node {} of {}", nic.node, hello.nodes.size());
    }
  }
  return hello;
}
std::string to_json(const ShardWelcome& welcome) { return json::encode(welcome); }
ShardWelcome parse_shard_welcome(std::string_view text) {
  return json::decode<ShardWelcome>(text, "answer to shard");
}
std::string to_json(const ShardMail& mail) { return json::encode(mail); }
ShardMail parse_shard_mail(std::string_view text) { return json::decode<ShardMail>(text, "mail"); }
std::string to_json(const ShardOrders& orders) { return json::encode(orders); }
ShardOrders parse_shard_orders(std::string_view text) {
  return json::decode<ShardOrders>(text, "answer to mail");
}

}  // namespace phub
