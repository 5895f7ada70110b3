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

constexpr std::string_view kServesNoMore = "it serves no more";

[[noreturn]] void nonsense(std::string_view what) {
  fail(ErrorCode::kInvalid, "mail: a report does not fit its job: {}", what);
}

// Whether a core sends the report only when it is asked.
bool is_answer(CoreReport::Type type) {
  switch (type) {
    case CoreReport::kRemoved:
    case CoreReport::kHeld:
    case CoreReport::kCommitted:
    case CoreReport::kProbed:
    case CoreReport::kDetached:
    case CoreReport::kAttached:
    case CoreReport::kSnapped:
    case CoreReport::kGotState:
    case CoreReport::kSetState:
      return true;
    default:
      return false;
  }
}

bool is_about_rank(CoreReport::Type type) {
  return type == CoreReport::kDetached || type == CoreReport::kAttached;
}

void take_probe(const ShardProbe& said, Probe& probe) {
  if (said.arrivals.size() != probe.arrivals.size() ||
      said.waited_for.size() != probe.waited_for.size() ||
      said.queues.size() != probe.queues.size()) {
    nonsense("the sizes of a probe");
  }
  probe.chunks_completed = said.chunks_completed;
  probe.endpoint = said.endpoint;
  probe.arrivals = said.arrivals;
  probe.waited_for = said.waited_for;
  std::ranges::fill(probe.lacks, Lack());
  for (const ShardLack& lack : said.lacks) {
    if (lack.rank >= probe.lacks.size()) nonsense("a rank");
    probe.lacks[lack.rank] = {.chunks = lack.chunks, .chunk = lack.chunk, .round = lack.round};
  }
  for (size_t q = 0; q < said.queues.size(); ++q) {
    const ShardQueueCounters& queue = said.queues[q];
    probe.queues[q] = {queue.chunks, queue.bytes_in, queue.bytes_out};
  }
}

}  // namespace

RemoteParts::RemoteParts(Shards& shards, uint64_t job, const Plan& plan,
                         std::vector<ShardBox> boxes)
    : shards_(shards), job_(job), plan_(plan) {
  for (uint32_t i = 0; i < boxes.size(); ++i) {
    const uint32_t box = i + 1, core = first_core_of(plan, box), queue = first_queue_of(plan, box);
    parts_.push_back({.shard = boxes[i].id,
                      .name = boxes[i].about.name,
                      .box = box,
                      .first_core = core,
                      .cores = first_core_of(plan, box + 1) - core,
                      .first_queue = queue,
                      .queues = first_queue_of(plan, box + 1) - queue});
  }
}

void RemoteParts::Remote::owes(CoreReport::Type type, uint32_t rank, uint64_t from_round) {
  for (uint32_t core = 0; core < cores; ++core) {
    owed[{type, rank, core}] = {.from_round = from_round};
  }
}

uint32_t RemoteParts::Remote::owing(CoreReport::Type type) const {
  return static_cast<uint32_t>(std::ranges::count(
      owed, type, [](const auto& report) { return std::get<CoreReport::Type>(report.first); }));
}

void RemoteParts::ask(Asked& asked, Offer* offer, Done done, uint64_t limit_ms) {
  asked = {.limit_ms = limit_ms, .failed = {}, .offer = offer, .done = std::move(done)};
  for (const Remote& part : parts_) asked.awaited[part.shard] = 0;
  if (offer != nullptr) offer->queues.resize(plan_.queues.size());
}

uint64_t RemoteParts::make_ms(uint64_t copies) const {
  constexpr uint64_t kBytesPerMs = 256 * 1024;
  uint64_t elements = 0;  // those of all boxes, an upper bound for each of them
  for (const ChunkLayout& chunk : plan_.chunks) elements += chunk.elements;
  return kMakeMs + elements * sizeof(float) * copies / kBytesPerMs;
}

template <typename Visit>
void RemoteParts::for_each_asked(Visit visit) {
  visit(making_, "to make its part");
  for (auto& [of, asked] : offers_) visit(asked, "for connections of a rank");
  visit(keys_.asked, "for the state of keys");
  visit(branch_.asked, "for a branch");
}

std::optional<RemoteParts::Late> RemoteParts::late(uint64_t now_ms, uint64_t completed_round) {
  std::optional<Late> found;
  const auto late_by = [&](uint64_t shard, uint64_t& since, uint64_t limit_ms) -> uint64_t {
    if (since == 0) since = now_ms;
    const uint64_t waited = now_ms - since;
    return waited > limit_ms && shards_.has(shard) ? waited : 0;
  };
  const auto text = [](uint64_t waited, std::string_view what) {
    return fmt::format("it sends mail, but has not answered for {} ms: it was asked {}", waited,
                       what);
  };
  for_each_asked([&](Asked& asked, std::string_view what) {
    for (auto& [shard, since] : asked.awaited) {
      const uint64_t waited = late_by(shard, since, asked.limit_ms);
      if (waited > 0) found = {shard, text(waited, what)};
    }
  });
  for (Remote& part : parts_) {
    for (auto& [report, owed] : part.owed) {
      if (owed.from_round > completed_round) continue;
      const uint64_t waited = late_by(part.shard, owed.since_ms, kAnswerMs);
      if (waited == 0) continue;
      const std::string_view word = word_of(*word_of(std::get<CoreReport::Type>(report)));
      const uint32_t core = std::get<2>(report);
      found = {part.shard, text(waited, fmt::format("for '{}' of its core {}", word, core))};
    }
  }
  return found;
}

void RemoteParts::moved(uint64_t shard) {
  for_each_asked([shard](Asked& asked, std::string_view) {
    if (const auto at = asked.awaited.find(shard); at != asked.awaited.end()) at->second = 0;
  });
  for (Remote& part : parts_) {
    if (part.shard != shard) continue;
    for (auto& [report, owed] : part.owed) {
      const auto type = std::get<CoreReport::Type>(report);
      if (type == CoreReport::kSnapped || type == CoreReport::kGotState) owed.since_ms = 0;
    }
  }
}

void RemoteParts::order(ShardOrder order) {
  order.job = job_;
  for (const Remote& part : parts_) shards_.send(part.shard, order);
}

void RemoteParts::make(const ShardPart& like, Done done) {
  for (const Remote& part : parts_) {  // one may be lost since the job was begun
    if (shards_.has(part.shard)) continue;
    return done(Error(ErrorCode::kUnavailable, fmt::format("{}: {}", part.name, kServesNoMore)));
  }
  constexpr uint64_t kOfBox = 8;  // parameters, sums, results, state, a snapshot
  ask(making_, nullptr, std::move(done), make_ms(like.spec.max_ranks + kOfBox));
  for (const Remote& part : parts_) {
    const Plan plan = part_of(plan_, part.box);
    ShardPart made = like;
    made.queue_chunks = plan.queue_chunks;
    made.queue_offset = plan.queue_offset;
    made.queue_slots = plan.queue_slots;
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
  for (Remote& part : parts_) part.owes(type, rank, from_round);
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
  for (Remote& part : parts_) {
    for (auto& [report, owed] : part.owed) {
      if (std::get<CoreReport::Type>(report) == CoreReport::kRemoved) owed.from_round = 0;
    }
  }
  order({.kind = ShardDo::kRemove});
}

bool RemoteParts::gone() const {
  return std::ranges::all_of(
      parts_, [](const Remote& part) { return part.owing(CoreReport::kRemoved) == 0; });
}

void RemoteParts::admit(uint32_t rank, uint32_t incarnation, std::span<const KeyInterest> interest,
                        Offer& offer, Done done) {
  if (empty()) return done({});
  std::erase_if(offers_, [](const auto& asked) { return asked.second.awaited.empty(); });
  ask(offers_[{rank, incarnation}], &offer, std::move(done), make_ms(1));
  order({.kind = ShardDo::kAdmit,
         .rank = rank,
         .incarnation = incarnation,
         .ticket = offer.ticket,
         .interest = {interest.begin(), interest.end()}});
}

void RemoteParts::reconnect(uint32_t rank, uint32_t incarnation, Offer& offer, Done done) {
  if (empty()) return done({});
  ask(offers_[{rank, incarnation}], &offer, std::move(done));
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
  for (Remote& part : parts_) part.told_rounds = false;
  ShardOrder all{.kind = ShardDo::kCommit};
  all.boundary.push_back(std::move(sent));
  order(std::move(all));
}

void RemoteParts::share_state(const ShardKeys& state, Done done) {
  Shared& shared = state.keys.empty() ? branch_ : keys_;
  constexpr uint64_t kArrays = 4;  // parameters and state
  ask(shared.asked, nullptr, std::move(done), make_ms(kArrays));
  shared.what = state;
  ShardOrder share{.kind = ShardDo::kState};
  share.state.push_back(state);
  order(std::move(share));
}

void RemoteParts::drop_state(uint64_t number) {
  (branch_.what.number == number ? branch_ : keys_).asked = {};
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

std::span<const uint32_t> RemoteParts::close_round(uint64_t shard, uint64_t round) {
  Remote& part = part_of_shard(shard);
  if (round <= decided_ || round <= part.closed_round) nonsense("a round that is closed");
  part.closed_round = round;
  if (!part.chunks.empty()) return part.chunks;
  for (uint32_t id = 0; id < plan_.chunks.size(); ++id) {
    if (plan_.chunks[id].queue - part.first_queue < part.queues) part.chunks.push_back(id);
  }
  return part.chunks;
}

void RemoteParts::decide(const Decision& decision) {
  decided_ = decision.round;
  ShardOrder decide{.kind = ShardDo::kDecide};
  decide.decision.push_back({.round = decision.round,
                             .norm = std::bit_cast<uint64_t>(decision.norm),
                             .factor = std::bit_cast<uint32_t>(decision.factor),
                             .skipped = decision.skipped});
  order(std::move(decide));
}

void RemoteParts::answered(Asked& asked, const Remote& part, const ShardReport& report) {
  if (!asked.awaited.contains(part.shard)) return;
  if (report.refused && !asked.failed) {
    asked.failed.emplace(report.code, fmt::format("{}: {}", part.name, report.text));
  }
  if (!report.refused && asked.offer != nullptr) {
    if (report.queues.size() != part.queues || report.tls != asked.offer->tls) {
      nonsense("an offer");
    }
    std::ranges::copy(report.queues, asked.offer->queues.begin() + part.first_queue);
  }
  asked.awaited.erase(part.shard);
  if (!asked.awaited.empty()) return;
  const Done done = std::exchange(asked.done, nullptr);
  const std::optional<Error> failed = asked.failed;
  done(failed);
}

// Each rank may come once, and each chunk once, ascending: otherwise the work could be the product
// of the two lists' lengths, not their sum.
void RemoteParts::check_last_rounds(Remote& part, std::span<const ShardRounds> all,
                                    const Boundary& boundary) {
  if (std::exchange(part.told_rounds, true)) nonsense("last rounds that are known");
  std::set<uint32_t> ranks;
  for (const ShardRounds& rounds : all) {
    if (!ranks.insert(rounds.rank).second) nonsense("the last rounds of a rank come twice");
    const auto lost = std::ranges::find(boundary.lost, rounds.rank, &Boundary::Lost::rank);
    if (lost == boundary.lost.end()) nonsense("a rank that is not lost");
    uint64_t next = 0;
    for (const ChunkRange& range : rounds.rounds) {
      const bool is_behind = range.first >= next && range.last >= range.first;
      if (!is_behind || range.last >= plan_.chunks.size()) nonsense("a range of chunks");
      next = uint64_t{range.last} + 1;
    }
  }
}

// REQUIRES: check_last_rounds().
void RemoteParts::take_last_rounds(const Remote& part, std::span<const ShardRounds> all,
                                   Boundary& boundary) const {
  for (const ShardRounds& rounds : all) {
    const auto lost = std::ranges::find(boundary.lost, rounds.rank, &Boundary::Lost::rank);
    for (const ChunkRange& range : rounds.rounds) {
      for (uint32_t c = range.first; c <= range.last; ++c) {
        const uint32_t queue = plan_.chunks[c].queue - part.first_queue;
        if (queue < part.queues) lost->last_rounds[c] = range.round;
      }
    }
  }
}

std::optional<CoreReport> RemoteParts::take(uint64_t shard, const ShardReport& report,
                                            const ProbeOf& probe_of, Boundary& boundary) {
  const auto part = std::ranges::find(parts_, shard, &Remote::shard);
  if (part == parts_.end()) return std::nullopt;
  if (being_made() && report.kind != ShardSays::kMade) nonsense("it is being made");
  if (report.kind == ShardSays::kActive) active_ = true;
  if (report.kind == ShardSays::kMade) answered(making_, *part, report);
  if (report.kind == ShardSays::kOffered) {
    const auto offer = offers_.find({report.rank, report.incarnation});
    if (offer != offers_.end()) answered(offer->second, *part, report);
  }
  for (Shared* shared : {&keys_, &branch_}) {
    if (report.kind != ShardSays::kStateThere || report.state != shared->what.number) continue;
    answered(shared->asked, *part, report);
  }
  const std::optional<CoreReport::Type> type = report_of(report.kind);
  if (!type || type == CoreReport::kFailed) return std::nullopt;
  if (report.core >= part->cores) nonsense("a core");
  if (report.chunk >= plan_.chunks.size()) nonsense("a chunk");
  if (report.violation > CoreReport::kParticipants) nonsense("a violation");
  const uint32_t core = part->first_core + report.core;
  const uint32_t whose = is_about_rank(*type) ? report.rank : 0;
  if (is_answer(*type) && part->owed.erase({*type, whose, report.core}) == 0) {
    nonsense("nobody asked this core, or it has answered already");
  }
  const bool is_snapped = type == CoreReport::kSnapped;
  if (is_snapped || type == CoreReport::kGotState) {
    const CopyPlace what{.round = is_snapped ? report.round - 1 : 0,
                         .state = is_snapped ? 0 : keys_.what.number};
    if (!moves_.is_here(part->box, what)) nonsense("what its cores copied has not come");
  }
  if (type == CoreReport::kProbed) {
    if (report.probe.empty()) nonsense("a probe without an answer");
    take_probe(report.probe.front(), probe_of(core));
    probe_of(core).min_round = report.min_round;
  }
  if (!report.last_rounds.empty()) {
    if (type != CoreReport::kCommitted) nonsense("last rounds without a boundary");
    check_last_rounds(*part, report.last_rounds, boundary);
    take_last_rounds(*part, report.last_rounds, boundary);
  }
  CoreReport out;
  out.type = *type;
  out.violation = static_cast<CoreReport::Violation>(report.violation);
  out.core = core;
  out.rank = report.rank;
  out.incarnation = report.incarnation;
  out.chunk = report.chunk;
  out.said = report.said;
  out.round = report.round;
  out.started = report.started;
  out.min_round = report.min_round;
  out.lowest = report.lowest;
  return out;
}

const RemoteParts::Remote& RemoteParts::part_of_shard(uint64_t shard) const {
  const auto part = std::ranges::find(parts_, shard, &Remote::shard);
  if (part == parts_.end()) fail(ErrorCode::kNotFound, "this box has no part of that job");
  return *part;
}

void RemoteParts::forget() {
  making_ = {};
  offers_.clear();
  keys_ = branch_ = {};
}

std::optional<RemoteParts::Lost> RemoteParts::lose(uint64_t shard) {
  const auto part = std::ranges::find(parts_, shard, &Remote::shard);
  if (part == parts_.end()) return std::nullopt;
  const Lost lost{part->name, part->owing(CoreReport::kCommitted)};
  part->owed.clear();
  ShardReport gone{
      .refused = true, .code = ErrorCode::kUnavailable, .text = std::string(kServesNoMore)};
  answered(making_, *part, gone);
  for (auto& [of, asked] : offers_) answered(asked, *part, gone);
  answered(keys_.asked, *part, gone);
  answered(branch_.asked, *part, gone);
  return lost;
}

}  // namespace phub
