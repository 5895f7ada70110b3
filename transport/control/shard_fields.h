// The fields of the messages between a server and its shards (message_fields.h).
#pragma once

#include "transport/control/shard_messages.h"
#include "transport/control/status_fields.h"

namespace phub {

template <>
inline constexpr std::string_view kWords<ShardDo>[] = {
    "make",   "admit",  "reconnect", "revoke", "start", "hold",       "commit",   "probe",
    "detach", "attach", "remove",    "decide", "state", "drop_state", "free_dock"};
template <>
inline constexpr std::string_view kWords<ShardSays>[] = {
    "made",         "offered", "held",   "committed", "probed",      "detached",  "attached",
    "removed",      "snapped", "broken", "violation", "non_finite",  "excluded",  "failed",
    "disconnected", "active",  "leaves", "closed",    "state_there", "got_state", "set_state"};

inline constexpr uint64_t kMaxShardCores = 1u << 12;

template <class A>
void fields(A& a, const ShardNode*) {
  a.required("node", &ShardNode::node);
  a.required("memory_bytes", &ShardNode::memory_bytes);
}
template <class A>
void fields(A& a, const ShardCore*) {
  a.required("node", &ShardCore::node);
  a.required("cpu", &ShardCore::cpu);
}
template <class A>
void fields(A& a, const ShardNic*) {
  a.required("transport", &ShardNic::transport, kWord);
  a.required("name", &ShardNic::name, {1, kMaxNameBytes});
  a.required("node", &ShardNic::node);
}
template <class A>
void fields(A& a, const ShardHello*) {
  a.required("version", &ShardHello::version, {kProtocolVersion, kProtocolVersion});
  a.required("name", &ShardHello::name, {1, kMaxNameBytes});
  a.optional("host", &ShardHello::host);
  a.required("nodes", &ShardHello::nodes, {1, kMaxShardCores});
  a.required("cores", &ShardHello::cores, {1, kMaxShardCores});
  a.required("transports", &ShardHello::transports, {1, kMaxWordBytes});
  a.optional("nics", &ShardHello::nics, {0, kMaxShardCores});
}
template <class A>
void fields(A& a, const ShardWelcome*) {
  a.required("shard", &ShardWelcome::shard);
  a.required("lease_ms", &ShardWelcome::lease_ms, {1, kAny});
}
template <class A>
void fields(A& a, const ShardQueue*) {
  a.required("core", &ShardQueue::core);
  a.required("nic", &ShardQueue::nic, {0, kMaxNameBytes});
}
template <class A>
void fields(A& a, const ShardRestored*) {
  a.required("round", &ShardRestored::round, {0, uint64_t{1} << 62});
  a.required("ranks", &ShardRestored::ranks, {1, 1u << 20});
  a.optional("expected", &ShardRestored::expected, {0, kMaxRanks});
  a.optional("steps", &ShardRestored::steps);
  a.optional("hyper", &ShardRestored::hyper, {0, kMaxScheduleEntries});
  a.optional("moves", &ShardRestored::moves, {0, kMostBranchMoves});
  a.optional("docks", &ShardRestored::docks, {0, kMostBranchMoves});
}
template <class A>
void fields(A& a, const ShardPart*) {
  a.required("spec", &ShardPart::spec);
  a.required("transport", &ShardPart::transport, kWord);
  a.required("cpus", &ShardPart::cpus, {1, kMaxShardCores});
  a.required("queues", &ShardPart::queues, {1, 1u << 16});
  a.required("queue_chunks", &ShardPart::queue_chunks, {1, 1u << 16});
  a.optional("queue_offset", &ShardPart::queue_offset, {0, 1u << 16});
  a.optional("queue_slots", &ShardPart::queue_slots, {0, 1u << 16});
  a.optional("queue_shares", &ShardPart::queue_shares, {0, 1u << 16});
  a.required("first_queue", &ShardPart::first_queue);
  a.required("all_queues", &ShardPart::all_queues);
  a.optional("saved", &ShardPart::saved);
  a.optional("restored", &ShardPart::restored, {0, 1});
}
template <class A>
void fields(A& a, const ShardLost*) {
  a.required("rank", &ShardLost::rank, {0, kMaxRanks - 1});
  a.required("expected_again", &ShardLost::expected_again);
}
template <class A>
void fields(A& a, const ShardAdmitted*) {
  a.required("rank", &ShardAdmitted::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &ShardAdmitted::incarnation);
  a.required("first_round", &ShardAdmitted::first_round);
}
template <class A>
void fields(A& a, const ShardBoundary*) {
  a.required("round", &ShardBoundary::round);
  a.optional("lost", &ShardBoundary::lost, {0, kMaxRanks});
  a.optional("admitted", &ShardBoundary::admitted, {0, kMaxRanks});
  a.optional("forgotten", &ShardBoundary::forgotten, {0, kMaxRanks});
  a.optional("hyper", &ShardBoundary::hyper, {0, kMaxScheduleEntries});
  a.optional("moves", &ShardBoundary::moves, {0, kMostBranchMoves});
  a.required("lowest_round", &ShardBoundary::lowest_round);
  a.optional("snapshot", &ShardBoundary::snapshot);
  a.optional("snapshot_round", &ShardBoundary::snapshot_round);
  a.optional("state", &ShardBoundary::state);
  a.optional("branch", &ShardBoundary::branch);
}
template <class A>
void fields(A& a, const ShardDecision*) {
  a.required("round", &ShardDecision::round);
  a.required("norm", &ShardDecision::norm);
  a.required("factor", &ShardDecision::factor);
  a.optional("skipped", &ShardDecision::skipped);
  a.optional("norms", &ShardDecision::norms);
}
template <class A>
void fields(A& a, const ShardKeys*) {
  a.required("number", &ShardKeys::number, {1, kAny});
  a.optional("set", &ShardKeys::set);
  a.optional("keys", &ShardKeys::keys, {0, kMaxKeys});
}
template <class A>
void fields(A& a, const ShardOrder*) {
  a.required("kind", &ShardOrder::kind);
  a.required("job", &ShardOrder::job);
  a.optional("rank", &ShardOrder::rank, {0, kMaxRanks - 1});
  a.optional("incarnation", &ShardOrder::incarnation);
  a.optional("ticket", &ShardOrder::ticket, kWord);
  a.optional("interest", &ShardOrder::interest, {0, kMaxKeys});
  a.optional("part", &ShardOrder::part, {0, 1});
  a.optional("boundary", &ShardOrder::boundary, {0, 1});
  a.optional("decision", &ShardOrder::decision, {0, 1});
  a.optional("round", &ShardOrder::round);
  a.optional("state", &ShardOrder::state, {0, 1});
  a.optional("number", &ShardOrder::number);
}
template <class A>
void fields(A& a, const ShardLack*) {
  a.required("rank", &ShardLack::rank, {0, kMaxRanks - 1});
  a.required("chunks", &ShardLack::chunks);
  a.required("chunk", &ShardLack::chunk);
  a.required("round", &ShardLack::round);
}
template <class A>
void fields(A& a, const ShardQueueCounters*) {
  a.required("chunks", &ShardQueueCounters::chunks);
  a.required("bytes_in", &ShardQueueCounters::bytes_in);
  a.required("bytes_out", &ShardQueueCounters::bytes_out);
}
template <class A>
void fields(A& a, const ShardProbe*) {
  a.required("chunks_completed", &ShardProbe::chunks_completed);
  a.optional("endpoint", &ShardProbe::endpoint);
  a.required("arrivals", &ShardProbe::arrivals, {1, kMaxRanks});
  a.required("waited_for", &ShardProbe::waited_for, {1, kMaxRanks});
  a.optional("lacks", &ShardProbe::lacks, {0, kMaxRanks});
  a.required("queues", &ShardProbe::queues, {1, 1u << 16});
}
template <class A>
void fields(A& a, const ShardRounds*) {
  a.required("rank", &ShardRounds::rank, {0, kMaxRanks - 1});
  a.required("rounds", &ShardRounds::rounds);
}
template <class A>
void fields(A& a, const ShardReport*) {
  a.required("kind", &ShardReport::kind);
  a.required("job", &ShardReport::job);
  a.optional("core", &ShardReport::core);
  a.optional("rank", &ShardReport::rank);
  a.optional("incarnation", &ShardReport::incarnation);
  a.optional("violation", &ShardReport::violation);
  a.optional("chunk", &ShardReport::chunk);
  a.optional("said", &ShardReport::said);
  a.optional("round", &ShardReport::round);
  a.optional("started", &ShardReport::started);
  a.optional("min_round", &ShardReport::min_round);
  a.optional("lowest", &ShardReport::lowest);
  a.optional("refused", &ShardReport::refused);
  a.optional("code", &ShardReport::code);
  a.optional("text", &ShardReport::text, kReason);
  a.optional("queues", &ShardReport::queues, {0, 1u << 16});
  a.optional("tls", &ShardReport::tls);
  a.optional("probe", &ShardReport::probe, {0, 1});
  a.optional("last_rounds", &ShardReport::last_rounds, {0, kMaxRanks});
  a.optional("squares", &ShardReport::squares);
  a.optional("state", &ShardReport::state);
}
template <class A>
void fields(A& a, const ShardMail*) {
  a.required("received", &ShardMail::received);
  a.optional("first", &ShardMail::first);
  a.optional("reports", &ShardMail::reports, {0, 1u << 16});
  a.optional("wait", &ShardMail::wait);
}
template <class A>
void fields(A& a, const ShardOrders*) {
  a.required("first", &ShardOrders::first);
  a.optional("orders", &ShardOrders::orders, {0, 1u << 16});
}

}  // namespace phub
