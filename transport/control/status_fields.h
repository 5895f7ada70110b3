// The fields of what a server says of itself, its jobs, ranks, cores and NICs, as in
// message_fields.h.
#pragma once

#include "transport/control/message_fields.h"

namespace phub {

template <class A>
void fields(A& a, const RankStatus*) {
  a.required("rank", &RankStatus::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &RankStatus::incarnation);
  a.required("state", &RankStatus::state, kWord);
  a.required("first_round", &RankStatus::first_round);
  a.optional("reason", &RankStatus::reason, kReason);
  a.optional("contributions", &RankStatus::contributions);
  a.optional("lease_age_s", &RankStatus::lease_age_s);
  a.optional("waited_s", &RankStatus::waited_s);
  a.optional("waited_chunks", &RankStatus::waited_chunks);
  a.optional("waited_round", &RankStatus::waited_round);
  a.optional("late", &RankStatus::late);
  a.optional("waited_key", &RankStatus::waited_key, {0, kMaxNameBytes});
  a.optional("rack", &RankStatus::rack, {0, kMaxNameBytes});
  a.optional("rack_live", &RankStatus::rack_live, {0, kMaxRanks});
}

template <class A>
void fields(A& a, const Flow*) {
  a.optional("chunks", &Flow::chunks);
  a.optional("bytes_in", &Flow::bytes_in);
  a.optional("bytes_out", &Flow::bytes_out);
  a.optional("chunks_per_s", &Flow::chunks_per_s);
  a.optional("bytes_in_per_s", &Flow::bytes_in_per_s);
  a.optional("bytes_out_per_s", &Flow::bytes_out_per_s);
}

template <class A>
void fields(A& a, const EndpointCounters*) {
  a.optional("sends", &EndpointCounters::sends);
  a.optional("receives", &EndpointCounters::receives);
  a.optional("doorbells", &EndpointCounters::doorbells);
  a.optional("polls", &EndpointCounters::polls);
  a.optional("empty_polls", &EndpointCounters::empty_polls);
  a.optional("system_calls", &EndpointCounters::system_calls);
  a.optional("wakeups", &EndpointCounters::wakeups);
}

template <class A>
void fields(A& a, const QueueStatus*) {
  a.required("queue", &QueueStatus::queue);
  a.required("nic", &QueueStatus::nic, {0, kMaxNameBytes});
  a.optional("flow", &QueueStatus::flow);
}

template <class A>
void fields(A& a, const JobCoreStatus*) {
  a.required("core", &JobCoreStatus::core);
  a.optional("box", &JobCoreStatus::box);
  a.optional("counters", &JobCoreStatus::counters);
  a.optional("queues", &JobCoreStatus::queues, {0, 1u << 16});
}

template <class A>
void fields(A& a, const CoreStatus*) {
  a.required("core", &CoreStatus::core);
  a.required("cpu", &CoreStatus::cpu);
  a.optional("busy_passes", &CoreStatus::busy_passes);
  a.optional("idle_passes", &CoreStatus::idle_passes);
  a.optional("sleeps", &CoreStatus::sleeps);
  a.optional("asleep_s", &CoreStatus::asleep_s);
  a.optional("awake", &CoreStatus::awake);
  a.optional("flow", &CoreStatus::flow);
}

template <class A>
void fields(A& a, const NicStatus*) {
  a.required("name", &NicStatus::name, {0, kMaxNameBytes});
  a.required("transport", &NicStatus::transport, kWord);
  a.optional("budget_bytes_per_s", &NicStatus::budget_bytes_per_s);
  a.optional("flow", &NicStatus::flow);
}

template <class A>
void fields(A& a, const NodeStatus*) {
  a.required("node", &NodeStatus::node);
  a.optional("memory_bytes", &NodeStatus::memory_bytes);
  a.optional("cores", &NodeStatus::cores, {0, 1u << 16});
  a.optional("nics", &NodeStatus::nics, {0, 1u << 16});
}

template <class A>
void fields(A& a, const JobStatus*) {
  a.required("name", &JobStatus::name, {1, kMaxNameBytes});
  a.required("state", &JobStatus::state, kWord);
  a.optional("error", &JobStatus::error, kReason);
  a.required("optimizer", &JobStatus::optimizer, kWord);
  a.required("keys", &JobStatus::keys);
  a.required("chunks", &JobStatus::chunks);
  a.required("elements", &JobStatus::elements);
  a.required("memory_bytes", &JobStatus::memory_bytes);
  a.optional("window_bytes", &JobStatus::window_bytes);
  a.optional("window_grown_bytes", &JobStatus::window_grown_bytes);
  a.optional("window_growths", &JobStatus::window_growths);
  a.required("completed_round", &JobStatus::completed_round);
  a.optional("durable_round", &JobStatus::durable_round);
  a.optional("next_saved_round", &JobStatus::next_saved_round);
  a.optional("void_snapshots", &JobStatus::void_snapshots);
  a.optional("failed_saves", &JobStatus::failed_saves);
  a.required("rounds_per_s", &JobStatus::rounds_per_s);
  a.optional("chunks_completed", &JobStatus::chunks_completed);
  a.optional("switch_chunks", &JobStatus::switch_chunks);
  a.optional("switch_ended", &JobStatus::switch_ended, kReason);
  a.optional("transport", &JobStatus::transport, kWord);
  a.optional("counters", &JobStatus::counters);
  a.optional("flow", &JobStatus::flow);
  a.optional("cores", &JobStatus::cores, {0, 1u << 16});
  a.optional("max_ranks", &JobStatus::max_ranks, {0, kMaxRanks});
  a.required("ranks", &JobStatus::ranks, {0, kMaxRanks});
  a.optional("missing", &JobStatus::missing, {0, kMaxRanks});
  a.optional("standby", &JobStatus::standby, kReason);
  a.optional("waiting_for", &JobStatus::waiting_for, {0, kMaxRanks});
  a.optional("branches", &JobStatus::branches, {0, kMostBranchesListed});
  a.optional("remarks", &JobStatus::remarks, {0, kMostRemarks});
  a.optional("losses", &JobStatus::losses, {0, kMostLossNames});
}

template <class A>
void fields(A& a, const ShardStatus*) {
  a.required("name", &ShardStatus::name, {1, kMaxNameBytes});
  a.required("cores", &ShardStatus::cores);
}

template <class A>
void fields(A& a, const ServerStatus*) {
  a.required("version", &ServerStatus::version, {kProtocolVersion, kProtocolVersion});
  a.required("topology", &ServerStatus::topology);
  a.required("transports", &ServerStatus::transports, {0, kMaxWordBytes});
  a.optional("nics", &ServerStatus::nics, {0, kMaxWordBytes});
  a.required("cores", &ServerStatus::cores);
  a.required("memory_bytes", &ServerStatus::memory_bytes);
  a.required("memory_limit_bytes", &ServerStatus::memory_limit_bytes);
  a.required("uptime_s", &ServerStatus::uptime_s);
  a.optional("nodes", &ServerStatus::nodes, {0, 1u << 16});
  a.optional("shards", &ServerStatus::shards, {0, 1u << 12});
  a.optional("parent", &ServerStatus::parent, {0, kMaxNameBytes});
  a.optional("parent_budget_bytes_per_s", &ServerStatus::parent_budget_bytes_per_s);
  a.required("jobs", &ServerStatus::jobs);
}

}  // namespace phub
