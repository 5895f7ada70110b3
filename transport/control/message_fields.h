// The fields of every control message, by name: whether they are required or may be left out, and
// the bounds that hold before anything is allocated. The documents of this folder say what each
// field means.
#pragma once

#include "transport/control/branch_messages.h"
#include "transport/control/json_codec.h"
#include "transport/control/loss_messages.h"
#include "transport/control/messages.h"
#include "transport/control/rank_tree.h"
#include "transport/control/state_messages.h"
#include "transport/switch/packet.h"

namespace phub {

template <>
inline constexpr std::string_view kWords<LogRecord::Kind>[] = {
    "admitted", "lost",      "left",      "hyper",  "excluded", "failed", "set",
    "forked",   "scheduled", "discarded", "killed", "revived",  "late"};

template <>
inline constexpr std::string_view kWords<BranchAction>[] = {"list",    "fork", "schedule",
                                                            "discard", "kill", "revive"};

inline constexpr uint64_t kMostBranchesListed = kMaxBranches + 1 + kMostKilledBranches;
inline constexpr uint64_t kMaxWordBytes = 64;      // names of optimizers, formats, hyperparameters
inline constexpr uint64_t kMaxHyperValues = 4096;  // in one change
inline constexpr uint64_t kMaxScheduleEntries = 1u << 16;
inline constexpr json::Bounds kWord{0, kMaxWordBytes};
inline constexpr json::Bounds kFormat{0, 256};  // the longest schedule of formats has less
inline constexpr json::Bounds kReason{0, uint64_t{64} << 10};  // for people: why something ended
inline constexpr json::Bounds kValues{0, kMaxHyperValues};
inline constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();

template <class A>
void fields(A& a, const ExchangedRange*) {
  a.required("end", &ExchangedRange::end, {1, kAny});
  a.required("ranks", &ExchangedRange::ranks, {1, kMaxRanks / 64});
}

template <class A>
void fields(A& a, const KeySpec*) {
  a.required("name", &KeySpec::name, {1, kMaxNameBytes});
  a.required("elements", &KeySpec::elements, {1, kAny});
  a.optional("priority", &KeySpec::priority);
  a.optional("lr_scale", &KeySpec::lr_scale);
  a.optional("decay_scale", &KeySpec::decay_scale);
  a.optional("shape", &KeySpec::shape, {0, kMaxKeyDimensions});
  a.optional("group", &KeySpec::group, {0, kMaxHyperGroups - 1});
  a.optional("fragment", &KeySpec::fragment, {0, kMaxFragments - 1});
  a.optional("format", &KeySpec::format, kFormat);
  a.optional("rank_limit", &KeySpec::rank_limit, {0, kMaxRankLimit});
  a.optional("rows_limit", &KeySpec::rows_limit, {0, kMaxRowsLimit});
  a.optional("lazy", &KeySpec::lazy);
  a.optional("operation", &KeySpec::operation, kWord);
  a.optional("value_type", &KeySpec::value_type, kWord);
  a.optional("tile_rows", &KeySpec::tile_rows);
  a.optional("exchanged_by", &KeySpec::exchanged_by, {0, kMaxExchangedRanges});
}

template <class A>
void fields(A& a, const HyperChange*) {
  a.required("round", &HyperChange::round, {1, kAny});
  a.required("values", &HyperChange::values, kValues);
}

template <class A>
void fields(A& a, const JobSpec*) {
  a.required("name", &JobSpec::name, {1, kMaxNameBytes});
  a.required("keys", &JobSpec::keys, {1, kMaxKeys});
  a.optional("world_size", &JobSpec::world_size, {1, kMaxRanks});
  a.optional("min_ranks", &JobSpec::min_ranks, {0, kMaxRanks});
  a.optional("max_ranks", &JobSpec::max_ranks, {0, kMaxRanks});
  a.optional("quorum", &JobSpec::quorum, {0, kMaxRanks});
  a.optional("grace_ms", &JobSpec::grace_ms);
  a.optional("grace", &JobSpec::grace, kWord);
  a.optional("late_decay", &JobSpec::late_decay);
  a.optional("chunk_elements", &JobSpec::chunk_elements, {1, kAny});
  a.optional("optimizer", &JobSpec::optimizer, kWord);
  a.optional("hyper", &JobSpec::hyper, kValues);
  a.optional("schedule", &JobSpec::schedule, {0, kMaxScheduleEntries});
  a.optional("state_dtype", &JobSpec::state_dtype, kWord);
  a.optional("gradient_dtype", &JobSpec::gradient_dtype, kFormat);
  a.optional("parameter_dtype", &JobSpec::parameter_dtype, kWord);
  a.optional("reduction", &JobSpec::reduction, kWord);
  a.optional("weights", &JobSpec::weights, kWord);
  a.optional("groups", &JobSpec::groups, {0, RankTree::kMaxTextBytes});
  a.optional("rack_ranks", &JobSpec::rack_ranks, {0, kMaxRanks});
  a.optional("mirrors", &JobSpec::mirrors);
  a.optional("rank_hosts", &JobSpec::rank_hosts, {0, kMaxRanks});
  a.optional("work", &JobSpec::work, kWord);
  a.optional("consistency", &JobSpec::consistency, kWord);
  a.optional("slack", &JobSpec::slack);
  a.optional("initial", &JobSpec::initial, kWord);
  a.optional("on_loss", &JobSpec::on_loss, kWord);
  a.optional("on_nonfinite", &JobSpec::on_nonfinite, kWord);
  a.optional("unused", &JobSpec::unused, kWord);
  a.optional("branches", &JobSpec::branches, {0, kMaxBranches});
  a.optional("rounding", &JobSpec::rounding, kWord);
  a.optional("saved", &JobSpec::saved, kWord);
  a.optional("lease_ms", &JobSpec::lease_ms);
  a.optional("progress_limit_ms", &JobSpec::progress_limit_ms);
  a.optional("wait_limit_ms", &JobSpec::wait_limit_ms);
  a.optional("join_limit_ms", &JobSpec::join_limit_ms);
}

template <class A>
void fields(A& a, const ElementRange*) {
  a.required("begin", &ElementRange::begin, {0, kMaxElements});
  a.required("end", &ElementRange::end, {1, kMaxElements});
}

template <class A>
void fields(A& a, const KeyInterest*) {
  a.required("key", &KeyInterest::key, {1, kMaxNameBytes});
  a.optional("writes", &KeyInterest::writes, {0, kMaxInterestRanges});
  a.optional("reads", &KeyInterest::reads, {0, kMaxInterestRanges});
}

template <class A>
void fields(A& a, const JoinRequest*) {
  a.required("version", &JoinRequest::version, {kProtocolVersion, kProtocolVersion});
  a.required("spec", &JoinRequest::spec);
  a.optional("rank", &JoinRequest::rank);
  a.optional("replace", &JoinRequest::replace);
  a.optional("transport", &JoinRequest::transport, kWord);
  a.optional("id", &JoinRequest::id, kWord);
  a.optional("epoch", &JoinRequest::epoch);
  a.optional("incarnation", &JoinRequest::incarnation);
  a.optional("owner", &JoinRequest::owner, {0, 64});
  a.optional("saves", &JoinRequest::saves);
  a.optional("interest", &JoinRequest::interest, {0, kMaxKeys});
}

template <class A>
void fields(A& a, const QueueOffer*) {
  a.required("address", &QueueOffer::address, {1, kMaxNameBytes});
  a.optional("base", &QueueOffer::base);
  a.optional("key", &QueueOffer::key);
  a.optional("provider", &QueueOffer::provider, {0, kMaxNameBytes});
  a.optional("near", &QueueOffer::near, {0, kMaxNameBytes});
  a.optional("same_nic", &QueueOffer::same_nic, {0, kMaxOfferedAddresses});
  a.optional("other_nics", &QueueOffer::other_nics, {0, kMaxOfferedAddresses});
}

template <class A>
void fields(A& a, const Offer*) {
  a.required("transport", &Offer::transport, kWord);
  a.required("address", &Offer::address);
  a.required("ticket", &Offer::ticket, {1, kMaxNameBytes});
  a.optional("queues", &Offer::queues, {0, 1u << 16});
  a.optional("tls", &Offer::tls);
}

template <class A>
void fields(A& a, const JobLayout*) {
  a.required("key_offset", &JobLayout::key_offset, {0, kMaxKeys});
  a.required("queue_chunks", &JobLayout::queue_chunks, {0, 1u << 16});
  a.required("total_elements", &JobLayout::total_elements);
  a.optional("queue_offset", &JobLayout::queue_offset, {0, 1u << 16});
  a.optional("queue_slots", &JobLayout::queue_slots, {0, 1u << 16});
  a.optional("queue_shares", &JobLayout::queue_shares, {0, 1u << 16});
}

template <class A>
void fields(A& a, const RankPart*) {
  a.required("rank", &RankPart::rank, {0, kMaxRanks - 1});
  a.required("bytes", &RankPart::bytes, {1, kMaxElements * sizeof(float)});
}

template <class A>
void fields(A& a, const SwitchStream*) {
  a.required("address", &SwitchStream::address, {1, kMaxNameBytes});
  a.optional("first_slot", &SwitchStream::first_slot, {0, kMostSwitchSlots - 1});
  a.required("slots", &SwitchStream::slots, {1, kMostSwitchSlots});
  a.required("queues", &SwitchStream::queues, {1, 1u << 16});
}

template <class A>
void fields(A& a, const SwitchOffer*) {
  a.required("generation", &SwitchOffer::generation, {1, ~uint64_t{0}});
  a.required("workers", &SwitchOffer::workers, {1, kSwitchWorkers});
  a.required("port", &SwitchOffer::port, {0, 65535});
  a.required("streams", &SwitchOffer::streams, {1, 1u << 16});
  a.optional("later", &SwitchOffer::later);
}

template <class A>
void fields(A& a, const JoinReply*) {
  a.required("rank", &JoinReply::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &JoinReply::incarnation);
  a.required("first_round", &JoinReply::first_round);
  a.optional("send_initial", &JoinReply::send_initial);
  a.required("offer", &JoinReply::offer);
  a.required("layout", &JoinReply::layout);
  a.required("spec", &JoinReply::spec);
  a.optional("job_token", &JoinReply::job_token, {0, kMaxNameBytes});
  a.optional("epoch", &JoinReply::epoch);
  a.optional("save_every", &JoinReply::save_every);
  a.optional("parts", &JoinReply::parts, {0, kMaxRanks});
  a.optional("through_switch", &JoinReply::through_switch);
  a.optional("interest", &JoinReply::interest, {0, kMaxKeys});
}

// Job and ticket of a credential travel outside of the body.
template <class A>
void fields(A& a, const Credential*) {
  a.required("rank", &Credential::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &Credential::incarnation);
  a.optional("epoch", &Credential::epoch);
}

template <class A>
void fields(A& a, const SaverStay*) {
  a.required("rank", &SaverStay::rank, {0, kMaxRanks - 1});
  a.required("first", &SaverStay::first);
  a.optional("last", &SaverStay::last);
  a.optional("unknown", &SaverStay::unknown);
}

template <class A>
void fields(A& a, const RackNews*) {
  a.required("rank", &RackNews::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &RackNews::incarnation);
  a.optional("epoch", &RackNews::epoch);
  a.optional("name", &RackNews::name, {0, kMaxNameBytes});
  a.optional("live", &RackNews::live, {0, kMaxRanks});
  a.optional("number", &RackNews::number);
  a.optional("incarnations", &RackNews::incarnations, {0, kMaxRanks});
  a.optional("failure", &RackNews::failure, kReason);
  a.optional("saves", &RackNews::saves);
  a.optional("known_round", &RackNews::known_round);
  a.optional("savers", &RackNews::savers, {0, kMostSaverStays});
}

template <class A>
void fields(A& a, const Pulse*) {
  a.required("completed_round", &Pulse::completed_round);
  a.optional("durable_round", &Pulse::durable_round);
  a.optional("missing", &Pulse::missing, {0, kMaxRanks});
  a.optional("assembling", &Pulse::assembling);
  a.optional("standby_lost", &Pulse::standby_lost);
}

template <class A>
void fields(A& a, const ChunkRange*) {
  a.required("first", &ChunkRange::first);
  a.required("last", &ChunkRange::last);
  a.required("round", &ChunkRange::round);
}

template <class A>
void fields(A& a, const HyperReply*) {
  a.required("round", &HyperReply::round);
}

template <class A>
void fields(A& a, const ChunkSpan*) {
  a.required("first", &ChunkSpan::first);
  a.required("last", &ChunkSpan::last);
}

template <class A>
void fields(A& a, const LogRecord*) {
  a.required("kind", &LogRecord::kind);
  a.optional("round", &LogRecord::round);
  a.required("rank", &LogRecord::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &LogRecord::incarnation);
  a.optional("reason", &LogRecord::reason, kReason);
  a.optional("last_rounds", &LogRecord::last_rounds);
  a.optional("last_round", &LogRecord::last_round);
  a.optional("chunks", &LogRecord::chunks);
  a.optional("values", &LogRecord::values, kValues);
  a.optional("branch", &LogRecord::branch);
  a.optional("parent", &LogRecord::parent);
  a.optional("fragment", &LogRecord::fragment);
}

template <class A>
void fields(A& a, const LogPage*) {
  a.optional("first", &LogPage::first);
  a.optional("more", &LogPage::more);
  a.required("records", &LogPage::records);
}

template <class A>
void fields(A& a, const BranchStatus*) {
  a.required("branch", &BranchStatus::branch);
  a.optional("parent", &BranchStatus::parent);
  a.optional("round", &BranchStatus::round);
  a.optional("rounds", &BranchStatus::rounds);
  a.optional("runs", &BranchStatus::runs);
  a.optional("killed", &BranchStatus::killed);
  a.optional("on_disk", &BranchStatus::on_disk);
  a.optional("batch", &BranchStatus::batch);
  a.optional("values", &BranchStatus::values, kValues);
}

template <class A>
void fields(A& a, const HyperRequest*) {
  a.required("rank", &HyperRequest::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &HyperRequest::incarnation);
  a.optional("round", &HyperRequest::round);
  a.required("values", &HyperRequest::values, {1, kMaxHyperValues});
  a.optional("epoch", &HyperRequest::epoch);
}

template <class A>
void fields(A& a, const Remark*) {
  a.required("subject", &Remark::subject, {1, kMaxWordBytes});
  a.required("text", &Remark::text, {0, kMaxRemarkBytes});
}
template <class A>
void fields(A& a, const RemarkRequest*) {
  a.required("rank", &RemarkRequest::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &RemarkRequest::incarnation);
  a.optional("epoch", &RemarkRequest::epoch);
  a.required("remark", &RemarkRequest::remark);
}

template <class A>
void fields(A& a, const BranchTurn*) {
  a.required("branch", &BranchTurn::branch);
  a.optional("rounds", &BranchTurn::rounds);
}
template <class A>
void fields(A& a, const BranchRequest*) {
  a.required("rank", &BranchRequest::rank, {0, kMaxRanks - 1});
  a.required("incarnation", &BranchRequest::incarnation);
  a.optional("epoch", &BranchRequest::epoch);
  a.required("action", &BranchRequest::action);
  a.optional("round", &BranchRequest::round);
  a.optional("branch", &BranchRequest::branch);
  a.optional("values", &BranchRequest::values, kValues);
  a.optional("turns", &BranchRequest::turns, {0, kMostBranchTurns});
}
template <class A>
void fields(A& a, const BranchMove*) {
  a.required("round", &BranchMove::round, {1, uint64_t{1} << 62});
  a.optional("copies", &BranchMove::copies);
  a.optional("from", &BranchMove::from, {0, 2 * kMaxBranches});
  a.required("to", &BranchMove::to, {1, kMaxBranches});
  a.optional("child", &BranchMove::child);
}
template <class A>
void fields(A& a, const BranchRun*) {
  a.required("round", &BranchRun::round);
  a.required("branch", &BranchRun::branch);
}
template <class A>
void fields(A& a, const BranchFork*) {
  a.required("round", &BranchFork::round);
  a.required("branch", &BranchFork::branch);
  a.required("parent", &BranchFork::parent);
}
template <class A>
void fields(A& a, const BranchGone*) {
  a.required("branch", &BranchGone::branch);
  a.optional("values", &BranchGone::values, kValues);
}
template <class A>
void fields(A& a, const BatchRun*) {
  a.required("round", &BatchRun::round);
  a.required("batch", &BatchRun::batch);
}
template <class A>
void fields(A& a, const BranchReply*) {
  a.optional("round", &BranchReply::round);
  a.optional("branch", &BranchReply::branch);
  a.required("branches", &BranchReply::branches, {0, kMostBranchesListed});
  a.required("runs", &BranchReply::runs, {0, kMostBranchRuns + 1});
  a.optional("forks", &BranchReply::forks, {0, kMostBranchForks});
  a.optional("batches", &BranchReply::batches, {0, kMostBatchRuns});
  a.optional("gone", &BranchReply::gone, {0, kMostBranchRuns + 1});
}

template <class A>
void fields(A& a, const Problem*) {
  a.required("type", &Problem::type, {0, kMaxNameBytes});
  a.required("title", &Problem::title, kWord);
  a.required("status", &Problem::status, {100, 599});
  a.required("detail", &Problem::detail, {0, 1u << 16});
  a.required("code", &Problem::code);
}

}  // namespace phub
