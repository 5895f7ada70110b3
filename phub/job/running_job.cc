// A running job: its beginning, its membership's actions, and its end.
#include "phub/job/running_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace phub {
namespace {

constexpr uint32_t kMostProbeMs = 250;
constexpr uint32_t kMostIdleProbeMs = 1000;  // for a job that has been idle for long

// Why a job without an error ended before it could begin: all its ranks were lost; "": some rank
// has left it, or none was lost.
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
                       std::shared_ptr<Uplink> uplink, std::shared_ptr<Uplink> standby)
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
      standby_(std::move(standby)),
      probes_(*job_, meter_, everywhere_, host.clock, host.time),
      switch_(*job_, host.notes, host.clock),
      remarks_(*job_, host.notes, host.clock),
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
      standby_desk_(standby_ ? std::make_unique<StandbyDesk>(context()) : nullptr),
      members_(context(), transport_, savers_, parts_, saves_, rack_.get(), standby_desk_.get(),
               remarks_),
      grown_bytes_(life_.docked_bytes) {
  if (job_->quorum_gates() != nullptr) quorum_.emplace(*job_, membership_, remarks_);
}

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
          .standby = standby_.get(),
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
  if (standby_desk_) standby_desk_->begin();
}

uint64_t RunningJob::tick_ms(uint64_t most) const {
  const JobSpec& spec = job_->spec();
  return std::clamp<uint64_t>(std::min(spec.lease_ms, spec.progress_limit_ms) / 8, 10, most);
}

uint64_t RunningJob::tick_ms() const { return tick_ms(kMostProbeMs); }

void RunningJob::tick(uint64_t now) {
  if (end_.has_come() || now < next_tick_ms_) return;
  members_.tick(now);
  membership_.tick(now);
  if (rack_) rack_->tick();
  if (standby_desk_) standby_desk_->tick();
  saves_.tick(now);
  branches_.tick();
  probes_.tick(now);
  if (quorum_) quorum_->end_standstill(now);
  if (const std::string note = job_->note_of_windows(); !note.empty()) host_.notes.add(now, note);
  const bool is_idle = !uplink_ && !standby_ && !probes_.rates_fade(now);
  next_tick_ms_ = now + tick_ms(is_idle ? kMostIdleProbeMs : kMostProbeMs);
  carry_out();
}

void RunningJob::tick_due(uint64_t now) {
  if (!quorum_ || end_.has_come()) return;
  quorum_->tick(now);
  carry_out();
}

void RunningJob::run_beside(Background& thread, Background::Work work, Background::End end) {
  ++tasks_;
  thread.run(std::move(work), [this, end = std::move(end)](const std::optional<Error>& failed) {
    end(failed);
    --tasks_;
  });
}

// --- boundaries ----------------------------------------------------------------------------------

// Carries out the membership's actions, in order. An action may lead to further ones.
void RunningJob::carry_out() {
  MembershipActions& actions = membership_.actions();
  while (!actions.empty()) {
    MembershipAction action = actions.take();
    act(action);
  }
  count_growth();
}

// The growth of running jobs counts like their first memory. If there is no room, logs lose their
// oldest pages: those of jobs that have ended first.
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
      admit(action.rank, members_.seat_for(action));
      return;
    case MembershipAction::kCommit:
      return commit(action);
    case MembershipAction::kRevoke:
      members_.rank_gone(action.rank);
      if (savers_.lose(action.rank, saves_.durable_round())) saves_.check_parts();
      states().end(action.rank);
      return revoke(action.rank);
    case MembershipAction::kStop:
      return membership_.failed(action.message, ErrorCode::kRankLost);
    case MembershipAction::kFail:
      return end_with(action.code, action.message);
    case MembershipAction::kSave:
      ++host_.ending;
      return saves_.save_end();
    case MembershipAction::kSaveForRanks:
      ++host_.ending;
      saves_.await_source_detached();
      return local_.detach(0);
    case MembershipAction::kEnd:
      return end_with(ErrorCode::kInternal, "");
    case MembershipAction::kReply:
      return members_.answer(action);
  }
}

// One part after the other, as the ticket of the first is that of all.
Story RunningJob::admit(uint32_t rank, Seat seat) {
  for (Part* const part : everywhere_) {
    const auto ask = [&](Part::Done done) {
      part->admit(rank, seat.incarnation, seat.interest, seat.offer, std::move(done));
    };
    const std::optional<Error> refused = co_await outcome_of(ask);
    if (end_.has_come()) co_return;
    if (!refused) continue;
    revoke(rank);
    membership_.admitted(rank, false, refused->what());
    if (part == &local_) carry_out();  // else this is a report of another box, which does so
    co_return;
  }
  seats_.take(rank, std::move(seat));
  membership_.admitted(rank, true, "");
  if (remote_.empty()) carry_out();
}

void RunningJob::commit(const MembershipAction& action) {
  Boundary& boundary = membership_.changes().boundary();
  const uint64_t branch = branches_.at_boundary(action.decided.orders);
  if (boundary.snapshot) saves_.at_boundary(boundary);
  if (quorum_) quorum_->lose(boundary.lost);
  const uint64_t state = boundary.moves_state ? state_.at_boundary(boundary) : 0;
  for (Part* const part : everywhere_) {
    part->commit({.boundary = boundary,
                  .hyper = action.decided.hyper,
                  .orders = action.decided.orders,
                  .lowest_round = action.lowest_round,
                  .state = state,
                  .branch = branch});
  }
}

void RunningJob::revoke(uint32_t rank) {
  for (Part* const part : everywhere_) part->revoke(rank);
}

// --- the end -------------------------------------------------------------------------------------

// The job stops on every core. When all of them have let go of it, its memory is freed and its
// connections close, which wakes its workers.
void RunningJob::end_with(ErrorCode code, const std::string& error) {
  if (end_.has_come()) return;
  if (!saves_.is_saving_end()) ++host_.ending;
  end_.come(code, error);
  if (!error.empty()) {
    host_.notes.add(host_.clock.now_ms(),
                    fmt::format("job '{}' ended: {}", job_->spec().name, error));
  }
  const Error answer = end_.answer(ErrorCode::kFenced);
  reconnections_.refuse(answer.code(), answer.what());
  saves_.end();
  if (rack_) rack_->end(error);
  if (standby_desk_) standby_desk_->end(removals_.empty() ? error : "");
  for (Part* const part : everywhere_) part->remove();
}

void RunningJob::forgo_standby(const Credential& who) {
  if (standby_desk_) standby_desk_->forgone(who.rank, who.incarnation);
  carry_out();
}

RunningJob::Remains RunningJob::finish() {
  local_.close();
  EndedJob ended{.name = job_->spec().name,
                 .log = std::move(membership_.log()),
                 .members = {},
                 .error_code = end_.code(),
                 .error = end_.error(),
                 .ended_ms = host_.clock.now_ms()};
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    ended.members.push_back({.incarnation = seat.incarnation,
                             .ticket = seat.offer.ticket,
                             .lost = membership_.ranks().why_lost(rank, seat.incarnation)});
  }
  if (std::string why = why_abandoned(ended.members); end_.is_good() && !why.empty()) {
    host_.notes.add(host_.clock.now_ms(), fmt::format("job '{}' ended: {}", ended.name, why));
    ended.error_code = ErrorCode::kRankLost;
    ended.error = std::move(why);
  }
  host_.ended.add(std::move(ended));
  const Error answer = end_.answer(ErrorCode::kNotFound);
  const ErrorCode code = answer.code();
  const std::string message = answer.what();
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
  const bool over = end_.is_good() || end_.code() == ErrorCode::kNotFound || !removals_.empty();
  return {std::move(job_), over, std::move(removals_)};
}

LogPage RunningJob::log(uint64_t from) {
  LogPage page = membership_.log().page(from);
  count_growth();
  return page;
}

void RunningJob::remove(Reply<Done> reply) {
  removals_.push_back(std::move(reply));
  membership_.fail(ErrorCode::kNotFound, "the job was deleted");
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
  status.error = end_.error();
  status.optimizer = spec.optimizer;
  status.keys = spec.keys.size();
  status.chunks = job_->plan().chunks.size();
  for (const KeySpec& key : spec.keys) status.elements += key.elements;
  const auto& windows = job_->windows();
  status.window_bytes = windows.bytes;
  status.window_grown_bytes = windows.grown_bytes;
  status.window_growths = windows.growths;
  status.memory_bytes = counted_bytes() + status.window_grown_bytes;
  status.completed_round = membership_.rounds().completed();
  saves_.add_to(status);
  switch_.add_to(status);
  remarks_.add_to(status);
  if (standby_desk_) status.standby = standby_desk_->status();
  status.max_ranks = spec.max_ranks;
  status.ranks = membership_.statuses();
  for (RankStatus& rank : status.ranks) {
    rank.rack = seats_[rank.rank].rack.name;
    rank.rack_live = seats_[rank.rank].rack.live;
    if (quorum_) rank.late = quorum_->late_rounds(rank.rank);
  }
  std::erase_if(status.ranks, [](const RankStatus& rank) { return rank.state == "absent"; });
  status.missing = membership_.ranks().missing();
  status.waiting_for = membership_.leases().waiting_for();
  status.branches =
      membership_.changes().decisions().branches().list(membership_.rounds().completed() + 1);
  status.losses = branches_.latest_losses();
  meter_.add_to(status);
  return status;
}

}  // namespace phub
