// A running job: what its cores and connections report, and what its membership decides.
#include "phub/job/running_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "phub/core/index_set.h"

namespace phub {
namespace {

constexpr uint32_t kMostProbeMs = 250;
constexpr uint32_t kMostIdleProbeMs = 1000;  // of a job in which nothing has happened for long
constexpr uint64_t kRatesFadeMs = 3000;      // after the last round they are taken until they are 0

// A hundred times as long as a core looks at its chunks.
uint64_t walk_ms(const Job& job) {
  constexpr uint64_t kChunksPerMs = 1600;
  const uint64_t ranks = job.spec().max_ranks;
  const uint64_t words = job.choices().lock_step() ? bit_words(ranks) : (ranks + 7) / 8;
  return job.plan().chunks.size() * words / (kChunksPerMs * job.cores());
}

// How a rank violated the protocol: for the log, and for the rank.
std::string violation_text(const Job& job, const CoreReport& report) {
  const auto sent = [&](std::string_view what) {
    return fmt::format("it sent {} for {}", what, job.where(report.chunk));
  };
  switch (report.violation) {
    case CoreReport::kStream:
      break;
    case CoreReport::kChunk:
      return fmt::format("it sent chunk {} on a queue that has fewer", report.said);
    case CoreReport::kKind:
      return sent(fmt::format("kind {}, which is not expected there,", report.said));
    case CoreReport::kRound:
      return sent(
          fmt::format("round (or part) {} (mod 256) in round {}", report.said, report.round));
    case CoreReport::kBytes:
      return sent(fmt::format("{} bytes, not as many as belong there,", report.said));
    case CoreReport::kInterest:
      return sent(fmt::format("round {} (mod 256)", report.said)) +
             ", which it said that it neither writes nor reads";
    case CoreReport::kParticipants:
      return sent(fmt::format("{} ranks that took part, and the rack has {},", report.said,
                              job.spec().rack_ranks[report.rank]));
    case CoreReport::kPlace:
      return sent(fmt::format("a payload to offset {}, where it does not lie,", report.said));
  }
  return "it sent a batch or a frame that violates the protocol";
}

// Of a job whose ranks were all lost, and which had not begun, or it would have an error; "": one
// has left it, or nobody was lost.
std::string why_abandoned(const std::vector<EndedJob::Member>& members) {
  std::string why;
  for (uint32_t rank = 0; rank < members.size(); ++rank) {
    const EndedJob::Member& member = members[rank];
    if (member.ticket.empty()) continue;  // never joined
    if (member.lost.empty()) return "";
    why = fmt::format("all who had joined were lost before it could begin; {}", member.lost);
  }
  return why;
}

}  // namespace

RunningJob::RunningJob(std::shared_ptr<Job> job, std::string transport, std::vector<uint32_t> cores,
                       JobHost& host, SavedLife life, std::vector<ShardBox> shards,
                       std::shared_ptr<Uplink> uplink)
    : host_(host),
      job_(std::move(job)),
      membership_(job_->membership()),
      transport_(std::move(transport)),
      meter_(job_->whole_plan(), job_->spec(), transport_, cores, host.meters, host.clock.now_ms()),
      local_(
          *job_, std::move(cores), [this](uint32_t i) -> Probe& { return meter_.probe(i); },
          host.mail, host.builder, host.budget),
      remote_(host.shards, host.next_job++, job_->whole_plan(), std::move(shards)),
      uplink_(std::move(uplink)),
      seats_(job_->spec().max_ranks),
      life_(std::move(life)),
      savers_(context()),
      parts_(context(), savers_, [this] { saves_.check_parts(); }),
      saves_(context(), savers_, parts_),
      reconnections_(context()),
      hyper_(context(), saves_),
      branches_(context(), hyper_),
      state_(context()),
      rack_(uplink_ ? std::make_unique<RackDesk>(context(), savers_) : nullptr),
      members_(context(), transport_, savers_, parts_, saves_, rack_.get()),
      grown_bytes_(life_.docked_bytes) {}

JobContext RunningJob::context() {
  return {.host = host_,
          .job = *job_,
          .membership = membership_,
          .local = local_,
          .remote = remote_,
          .everywhere = everywhere_,
          .seats = seats_,
          .requests = requests_,
          .life = life_,
          .uplink = uplink_.get(),
          .driver = *this};
}

void RunningJob::start() {
  for (Part* const part : everywhere_) part->start();
  count_growth();
  // Other boxes may still be sending pieces of a snapshot that is dropped at the end.
  if (host_.checkpoints && job_->takes_snapshots() && job_->saved_arrays() > 0 && remote_.empty()) {
    membership_.save_at_end();
  }
  if (rack_) rack_->begin();
}

uint64_t RunningJob::tick_ms(uint64_t most) const {
  const JobSpec& spec = job_->spec();
  return std::clamp<uint64_t>(std::min(spec.lease_ms, spec.progress_limit_ms) / 8, 10, most);
}

uint64_t RunningJob::tick_ms() const { return tick_ms(kMostProbeMs); }

void RunningJob::tick(uint64_t now) {
  if (ending_ || now < next_tick_ms_) return;
  members_.tick(now);
  membership_.tick(now);
  if (rack_) rack_->tick();
  saves_.tick(now);
  branches_.tick();
  probe(now);
  const bool is_idle = !uplink_ && now - active_ms_ >= kRatesFadeMs;
  next_tick_ms_ = now + tick_ms(is_idle ? kMostIdleProbeMs : kMostProbeMs);
  carry_out();
}

void RunningJob::run_beside(Background& thread, Background::Work work, Background::End end) {
  ++tasks_;
  thread.run(std::move(work), [this, end = std::move(end)](const std::optional<Error>& failed) {
    end(failed);
    --tasks_;
  });
}

// --- reports -------------------------------------------------------------------------------------

void RunningJob::handle(const CoreReport& report) {
  if (report.type == CoreReport::kRemoved) {
    if (report.job != nullptr) local_.core_has_let_go();
    return;
  }
  if (report.type == CoreReport::kExcluded) {  // belongs in the log even when the job is ending
    membership_.excluded(report.rank, report.incarnation, report.chunk, report.round);
    return count_growth();
  }
  if (ending_) return;
  const uint64_t now = host_.time.now_ms();
  switch (report.type) {
    case CoreReport::kAdded:
    case CoreReport::kRemoved:
    case CoreReport::kExcluded:
      break;
    case CoreReport::kHeld:
      membership_.held(report, now);
      break;
    case CoreReport::kCommitted:
      membership_.committed(report, now);
      carry_out();  // who is lost in it counts as such
      if (!ending_) saves_.finish_copy();
      break;
    case CoreReport::kProbed:
      if (--probes_out_ == 0) collect_probes();
      break;
    case CoreReport::kDetached:
    case CoreReport::kAttached:
      if (report.rank == CoreReport::kNoRank) {
        rack_->core_answered(report.type);
        break;
      }
      reconnections_.core_answered(report.rank);
      break;
    case CoreReport::kSnapped:
      saves_.core_snapped(report.round - 1);
      break;
    case CoreReport::kGotState:
    case CoreReport::kSetState:
      state_.copied(report);
      break;
    case CoreReport::kFailed:
      membership_.failed(fmt::format("CPU {} can do no more for it: {}",
                                     job_->plan().cores[report.core].os_cpu,
                                     report.job->failure()));
      break;
    case CoreReport::kBroken:
      if (!job_->link().can_reconnect()) {
        members_.lose(report.rank, report.incarnation, "its queue pair broke");
      }
      break;
    case CoreReport::kViolation:
      members_.lose(report.rank, report.incarnation, violation_text(*job_, report));
      break;
    case CoreReport::kSwitchEnded:
    case CoreReport::kSwitchBegun:
      switch_changed(report);
      break;
    case CoreReport::kParentBroke:
      rack_->link_broke();
      break;
    case CoreReport::kDecided:
      remote_.decide(job_->gate()->decision());
      break;
    case CoreReport::kClosed:  // of other boxes: close_gate()
      break;
    case CoreReport::kNonFinite:
      if (rack_) {
        rack_->explain_nonfinite(Membership::non_finite_text(
            report.rank, fmt::format("{}, in round {}", job_->where(report.chunk), report.round)));
        break;
      }
      membership_.non_finite(
          report.rank,
          fmt::format("{}, in round {}{}", job_->where(report.chunk), report.round,
                      report.rank == CoreReport::kNoRank && !job_->switch_offer().streams.empty()
                          ? " (or some rank's gradient that came through the switch was not)"
                          : ""));
      break;
  }
  carry_out();
}

// The first core that ends it is mostly followed by the others.
void RunningJob::switch_changed(const CoreReport& report) {
  const std::string where =
      fmt::format("job '{}', CPU {}", job_->spec().name, job_->plan().cores[report.core].os_cpu);
  if (report.type == CoreReport::kSwitchBegun) {
    switch_ended_.erase(report.core);
    host_.notes.add(host_.clock.now_ms(), fmt::format("{}: the switch is used again, from round {}",
                                                      where, report.round));
    return;
  }
  std::string why = report.why;
  if (report.rank != CoreReport::kNoRank) why += fmt::format(" (rank {})", report.rank);
  if (report.said != 1) {
    host_.notes.add(
        host_.clock.now_ms(),
        fmt::format("{}: the switch is not used now, and workers send directly: {}", where, why));
  }
  switch_ended_[report.core] = std::move(why);
}

void RunningJob::handle(const TransportEvent& event) {
  if (ending_) return;
  if (event.kind == TransportEvent::kFailed) {
    membership_.failed(event.reason);
  } else {
    members_.data_ended(event.rank, event.incarnation);
  }
  carry_out();
}

// The cores look at every chunk for it, so they are asked when something has happened, and no more
// often than takes a hundredth of their time.
void RunningJob::probe(uint64_t now) {
  if (probes_out_ > 0 || now < next_probe_ms_) return;
  const RoundGate* const gate = job_->gate();
  const uint64_t begun = gate ? gate->begun() : 0;
  for (Part* const part : everywhere_) {
    if (part->wants_probe(begun)) active_ms_ = now;
  }
  if (active_ms_ != now) {                                  // what they said last still holds
    if (now - active_ms_ < kRatesFadeMs) collect_probes();  // the rates fade
    return;
  }
  next_probe_ms_ = now + walk_ms(*job_);
  probes_out_ = job_->all_cores();
  for (Part* const part : everywhere_) part->probe(begun);
}

void RunningJob::collect_probes() {
  const Probe all = meter_.collect(host_.clock.now_ms());
  std::vector<uint64_t> sent = all.arrivals;
  for (size_t r = 0; r < sent.size(); ++r) sent[r] += all.parts[r];
  membership_.probed(all.min_round, sent, all.waited_for, host_.time.now_ms());
}

// --- boundaries ----------------------------------------------------------------------------------

// What the membership decided, in order. An action may lead to further ones.
void RunningJob::carry_out() {
  auto& actions = membership_.actions();
  while (!actions.empty()) {
    MembershipAction action = std::move(actions.front());
    actions.pop_front();
    act(action);
  }
  count_growth();
}

// What jobs that run grow by counts as what they began with does. Where there is no room, logs lose
// their oldest pages: those of jobs that have ended first.
void RunningJob::count_growth() {
  const auto count = [&] {
    const uint64_t now =
        job_->grown_bytes() + state_.bytes() + seats_.interest_bytes() + branches_.bytes();
    const uint64_t before = std::exchange(grown_bytes_, now);
    host_.budget.grow(before, grown_bytes_);
  };
  count();
  host_.ended.make_room(host_.budget);
  const uint64_t excess = host_.budget.excess();
  if (excess == 0) return;
  MembershipLog& log = membership_.log();
  log.limit(log.bytes() - std::min(excess, log.bytes()));
  count();
}

void RunningJob::act(MembershipAction& action) {
  switch (action.type) {
    case MembershipAction::kHold:
      for (Part* const part : everywhere_) part->hold();
      return;
    case MembershipAction::kAdmit:
      return admit(action);
    case MembershipAction::kCommit:
      return commit(action);
    case MembershipAction::kRevoke:
      members_.rank_gone(action.rank);
      if (savers_.lose(action.rank, saves_.durable_round())) saves_.check_parts();
      states().end(action.rank);
      return revoke(action.rank);
    case MembershipAction::kFail:
      return end(action.code, action.message);
    case MembershipAction::kSave:
      ++host_.ending;
      return saves_.save_end();
    case MembershipAction::kEnd:
      return end(ErrorCode::kInternal, "");
    case MembershipAction::kReply:
      return members_.answer(action);
  }
}

void RunningJob::admit(const MembershipAction& action) {
  admit(action.rank, std::make_shared<Seat>(members_.seat_for(action)), 0);
}

// One part after the other, as the ticket of the first is that of all.
void RunningJob::admit(uint32_t rank, const std::shared_ptr<Seat>& seat, size_t part) {
  if (part == everywhere_.size()) {
    seats_.take(rank, std::move(*seat));
    return membership_.admitted(rank, true, "");
  }
  everywhere_[part]->admit(rank, seat->incarnation, seat->interest, seat->offer,
                           [this, rank, seat, part](const std::optional<Error>& refused) {
                             if (ending_) return;
                             if (!refused) {
                               admit(rank, seat, part + 1);
                             } else {
                               revoke(rank);
                               membership_.admitted(rank, false, refused->what());
                             }
                             if (part == 0) carry_out();  // another box's answer is a report
                           });
}

void RunningJob::commit(const MembershipAction& action) {
  Boundary& boundary = membership_.boundary();
  const uint64_t branch = branches_.at_boundary(action.orders);
  if (boundary.snapshot) saves_.at_boundary(boundary);
  const uint64_t state = boundary.moves_state ? state_.at_boundary(boundary) : 0;
  for (Part* const part : everywhere_) {
    part->commit({.boundary = boundary,
                  .hyper = action.hyper,
                  .orders = action.orders,
                  .lowest_round = action.lowest_round,
                  .state = state,
                  .branch = branch});
  }
}

void RunningJob::revoke(uint32_t rank) {
  for (Part* const part : everywhere_) part->revoke(rank);
}

// --- the end -------------------------------------------------------------------------------------

// The job stops on every core; its memory goes when all of them have let go of it, and with it the
// connections, which is what wakes its workers.
void RunningJob::end(ErrorCode code, const std::string& error) {
  if (ending_) return;
  ending_ = true;
  if (!saves_.is_saving_end()) ++host_.ending;
  error_code_ = code;
  error_ = error;
  if (!error.empty()) {
    host_.notes.add(host_.clock.now_ms(),
                    fmt::format("job '{}' ended: {}", job_->spec().name, error));
  }
  if (error.empty()) {
    reconnections_.refuse(ErrorCode::kFenced, "the job has ended");
  } else {
    reconnections_.refuse(code, error);
  }
  saves_.end();
  if (rack_) rack_->end(error);
  for (Part* const part : everywhere_) part->remove();
}

RunningJob::Remains RunningJob::finish() {
  local_.close();
  EndedJob ended{.name = job_->spec().name,
                 .log = std::move(membership_.log()),
                 .members = {},
                 .error_code = error_code_,
                 .error = error_,
                 .ended_ms = host_.clock.now_ms()};
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    ended.members.push_back({.incarnation = seat.incarnation,
                             .ticket = seat.offer.ticket,
                             .lost = membership_.why_lost(rank, seat.incarnation)});
  }
  if (std::string why = why_abandoned(ended.members); error_.empty() && !why.empty()) {
    host_.notes.add(host_.clock.now_ms(), fmt::format("job '{}' ended: {}", ended.name, why));
    ended.error_code = ErrorCode::kRankLost;
    ended.error = std::move(why);
  }
  host_.ended.add(std::move(ended));
  const ErrorCode code = error_.empty() ? ErrorCode::kNotFound : error_code_;
  const std::string message = error_.empty() ? "the job has ended" : error_;
  members_.refuse(code, message);
  requests_.refuse(code, message);
  states().refuse(code, message);
  branches_.refuse(code, message);
  saves_.answer({code, message});
  host_.budget.release(grown_bytes_);
  host_.ended.make_room(host_.budget);
  for (uint32_t i = 0; i < job_->cores(); ++i) {
    job_->core_job(i).probe(meter_.probe(i));  // the cores have let go of it
  }
  meter_.count_flow();
  --host_.ending;
  const bool over = error_.empty() || error_code_ == ErrorCode::kNotFound || !removals_.empty();
  return {std::move(job_), over, std::move(removals_)};
}

LogPage RunningJob::log(uint64_t from) {
  LogPage page = membership_.log().page(from);
  count_growth();
  return page;
}

void RunningJob::remove(Reply<Done> reply) {
  removals_.push_back(std::move(reply));
  membership_.remove();
  carry_out();
}

void RunningJob::detach_all() {
  remote_.forget();
  local_.detach_all();
}

JobStatus RunningJob::status() const {
  const JobSpec& spec = job_->spec();
  JobStatus status;
  status.name = spec.name;
  status.state = membership_.state();
  status.error = error_;
  status.optimizer = spec.optimizer;
  status.keys = spec.keys.size();
  status.chunks = job_->plan().chunks.size();
  for (const KeySpec& key : spec.keys) status.elements += key.elements;
  status.memory_bytes = counted_bytes();
  status.completed_round = membership_.completed_round();
  saves_.add_to(status);
  if (!switch_ended_.empty()) status.switch_ended = switch_ended_.begin()->second;
  status.max_ranks = spec.max_ranks;
  status.ranks = membership_.ranks();
  for (RankStatus& rank : status.ranks) {
    rank.rack = seats_[rank.rank].rack.name;
    rank.rack_live = seats_[rank.rank].rack.live;
  }
  std::erase_if(status.ranks, [](const RankStatus& rank) { return rank.state == "absent"; });
  status.missing = membership_.missing();
  status.waiting_for = membership_.waiting_for();
  status.branches = membership_.branches().list(membership_.completed_round() + 1);
  meter_.add_to(status);
  return status;
}

}  // namespace phub
