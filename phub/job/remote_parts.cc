#include "phub/job/remote_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

#include "phub/job/shard_words.h"
#include "transport/control/shard_fields.h"

namespace phub {
namespace {

// The time to make memory for `copies` copies of a part's elements.
uint64_t make_ms(const Plan& plan, uint64_t copies) {
  constexpr uint64_t kBytesPerMs = 256 * 1024;
  uint64_t elements = 0;  // those of all boxes, an upper bound for each of them
  for (const ChunkLayout& chunk : plan.chunks) elements += chunk.elements;
  return RemoteParts::kMakeMs + elements * sizeof(float) * copies / kBytesPerMs;
}

}  // namespace

RemoteParts::RemoteParts(Shards& shards, uint64_t job, const Plan& plan,
                         std::vector<ShardBox> boxes)
    : shards_(shards), job_(job), plan_(plan) {
  for (uint32_t i = 0; i < boxes.size(); ++i) parts_.emplace_back(plan, i + 1, boxes[i]);
}

BoxQuestion RemoteParts::ask(Offer* offer, Done done, uint64_t limit_ms) {
  if (offer != nullptr) offer->queues.resize(plan_.queues.size());
  return {parts_, offer, std::move(done), limit_ms};
}

void RemoteParts::order(ShardOrder order) {
  order.job = job_;
  for (const RemoteBox& part : parts_) shards_.send(part.shard, order);
}

void RemoteParts::make(const ShardPart& like, Done done) {
  for (const RemoteBox& part : parts_) {  // one may be lost since the job was begun
    if (shards_.has(part.shard)) continue;
    return done(Error(ErrorCode::kUnavailable, fmt::format("{}: {}", part.name, kServesNoMore)));
  }
  constexpr uint64_t kOfBox = 8;  // parameters, sums, results, state, a snapshot
  making_ = ask(nullptr, std::move(done), make_ms(plan_, like.spec.max_ranks + kOfBox));
  for (const RemoteBox& part : parts_) {
    const Plan plan = part_of(plan_, part.box);
    ShardPart made = like;
    made.queue_chunks = plan.queue_chunks;
    made.queue_offset = plan.queue_offset;
    made.queue_slots = plan.queue_slots;
    made.queue_shares = plan.queue_shares;
    made.first_queue = part.first_queue;
    made.all_queues = static_cast<uint32_t>(plan_.queues.size());
    for (const CorePlan& core : plan.cores) made.cpus.push_back(core.os_cpu);
    for (const QueuePlan& queue : plan.queues) {
      made.queues.push_back({queue.core, plan.nics[queue.nic].name});
    }
    ShardOrder order{.kind = ShardDo::kMake, .job = job_};
    order.part.push_back(std::move(made));
    shards_.send(part.shard, std::move(order));
  }
}

void RemoteParts::owe(CoreReport::Type type, uint32_t rank, uint64_t from_round) {
  for (RemoteBox& part : parts_) part.owes(type, rank, from_round);
}

void RemoteParts::start() {
  owe(CoreReport::kRemoved, 0, kNever);
  order({.kind = ShardDo::kStart});
}

void RemoteParts::hold() {
  owe(CoreReport::kHeld);
  order({.kind = ShardDo::kHold});
}

void RemoteParts::detach(uint32_t rank) {
  owe(CoreReport::kDetached, rank);
  order({.kind = ShardDo::kDetach, .rank = rank});
}

void RemoteParts::attach(uint32_t rank, uint32_t incarnation) {
  owe(CoreReport::kAttached, rank);
  order({.kind = ShardDo::kAttach, .rank = rank, .incarnation = incarnation});
}

void RemoteParts::remove() {
  for (RemoteBox& part : parts_) {
    for (auto& [report, owed] : part.owed) {
      if (std::get<CoreReport::Type>(report) == CoreReport::kRemoved) owed.from_round = 0;
    }
  }
  order({.kind = ShardDo::kRemove});
}

bool RemoteParts::gone() const {
  return std::ranges::all_of(
      parts_, [](const RemoteBox& part) { return part.owing(CoreReport::kRemoved) == 0; });
}

void RemoteParts::admit(uint32_t rank, uint32_t incarnation, std::span<const KeyInterest> interest,
                        Offer& offer, Done done) {
  if (empty()) return done({});
  std::erase_if(offers_, [](const auto& question) { return question.second.has_all_answers(); });
  offers_[{rank, incarnation}] = ask(&offer, std::move(done), make_ms(plan_, 1));
  order({.kind = ShardDo::kAdmit,
         .rank = rank,
         .incarnation = incarnation,
         .ticket = offer.ticket,
         .interest = {interest.begin(), interest.end()}});
}

void RemoteParts::reconnect(uint32_t rank, uint32_t incarnation, Offer& offer, Done done) {
  if (empty()) return done({});
  offers_[{rank, incarnation}] = ask(&offer, std::move(done));
  order({.kind = ShardDo::kReconnect,
         .rank = rank,
         .incarnation = incarnation,
         .ticket = offer.ticket});
}

void RemoteParts::commit(const Commit& commit) {
  if (empty()) return;
  const Boundary& boundary = commit.boundary;
  ShardBoundary sent{.round = boundary.round,
                     .forgotten = boundary.forgotten,
                     .hyper = {commit.hyper.begin(), commit.hyper.end()},
                     .moves = moves_of(commit.orders),
                     .lowest_round = commit.lowest_round,
                     .snapshot = boundary.snapshot,
                     .snapshot_round = boundary.snapshot_round,
                     .state = commit.state,
                     .branch = commit.branch};
  for (const Boundary::Lost& lost : boundary.lost) {
    sent.lost.push_back({lost.rank, lost.expected_again});
  }
  for (const Boundary::Admitted& admitted : boundary.admitted) {
    sent.admitted.push_back({admitted.rank, admitted.incarnation, admitted.first_round});
  }
  owe(CoreReport::kCommitted);
  if (boundary.snapshot) {
    owe(CoreReport::kSnapped, 0, std::max(boundary.round, boundary.snapshot_round));
  }
  if (commit.state > 0 && keys_.what.set) owe(CoreReport::kSetState, 0, boundary.round + 1);
  if (commit.state > 0 && !keys_.what.set) owe(CoreReport::kGotState, 0, boundary.round);
  for (RemoteBox& part : parts_) part.told_rounds = false;
  ShardOrder all{.kind = ShardDo::kCommit};
  all.boundary.push_back(std::move(sent));
  order(std::move(all));
}

void RemoteParts::share_state(const ShardKeys& state, Done done) {
  Shared& shared = state.keys.empty() ? branch_ : keys_;
  constexpr uint64_t kArrays = 4;  // parameters and state
  shared.question = ask(nullptr, std::move(done), make_ms(plan_, kArrays));
  shared.what = state;
  ShardOrder share{.kind = ShardDo::kState};
  share.state.push_back(state);
  order(std::move(share));
}

void RemoteParts::drop_state(uint64_t number) {
  (branch_.what.number == number ? branch_ : keys_).question = {};
  order({.kind = ShardDo::kDropState, .number = number});
}

void RemoteParts::free_dock(uint32_t shelf) {
  order({.kind = ShardDo::kFreeDock, .number = shelf});
}

void RemoteParts::probe(uint64_t begun) {
  active_ = false;
  begun_ = begun;
  owe(CoreReport::kProbed);
  order({.kind = ShardDo::kProbe, .round = begun});
}

void RemoteParts::decide(const Decision& decision, std::span<const kernels::KeyNorms> norms) {
  decided_ = decision.round;
  ShardOrder decide{.kind = ShardDo::kDecide};
  decide.decision.push_back({.round = decision.round,
                             .norm = std::bit_cast<uint64_t>(decision.norm),
                             .factor = std::bit_cast<uint32_t>(decision.factor),
                             .skipped = decision.skipped});
  std::vector<uint64_t>& told = decide.decision.back().norms;
  told.reserve(2 * norms.size());
  for (const kernels::KeyNorms& key : norms) {
    told.push_back(std::bit_cast<uint64_t>(key.parameters));
    told.push_back(std::bit_cast<uint64_t>(key.update));
  }
  order(std::move(decide));
}

const RemoteBox& RemoteParts::part_of_shard(uint64_t shard) const {
  const auto part = std::ranges::find(parts_, shard, &RemoteBox::shard);
  if (part == parts_.end()) fail(ErrorCode::kNotFound, "this box has no part of that job");
  return *part;
}

void RemoteParts::forget() {
  making_ = {};
  offers_.clear();
  keys_ = branch_ = {};
}

}  // namespace phub
