#include "phub/shard/shard_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <span>
#include <utility>

#include "phub/core/index_set.h"
#include "phub/job/shard_words.h"
#include "transport/error.h"

namespace phub {
namespace {

[[noreturn]] void misfit(std::string_view what) {
  fail(ErrorCode::kInvalid, "the server orders what does not fit a box's part: {}", what);
}

// The plan that the server's order comes to on this machine.
Plan plan_of(const ShardPart& order, const Machine& machine) {
  const size_t queues = order.queues.size();
  if (order.queue_chunks.size() != queues || order.queue_offset.size() != queues) {
    misfit("queues");
  }
  if (order.spec.chunk_elements == 0 || order.spec.chunk_elements % kChunkAlignment != 0) {
    misfit("the size of a chunk");
  }
  Plan plan;
  static_cast<Layout&>(plan) =
      lay_out_keys(order.spec.keys, order.spec.chunk_elements, order.spec.gradient_dtype);
  plan.trailer_elements = trailer_of(order.spec);
  plan.queue_offset = order.queue_offset;
  plan.queue_slots = order.queue_slots;
  if (plan.queue_slots.size() != (element_bytes_of_all(plan) > 0 ? 0 : queues)) misfit("slots");
  for (const uint32_t cpu : order.cpus) {
    const numa::Topology& topology = machine.topology();
    const auto core = std::ranges::find(topology.cores, cpu, &numa::Core::os_cpu);
    if (core == topology.cores.end()) misfit("a CPU");
    plan.cores.push_back({core->node, 0, topology.nodes[core->node].os_node, cpu});
  }
  for (ChunkLayout& chunk : plan.chunks) chunk.queue = kElsewhere;
  const std::vector<uint64_t> bytes =
      exchanged_bytes(plan, order.spec.keys, static_cast<uint32_t>(ranks_of(order.spec)));
  for (uint32_t q = 0; q < queues; ++q) {
    const ShardQueue& queue = order.queues[q];
    if (queue.core >= plan.cores.size() || (q > 0 && queue.core < order.queues[q - 1].core)) {
      misfit("a queue's core");
    }
    auto nic = std::ranges::find(plan.nics, queue.nic, &NicPlan::name);
    if (nic == plan.nics.end()) {
      nic = plan.nics.insert(nic, {plan.cores[queue.core].node, queue.nic});
    }
    plan.queues.push_back({queue.core, static_cast<uint32_t>(nic - plan.nics.begin())});
    plan.cores[queue.core].queues.push_back(q);
    if (order.queue_chunks[q].size() > kMaxChunksPerQueue) misfit("a queue");
    for (const uint32_t id : order.queue_chunks[q]) {
      if (id >= plan.chunks.size() || plan.chunks[id].queue != kElsewhere) misfit("a chunk");
      const ChunkLayout& chunk = plan.chunks[id];
      plan.chunks[id].queue = q;
      plan.cores[queue.core].elements += chunk.elements;
      plan.cores[queue.core].gradient_bytes += bytes[id];
      plan.nics[plan.queues[q].nic].elements += chunk.elements;
      plan.nics[plan.queues[q].nic].gradient_bytes += bytes[id];
    }
    lay_out_queue(plan, q, order.queue_chunks[q]);
  }
  if (std::ranges::any_of(plan.cores, [](const CorePlan& core) { return core.queues.empty(); })) {
    misfit("a core without a queue");
  }
  plan.queue_chunks = order.queue_chunks;
  return plan;
}

std::vector<uint32_t> chunks_here(const Plan& plan) {
  std::vector<uint32_t> chunks;
  for (uint32_t id = 0; id < plan.chunks.size(); ++id) {
    if (plan.chunks[id].queue != kElsewhere) chunks.push_back(id);
  }
  return chunks;
}

// `has_dock(shelf)`: something lies there that a move may copy.
template <typename HasDock>
bool fit(std::span<const BranchMove> moves, const JobSpec& spec, const HasDock& has_dock) {
  return std::ranges::all_of(moves, [&](const BranchMove& move) {
    if (move.from > spec.branches) {
      return move.copies && move.to > 0 && move.to <= spec.branches &&
             move.from == spec.branches + move.to && has_dock(move.to);
    }
    return move.to <= spec.branches && (!move.copies || move.from != move.to);
  });
}

// What a part needs of the checkpoint that its job goes on from.
Manifest manifest_of(const ShardRestored& restored, const JobSpec& spec) {
  if (restored.ranks < spec.max_ranks) misfit("the ranks of a checkpoint");
  Manifest manifest{.spec = spec, .round = restored.round, .steps = restored.steps};
  manifest.hyper = restored.hyper;
  manifest.branches.moves = restored.moves;
  const auto has_dock = [&restored](uint32_t shelf) {
    return std::ranges::count(restored.docks, shelf) == 1;
  };
  if (!fit(restored.moves, spec, has_dock)) misfit("moves of branches");
  manifest.ranks.resize(restored.ranks);
  for (const uint32_t rank : restored.expected) {
    if (rank >= restored.ranks) misfit("a rank that is expected");
    manifest.ranks[rank].expected = true;
  }
  return manifest;
}

}  // namespace

ShardServer::ShardServer(ShardServerOptions options,
                         std::vector<std::unique_ptr<Transport>> transports, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      machine_(options_, std::move(transports), clock),
      mail_(machine_.all_cores()),
      budget_(options_.memory_limit_bytes),
      notes_(options_.note) {}

ShardServer::~ShardServer() {
  stop_threads();
  builder_.drop();
  for (auto& [number, part] : parts_) {
    if (part.local) part.local->detach_all();
  }
  parts_.clear();  // links before their transports
}

void ShardServer::start_threads() {
  builder_.start();
  machine_.start_threads();
}

void ShardServer::stop_threads() {
  builder_.stop();
  machine_.stop_threads();
}

std::vector<int> ShardServer::event_fds() const {
  std::vector<int> fds = machine_.event_fds();
  fds.push_back(builder_.event_fd());
  return fds;
}

ShardHello ShardServer::hello() const {
  ShardHello hello{.name = options_.name};
  const numa::Topology& topology = machine_.topology();
  for (const numa::Node& node : topology.nodes) {
    hello.nodes.push_back({node.os_node, node.memory_bytes});
  }
  for (const numa::Core& core : topology.cores) hello.cores.push_back({core.node, core.os_cpu});
  for (const auto& transport : machine_.transports()) {
    const std::string name(transport->name());
    hello.transports.push_back(name);
    for (const numa::NicInfo& nic : machine_.topology_for(*transport).nics) {
      hello.nics.push_back({name, nic.name, nic.node});
    }
  }
  return hello;
}

ShardReport& ShardServer::report(ShardSays what, uint64_t number) {
  return reports_.emplace_back(ShardReport{.kind = what, .job = number});
}

void ShardServer::report_failed(uint64_t number, std::string why) {
  ShardReport& said = report(ShardSays::kFailed, number);
  said.core = ShardReport::kNoCore;
  said.text = std::move(why);
}

// --- orders --------------------------------------------------------------------------------------

void ShardServer::handle(const ShardOrder& order) {
  if (order.kind == ShardDo::kMake) {
    if (!order.part.empty() && !parts_.contains(order.job)) make(order.job, order.part.front());
    return;
  }
  const auto at = parts_.find(order.job);
  if (at == parts_.end()) return;  // it could not be made, or has ended
  Served& part = at->second;
  if (order.kind == ShardDo::kRemove) return begin_end(part);
  if (!part.job || part.ending || order.rank >= part.job->spec().max_ranks) return;
  switch (order.kind) {
    case ShardDo::kMake:
    case ShardDo::kRemove:
      break;
    case ShardDo::kAdmit:
    case ShardDo::kReconnect:
      return offer(order.job, part, order);
    case ShardDo::kRevoke:
      if (!part.refused) part.local->revoke(order.rank);
      return;
    case ShardDo::kStart:
      part.started = true;
      return part.local->start();
    case ShardDo::kHold:
      return part.local->hold();
    case ShardDo::kCommit:
      if (!order.boundary.empty()) commit(order.job, part, order.boundary.front());
      return;
    case ShardDo::kDecide:
      if (!order.decision.empty()) decide(part, order.decision.front());
      return;
    case ShardDo::kState:
      if (!order.state.empty()) make_state(order.job, part, order.state.front());
      return;
    case ShardDo::kDropState:
      return drop_state(part, order.number);
    case ShardDo::kFreeDock:
      return free_dock(part, order.number);
    case ShardDo::kProbe:
      part.told_active = false;
      return part.local->probe(order.round);
    case ShardDo::kDetach:
      return part.local->detach(order.rank);
    case ShardDo::kAttach:
      return part.local->attach(order.rank, order.incarnation);
  }
}

// On the builder's thread. `restored`: out.
std::shared_ptr<JobPart> ShardServer::made(const ShardPart& order, Manifest& restored) {
  validate(order.spec);
  Transport& transport = machine_.transport_named(order.transport);
  if (transport.shares_memory()) misfit("memory that is shared");
  if (choices_of(order.spec).gated && order.first_queue == 0) {
    misfit("rounds that are applied as a whole, and the first queue");
  }
  if (order.first_queue > order.all_queues ||
      order.queues.size() > order.all_queues - order.first_queue) {
    misfit("the numbers of queues");
  }
  const bool goes_on = !order.restored.empty();
  if (goes_on) restored = manifest_of(order.restored.front(), order.spec);
  Plan plan = plan_of(order, machine_);
  const NodeMemory memory = total_memory(plan, order.spec, order.saved, restored.ranks.size());
  budget_.reserve(order.spec, memory);
  try {
    auto part = std::make_shared<JobPart>(std::make_shared<const JobSpec>(order.spec),
                                          std::move(plan), transport, options_.store, order.saved,
                                          goes_on ? &restored : nullptr,
                                          QueueNumbers{order.first_queue, order.all_queues});
    if (goes_on) make_docks(*part, order.restored.front().docks);
    return part;
  } catch (...) {
    budget_.release(memory.total());
    throw;
  }
}

// What the job goes on from has branches that are still to come from files.
void ShardServer::make_docks(JobPart& part, const std::vector<uint32_t>& shelves) {
  const uint64_t bytes = shelves.size() * part.shelf_bytes();
  if (!budget_.has_room(bytes)) {
    fail(ErrorCode::kFull,
         "branches that come from files take {} bytes beside their shelves, for which the box has "
         "no room: raise --memory-limit",
         bytes);
  }
  for (const uint32_t shelf : shelves) {
    if (shelf == 0 || shelf > part.spec().branches || part.has_dock(shelf)) misfit("a dock");
    part.exchange_dock(shelf, part.make_shelf());
  }
  budget_.grow(0, part.docked_bytes());
}

void ShardServer::make(uint64_t number, const ShardPart& order) {
  Served& part = parts_[number];
  ++part.tasks;
  struct Work {
    ShardPart order;
    Manifest restored;
    std::shared_ptr<JobPart> job;
  };
  const auto work = std::make_shared<Work>(Work{.order = order, .restored = {}, .job = nullptr});
  builder_.run([this, work] { work->job = made(work->order, work->restored); },
               [this, number, work](const std::optional<Error>& refused) {
                 Served& part = parts_[number];
                 --part.tasks;
                 if (refused) {
                   refuse(number, *refused);
                   parts_.erase(number);
                   return;
                 }
                 part.restored = std::move(work->restored);
                 take(number, part, std::move(work->job));
               });
}

void ShardServer::refuse(uint64_t number, const Error& why) {
  report(ShardSays::kMade, number).refuse(why);
}

void ShardServer::take(uint64_t number, Served& part, std::shared_ptr<JobPart> job) {
  part.job = std::move(job);
  if (part.job->gate()) part.chunks = chunks_here(part.job->plan());
  std::vector<uint32_t> cores;
  for (const CorePlan& core : part.job->plan().cores) {
    const auto index = static_cast<uint32_t>(cores.size());
    by_core_job_[&part.job->core_job(index)] = {number, index};
    cores.push_back(machine_.core_at(core.os_cpu));
    Probe& probe = part.probes.emplace_back();
    const uint32_t ranks = part.job->spec().max_ranks;
    probe.arrivals.resize(ranks);
    probe.waited_for.resize(bit_words(ranks));
    probe.lacks.resize(ranks);
    probe.queues.resize(core.queues.size());
  }
  part.local.emplace(
      *part.job, std::move(cores), [&part](uint32_t core) -> Probe& { return part.probes[core]; },
      mail_, builder_, budget_);
  if (part.ending) return;
  if (part.restored.ranks.empty()) {
    report(ShardSays::kMade, number);
  } else {
    restore(number, part);
  }
}

void ShardServer::offer(uint64_t number, Served& part, const ShardOrder& order) {
  const uint32_t rank = order.rank;
  const bool again = order.kind == ShardDo::kReconnect;
  if (again != part.local->has(rank)) return;
  const auto offer = std::make_shared<Offer>(Offer{.ticket = order.ticket});
  const auto done = [this, number, rank, incarnation = order.incarnation,
                     offer](const std::optional<Error>& refused) {
    ShardReport& answer = report(ShardSays::kOffered, number);
    answer.rank = rank;
    answer.incarnation = incarnation;
    if (refused) return answer.refuse(*refused);
    answer.queues = offer->queues;
    answer.tls = offer->tls;
  };
  if (again) return part.local->reconnect(rank, order.incarnation, *offer, done);
  part.local->admit(rank, order.incarnation, order.interest, *offer, done);
}

// One that does not fit is not carried out: the job fails when its cores have answered.
void ShardServer::commit(uint64_t number, Served& part, const ShardBoundary& order) {
  const std::optional<Error> refused = error_of([&] {
    take_boundary(part, order);
    const std::vector<BranchOrder> orders = orders_of(order.moves);
    part.local->commit({.boundary = part.boundary,
                        .hyper = order.hyper,
                        .orders = orders,
                        .lowest_round = order.lowest_round});
  });
  if (!refused) return;
  report_failed(number, refused->what());
  part.refused = true;
  part.boundary = {.round = order.round};
  part.local->commit({.boundary = part.boundary});
}

// Throws Error(kInvalid).
void ShardServer::take_boundary(Served& part, const ShardBoundary& order) {
  const uint32_t ranks = part.job->spec().max_ranks;
  Boundary& boundary = part.boundary = {.round = order.round};
  part.last_rounds.assign(order.lost.size(), std::vector<uint64_t>(part.job->plan().chunks.size()));
  for (size_t i = 0; i < order.lost.size(); ++i) {
    if (order.lost[i].rank >= ranks) misfit("a rank that is lost");
    boundary.lost.push_back({.rank = order.lost[i].rank,
                             .expected_again = order.lost[i].expected_again,
                             .last_rounds = part.last_rounds[i]});
  }
  for (const ShardAdmitted& admitted : order.admitted) {
    if (!part.local->has(admitted.rank)) misfit("a rank that is admitted");
    boundary.admitted.push_back({.rank = admitted.rank,
                                 .incarnation = admitted.incarnation,
                                 .first_round = admitted.first_round,
                                 .slots = {}});
  }
  for (const uint32_t rank : order.forgotten) {
    if (rank < ranks) boundary.forgotten.push_back(rank);
  }
  boundary.snapshot = order.snapshot && part.job->takes_snapshots();
  boundary.snapshot_round = order.snapshot_round;
  if (order.branch > 0) place_branch(part, order);
  const auto has_dock = [&part](uint32_t shelf) { return part.job->has_dock(shelf); };
  if (!fit(order.moves, part.job->spec(), has_dock)) misfit("moves of branches");
  if (order.state > 0) place_state(part, order.state);
}

// REQUIRES of the gate, and not of the server: the round is closed.
void ShardServer::decide(Served& part, const ShardDecision& order) {
  if (std::exchange(part.closed_round, 0) != order.round || order.round == 0) return;
  Decision decision;
  decision.round = order.round;
  decision.norm = std::bit_cast<double>(order.norm);
  decision.skipped = order.skipped;
  decision.factor = std::bit_cast<float>(order.factor);
  part.job->gate()->tell(decision);
}

// --- what happens --------------------------------------------------------------------------------

void ShardServer::poll() {
  mail_.flush();
  for (const auto& core : machine_.all_cores()) {
    core->clear_report_fd();
    CoreReport said;
    while (core->receive(said)) {
      const auto at = by_core_job_.find(said.job);
      if (at != by_core_job_.end()) handle(at->second, said);
    }
  }
  builder_.finish();
  events_.clear();
  for (const auto& transport : machine_.transports()) transport->handle_events(events_);
  for (const TransportEvent& event : events_) handle(event);
  std::vector<uint64_t> gone;
  for (auto& [number, part] : parts_) {
    const bool is_free = !part.local || part.local->gone();
    if (part.ending && is_free && part.tasks == 0) gone.push_back(number);
    if (!part.started || part.ending || part.told_active) continue;
    if (!part.local->wants_probe(0)) continue;
    part.told_active = true;
    report(ShardSays::kActive, number);
  }
  for (const uint64_t number : gone) free(number, parts_[number]);
}

void ShardServer::handle(CoreOfPart from, const CoreReport& said) {
  Served& part = parts_[from.part];
  if (said.type == CoreReport::kRemoved) part.local->core_has_let_go();
  const std::optional<ShardSays> what = word_of(said.type);
  if (!what) return;
  ShardReport out{.kind = *what, .job = from.part};
  out.core = from.core;
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
    out.probe.push_back(probe_of(part, out.core));
    out.min_round = part.probes[out.core].min_round;
    if (const RoundGate* const gate = part.job->gate()) out.round = gate->begun();
  }
  if (said.type == CoreReport::kClosed) {
    for (const double square : part.job->gate()->take_squares(part.chunks)) {
      out.squares.push_back(std::bit_cast<uint64_t>(square));
    }
    part.closed_round = said.round;
  }
  if (said.type == CoreReport::kSnapped) {
    if (++part.cores_snapped == part.job->cores()) {
      snapped(from.part, part, said.round);
    }
    return;
  }
  if (said.type == CoreReport::kGotState || said.type == CoreReport::kSetState) {
    return state_copied(from, part, said.type == CoreReport::kSetState);
  }
  if (said.type != CoreReport::kCommitted) {
    reports_.push_back(std::move(out));
    return;
  }
  part.committed.push_back(std::move(out));
  if (part.committed.size() == part.job->cores()) committed(part);
}

// Where a rank took part last is told with the first core's answer, for all chunks of this part.
void ShardServer::committed(Served& part) {
  const std::vector<ChunkLayout>& chunks = part.job->plan().chunks;
  for (size_t i = 0; i < part.boundary.lost.size(); ++i) {
    ShardRounds rounds{.rank = part.boundary.lost[i].rank};
    for (uint32_t c = 0; c < chunks.size(); ++c) {
      if (chunks[c].queue == kElsewhere) continue;
      const uint64_t round = part.last_rounds[i][c];
      if (!rounds.rounds.empty() && rounds.rounds.back().round == round) {
        rounds.rounds.back().last = c;
      } else {
        rounds.rounds.push_back({c, c, round});
      }
    }
    part.committed.front().last_rounds.push_back(std::move(rounds));
  }
  for (ShardReport& report : part.committed) reports_.push_back(std::move(report));
  part.committed.clear();
}

// --- what moves ----------------------------------------------------------------------------------

void ShardServer::begin_move(Served& part, Move move) {
  part.moves.push_back(std::move(move));
  const auto last = std::prev(part.moves.end());
  if (last->image.bytes() == 0) end_move(part, last, std::nullopt);
}

void ShardServer::end_move(Served& part, std::list<Move>::iterator move,
                           const std::optional<Error>& failed) {
  const auto done = std::move(move->done);
  part.moves.erase(move);
  done(failed);
}

std::optional<ShardPiece> ShardServer::next_piece() {
  Served* of = nullptr;
  Move* next = nullptr;
  for (auto& [number, part] : parts_) {
    if (part.ending) continue;
    for (Move& move : part.moves) {
      if (move.is_busy || (next != nullptr && next->place.state > 0)) continue;
      if (next == nullptr || move.place.state > 0) of = &part, next = &move;  // a rank waits for it
    }
  }
  if (next == nullptr) return std::nullopt;
  next->is_busy = true;
  ++of->tasks;
  return ShardPiece{.place = next->place,
                    .to_server = next->to_server,
                    .bytes = next->image.piece(next->place.offset, kCopyPieceBytes)};
}

void ShardServer::moved(const ShardPiece& piece, const std::optional<Error>& failed) {
  Served& part = parts_[piece.place.job];
  --part.tasks;
  if (part.ending) return;
  const auto move = std::ranges::find_if(part.moves, [&piece](const Move& each) {
    return each.is_busy && each.place.state == piece.place.state &&
           each.place.round == piece.place.round;
  });
  move->is_busy = false;
  if (!failed) move->place.offset += piece.bytes.size();
  if (failed || move->is_over || move->place.offset == move->image.bytes()) {
    end_move(part, move, failed);
  }
}

// The values that the job goes on from.
void ShardServer::restore(uint64_t number, Served& part) {
  const auto refuse_it = [this, number](const Error& why) {
    refuse(number, why);
    begin_end(parts_[number]);
  };
  const auto publish = [this, number, refuse_it](const std::optional<Error>& failed) {
    if (failed) return refuse_it(*failed);
    Served& part = parts_[number];
    ++part.tasks;
    builder_.run(
        [job = part.job, restored = std::move(part.restored)] { job->publish_restored(restored); },
        [this, number, refuse_it](const std::optional<Error>& refused) {
          Served& part = parts_[number];
          --part.tasks;
          if (part.ending) return;
          if (refused) return refuse_it(*refused);
          report(ShardSays::kMade, number);
        });
  };
  begin_move(part, {.place = {.job = number, .round = part.restored.round},
                    .image = part.job->image_of_values(),
                    .done = publish});
}

// All cores have copied their chunks as they were before `round`. The server hears of it when it
// has what they copied.
void ShardServer::snapped(uint64_t number, Served& part, uint64_t round) {
  const auto say = [this, number, round](const std::optional<Error>& failed) {
    if (failed) return report_failed(number, failed->what());
    Served& part = parts_[number];
    part.cores_snapped = 0;
    for (uint32_t core = 0; core < part.job->cores(); ++core) {
      ShardReport& said = report(ShardSays::kSnapped, number);
      said.core = core;
      said.round = round;
    }
  };
  begin_move(part, {.place = {.job = number, .round = round - 1},
                    .to_server = true,
                    .image = part.job->image_of_copy(),
                    .done = say});
}

ShardProbe ShardServer::probe_of(const Served& part, uint32_t core) const {
  const Probe& probe = part.probes[core];
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

void ShardServer::handle(const TransportEvent& event) {
  if (event.kind == TransportEvent::kRefused) return notes_.add(clock_.now_ms(), event.reason);
  for (auto& [number, part] : parts_) {
    if (!part.job || &part.job->link() != event.link || part.ending) continue;
    const bool failed = event.kind == TransportEvent::kFailed;
    ShardReport& said = report(failed ? ShardSays::kFailed : ShardSays::kDisconnected, number);
    said.core = failed ? ShardReport::kNoCore : 0;
    said.rank = event.rank;
    said.incarnation = event.incarnation;
    said.text = event.reason;
  }
}

// --- the end -------------------------------------------------------------------------------------

void ShardServer::begin_end(Served& part) {
  part.ending = true;
  if (part.local) part.local->remove();
}

void ShardServer::end_all() {
  for (auto& [number, part] : parts_) begin_end(part);
  reports_.clear();
}

void ShardServer::free(uint64_t number, Served& part) {
  if (part.job) {
    part.local->close();
    for (uint32_t i = 0; i < part.job->cores(); ++i) by_core_job_.erase(&part.job->core_job(i));
    builder_.run([this, job = std::move(part.job), states = std::move(part.states)]() mutable {
      uint64_t bytes = job->memory().total() + job->docked_bytes();
      for (const auto& share : states) bytes += share->memory_bytes();
      states.clear();
      job.reset();
      budget_.release(bytes);
    });
  }
  parts_.erase(number);
}

}  // namespace phub
