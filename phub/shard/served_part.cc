#include "phub/shard/served_part.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "phub/core/index_set.h"
#include "phub/job/shard_words.h"
#include "phub/shard/shard_orders.h"
#include "transport/error.h"

namespace phub {
namespace {

std::vector<uint32_t> chunks_here(const Plan& plan) {
  std::vector<uint32_t> chunks;
  for (uint32_t id = 0; id < plan.chunks.size(); ++id) {
    if (plan.chunks[id].queue != kElsewhere) chunks.push_back(id);
  }
  return chunks;
}

}  // namespace

ShardReport& ServedPart::report(ShardSays what) {
  return host_.reports.emplace_back(ShardReport{.kind = what, .job = number_});
}

void ServedPart::report_failed(std::string why) {
  ShardReport& said = report(ShardSays::kFailed);
  said.core = ShardReport::kNoCore;
  said.text = std::move(why);
}

// --- orders --------------------------------------------------------------------------------------

void ServedPart::handle(const ShardOrder& order) {
  if (order.kind == ShardDo::kRemove) return end();
  if (!is_made() || ending_ || order.rank >= job_->spec().max_ranks) return;
  switch (order.kind) {
    case ShardDo::kMake:
    case ShardDo::kRemove:
      break;
    case ShardDo::kAdmit:
    case ShardDo::kReconnect:
      return offer(order);
    case ShardDo::kRevoke:
      if (!refused_) local_->revoke(order.rank);
      return;
    case ShardDo::kStart:
      return local_->start();
    case ShardDo::kHold:
      return local_->hold();
    case ShardDo::kCommit:
      if (!order.boundary.empty()) commit(order.boundary.front());
      return;
    case ShardDo::kDecide:
      if (!order.decision.empty()) decide(order.decision.front());
      return;
    case ShardDo::kState:
      if (!order.state.empty()) states_->make(order.state.front());
      return;
    case ShardDo::kDropState:
      return states_->drop(order.number);
    case ShardDo::kFreeDock:
      return states_->free_dock(order.number);
    case ShardDo::kProbe:
      told_active_ = false;
      return local_->probe(order.round);
    case ShardDo::kDetach:
      return local_->detach(order.rank);
    case ShardDo::kAttach:
      return local_->attach(order.rank, order.incarnation);
  }
}

void ServedPart::make(const ShardPart& order) {
  ++tasks_;
  struct Work {
    ShardPart order;
    std::shared_ptr<JobPart> job;
  };
  const auto work = std::make_shared<Work>(Work{.order = order, .job = nullptr});
  host_.builder.run([this, work] { work->job = make_part(work->order); },
                    [this, work](const std::optional<Error>& refused) {
                      --tasks_;
                      if (!refused) {
                        job_ = std::move(work->job);
                        return take();
                      }
                      refuse(*refused);
                      end();
                    });
}

// Runs on the builder's thread.
std::shared_ptr<JobPart> ServedPart::make_part(const ShardPart& order) {
  validate(order.spec);
  Transport& transport = host_.machine.transport_named(order.transport);
  if (transport.shares_memory()) refuse_order("memory that is shared");
  if (rules_of(order.spec).gated && order.first_queue == 0) {
    refuse_order("rounds that are applied as a whole, and the first queue");
  }
  if (order.first_queue > order.all_queues ||
      order.queues.size() > order.all_queues - order.first_queue) {
    refuse_order("the numbers of queues");
  }
  const bool goes_on = !order.restored.empty();
  if (goes_on) restored_ = manifest_of(order.restored.front(), order.spec);
  Plan plan = plan_of(order, host_.machine);
  if (transport.windows() == Windows::kPlaces) {
    plan.slot_window = host_.machine.slot_window(transport);
  }
  const NodeMemory memory = total_memory(plan, order.spec, order.saved, restored_.ranks.size());
  host_.budget.reserve(order.spec, memory);
  try {
    auto part = std::make_shared<JobPart>(std::make_shared<const JobSpec>(order.spec),
                                          std::move(plan), transport, host_.store, order.saved,
                                          goes_on ? &restored_ : nullptr,
                                          QueueNumbers{order.first_queue, order.all_queues});
    if (goes_on) make_docks(*part, order.restored.front().docks);
    return part;
  } catch (...) {
    host_.budget.release(memory.total());
    throw;
  }
}

// What the job goes on from has branches that are still to come from files.
void ServedPart::make_docks(JobPart& part, const std::vector<uint32_t>& shelves) const {
  const uint64_t bytes = shelves.size() * part.shelf_bytes();
  if (!host_.budget.has_room(bytes)) {
    fail(ErrorCode::kFull,
         "branches that come from files take {} bytes beside their shelves, for which the box has "
         "no room: raise --memory-limit",
         bytes);
  }
  for (const uint32_t shelf : shelves) {
    if (shelf == 0 || shelf > part.spec().branches || part.has_dock(shelf)) refuse_order("a dock");
    part.exchange_dock(shelf, part.make_shelf());
  }
  host_.budget.grow(0, part.docked_bytes());
}

void ServedPart::refuse(const Error& why) { report(ShardSays::kMade).refuse(why); }

void ServedPart::take() {
  if (job_->gate()) chunks_ = chunks_here(job_->plan());
  std::vector<uint32_t> cores;
  for (const CorePlan& core : job_->plan().cores) {
    cores.push_back(host_.machine.core_at(core.os_cpu));
    Probe& probe = probes_.emplace_back();
    const uint32_t ranks = job_->spec().max_ranks;
    probe.arrivals.resize(ranks);
    probe.waited_for.resize(bit_words(ranks));
    probe.lacks.resize(ranks);
    probe.queues.resize(core.queues.size());
  }
  local_.emplace(
      *job_, std::move(cores), [this](uint32_t core) -> Probe& { return probes_[core]; },
      host_.mail, host_.builder, host_.budget);
  states_.emplace(number_, *job_, moves_, static_cast<ServedStates::Reports&>(*this), host_.builder,
                  host_.budget);
  if (ending_) return;
  if (restored_.ranks.empty()) {
    report(ShardSays::kMade);
  } else {
    restore();
  }
}

void ServedPart::offer(const ShardOrder& order) {
  const uint32_t rank = order.rank;
  const bool again = order.kind == ShardDo::kReconnect;
  if (again != local_->has(rank)) return;
  const auto offer = std::make_shared<Offer>(Offer{.ticket = order.ticket});
  const auto done = [this, rank, incarnation = order.incarnation,
                     offer](const std::optional<Error>& refused) {
    ShardReport& answer = report(ShardSays::kOffered);
    answer.rank = rank;
    answer.incarnation = incarnation;
    if (refused) return answer.refuse(*refused);
    answer.queues = offer->queues;
    answer.tls = offer->tls;
  };
  if (again) return local_->reconnect(rank, order.incarnation, *offer, done);
  local_->admit(rank, order.incarnation, order.interest, *offer, done);
}

// One that does not fit is not carried out: the job fails when its cores have answered.
void ServedPart::commit(const ShardBoundary& order) {
  const std::optional<Error> refused = error_of([&] {
    take_boundary(order);
    const std::vector<BranchOrder> orders = orders_of(order.moves);
    local_->commit({.boundary = boundary_,
                    .hyper = order.hyper,
                    .orders = orders,
                    .lowest_round = order.lowest_round});
  });
  if (!refused) return;
  report_failed(refused->what());
  refused_ = true;
  boundary_ = {.round = order.round};
  local_->commit({.boundary = boundary_});
}

// Throws Error(kInvalid).
void ServedPart::take_boundary(const ShardBoundary& order) {
  const uint32_t ranks = job_->spec().max_ranks;
  Boundary& boundary = boundary_ = {.round = order.round};
  last_rounds_.assign(order.lost.size(), std::vector<uint64_t>(job_->plan().chunks.size()));
  for (size_t i = 0; i < order.lost.size(); ++i) {
    if (order.lost[i].rank >= ranks) refuse_order("a rank that is lost");
    boundary.lost.push_back({.rank = order.lost[i].rank,
                             .expected_again = order.lost[i].expected_again,
                             .last_rounds = last_rounds_[i]});
  }
  for (const ShardAdmitted& admitted : order.admitted) {
    if (!local_->has(admitted.rank)) refuse_order("a rank that is admitted");
    boundary.admitted.push_back({.rank = admitted.rank,
                                 .incarnation = admitted.incarnation,
                                 .first_round = admitted.first_round,
                                 .slots = {}});
  }
  for (const uint32_t rank : order.forgotten) {
    if (rank < ranks) boundary.forgotten.push_back(rank);
  }
  boundary.snapshot = order.snapshot && job_->takes_snapshots();
  boundary.snapshot_round = order.snapshot_round;
  states_->at_boundary(order, boundary);
  const auto has_dock = [this](uint32_t shelf) { return job_->has_dock(shelf); };
  if (!fit(order.moves, job_->spec(), has_dock)) refuse_order("moves of branches");
}

// REQUIRES of the gate, and not of the server: the round is closed.
void ServedPart::decide(const ShardDecision& order) {
  if (std::exchange(closed_round_, 0) != order.round || order.round == 0) return;
  Decision decision;
  decision.round = order.round;
  decision.norm = std::bit_cast<double>(order.norm);
  decision.skipped = order.skipped;
  decision.factor = std::bit_cast<float>(order.factor);
  std::vector<kernels::KeyNorms> norms;
  for (size_t i = 0; i + 1 < order.norms.size(); i += 2) {
    norms.push_back(
        {std::bit_cast<double>(order.norms[i]), std::bit_cast<double>(order.norms[i + 1])});
  }
  if (order.norms.size() != 2 * job_->gate()->norms().size()) {
    return report_failed(fmt::format("an order does not fit the job: {} norms of {} keys",
                                     order.norms.size(), job_->gate()->norms().size()));
  }
  job_->gate()->tell(decision, norms);
}

// --- what happens --------------------------------------------------------------------------------

void ServedPart::handle(uint32_t core, const CoreReport& said) {
  if (said.type == CoreReport::kRemoved) local_->core_has_let_go();
  const std::optional<ShardSays> what = word_of(said.type);
  if (!what) return;
  ShardReport out{.kind = *what, .job = number_};
  out.core = core;
  const bool names_nobody = said.rank == CoreReport::kNoRank;
  out.rank = names_nobody && said.type != CoreReport::kNonFinite ? 0 : said.rank;
  out.incarnation = said.incarnation;
  out.violation = said.violation;
  out.chunk = said.chunk;
  out.said = said.said;
  out.round = said.round;
  out.started = said.started;
  out.min_round = said.min_round;
  out.lowest = said.lowest;
  if (said.type == CoreReport::kFailed) {
    out.text = said.job->failure();
  }
  if (said.type == CoreReport::kProbed) {
    out.probe.push_back(probe_of(core));
    out.min_round = probes_[core].min_round;
    if (const RoundGate* const gate = job_->gate()) out.round = gate->begun();
  }
  if (said.type == CoreReport::kClosed) {
    for (const double square : job_->gate()->take_squares(chunks_)) {
      out.squares.push_back(std::bit_cast<uint64_t>(square));
    }
    closed_round_ = said.round;
  }
  if (said.type == CoreReport::kSnapped) {
    if (++cores_snapped_ == job_->cores()) {
      snapped(said.round);
    }
    return;
  }
  if (said.type == CoreReport::kGotState || said.type == CoreReport::kSetState) {
    return states_->core_copied(core, said.type == CoreReport::kSetState);
  }
  if (said.type != CoreReport::kCommitted) {
    host_.reports.push_back(std::move(out));
    return;
  }
  committed_.push_back(std::move(out));
  if (committed_.size() == job_->cores()) committed();
}

// Where a rank took part last is told with the first core's answer, for all chunks of this part.
void ServedPart::committed() {
  const std::vector<ChunkLayout>& chunks = job_->plan().chunks;
  for (size_t i = 0; i < boundary_.lost.size(); ++i) {
    ShardRounds rounds{.rank = boundary_.lost[i].rank};
    for (uint32_t c = 0; c < chunks.size(); ++c) {
      if (chunks[c].queue == kElsewhere) continue;
      const uint64_t round = last_rounds_[i][c];
      if (!rounds.rounds.empty() && rounds.rounds.back().round == round) {
        rounds.rounds.back().last = c;
      } else {
        rounds.rounds.push_back({c, c, round});
      }
    }
    committed_.front().last_rounds.push_back(std::move(rounds));
  }
  for (ShardReport& report : committed_) host_.reports.push_back(std::move(report));
  committed_.clear();
}

ShardProbe ServedPart::probe_of(uint32_t core) const {
  const Probe& probe = probes_[core];
  ShardProbe out{.chunks_completed = probe.chunks_completed,
                 .endpoint = probe.endpoint,
                 .arrivals = probe.arrivals,
                 .waited_for = probe.waited_for};
  for (uint32_t rank = 0; rank < probe.lacks.size(); ++rank) {
    const Lack& lack = probe.lacks[rank];
    if (lack.chunks > 0) out.lacks.push_back({rank, lack.chunks, lack.chunk, lack.round});
  }
  for (const QueueCounters& queue : probe.queues) {
    out.queues.push_back({queue.chunks, queue.bytes_in, queue.bytes_out});
  }
  return out;
}

void ServedPart::handle(const TransportEvent& event) {
  const bool failed = event.kind == TransportEvent::kFailed;
  ShardReport& said = report(failed ? ShardSays::kFailed : ShardSays::kDisconnected);
  said.core = failed ? ShardReport::kNoCore : 0;
  said.rank = event.rank;
  said.incarnation = event.incarnation;
  said.text = event.reason;
}

void ServedPart::tell_if_active() {
  if (!is_made() || ending_ || told_active_ || !local_->wants_probe(0)) return;
  told_active_ = true;
  report(ShardSays::kActive);
}

// --- checkpoints ---------------------------------------------------------------------------------

// The values that the job goes on from come from the server.
void ServedPart::restore() {
  const auto refuse_it = [this](const Error& why) {
    refuse(why);
    end();
  };
  const auto publish = [this, refuse_it](const std::optional<Error>& failed) {
    if (failed) return refuse_it(*failed);
    ++tasks_;
    host_.builder.run([this, restored = std::move(restored_)] { job_->publish_restored(restored); },
                      [this, refuse_it](const std::optional<Error>& refused) {
                        --tasks_;
                        if (ending_) return;
                        if (refused) return refuse_it(*refused);
                        report(ShardSays::kMade);
                      });
  };
  moves_.begin({.job = number_, .round = restored_.round}, false, job_->image_of_values(), publish);
}

// All cores have copied their chunks as they were before `round`. The server hears of it when it
// has what they copied.
void ServedPart::snapped(uint64_t round) {
  const auto say = [this, round](const std::optional<Error>& failed) {
    if (failed) return report_failed(failed->what());
    cores_snapped_ = 0;
    for (uint32_t core = 0; core < job_->cores(); ++core) {
      ShardReport& said = report(ShardSays::kSnapped);
      said.core = core;
      said.round = round;
    }
  };
  moves_.begin({.job = number_, .round = round - 1}, true, job_->image_of_copy(), say);
}

std::optional<ShardPiece> ServedPart::next_piece(bool of_state) {
  if (ending_) return std::nullopt;
  return moves_.next(of_state);
}

// --- the end -------------------------------------------------------------------------------------

void ServedPart::end() {
  ending_ = true;
  moves_.drop_all();
  if (local_) local_->remove();
}

bool ServedPart::gone() const {
  const bool is_free = !is_made() || (local_->gone() && !states_->is_busy());
  return ending_ && is_free && tasks_ == 0 && !moves_.is_busy();
}

void ServedPart::free() {
  if (!is_made()) return;
  moves_.drop_all();
  local_->close();
  host_.builder.run(
      [&budget = host_.budget, job = std::move(job_), states = states_->take()]() mutable {
        uint64_t bytes = job->memory().total() + job->docked_bytes();
        for (const auto& share : states) bytes += share->memory_bytes();
        states.clear();
        job.reset();
        budget.release(bytes);
      });
}

void ServedPart::detach_all() {
  if (local_) local_->detach_all();
}

}  // namespace phub
