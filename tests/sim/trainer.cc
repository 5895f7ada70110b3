#include "tests/sim/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/sim/rack.h"
#include "tests/sim/virtual_clock.h"
#include "worker/link/switch_link.h"

namespace phub::sim {
namespace {

// Longer than any limit of a job takes to free a rank.
uint64_t patience_ns(const JobSpec& spec) {
  return std::max<uint64_t>(700, 3 * uint64_t{spec.lease_ms}) * kMs;
}
constexpr uint64_t kTries = 350;  // within it

}  // namespace

Trainer::Trainer(Rack& rack, JobRun& job, uint32_t id, const Start& start)
    : rack_(rack),
      job_(job),
      id_(id),
      start_(start),
      saves_(rack.random().chance(job.plan.saver_chance)),
      near_(rack.near_to(start.box)),
      started_ns_(rack.net().now_ns()) {
  join();
}

Credential Trainer::credential() const {
  return {job_.plan.spec.name, reply_->rank, reply_->incarnation, reply_->offer.ticket,
          reply_->epoch};
}

ControlNet& Trainer::control() const { return rack_.control(start_.box); }
ControlHandler& Trainer::server() const { return rack_.server(start_.box); }

bool Trainer::hung() const { return rack_.net().now_ns() < hung_until_ns_; }

bool Trainer::runnable() const {
  if (done()) return false;
  if (hung()) return beating_ && timer_due_;
  if (!mail_->empty() || timer_due_) return true;
  if (session_ == nullptr) return false;
  if (!asleep_) return true;
  const uint64_t now = rack_.net().now_ns();
  return SimNet::awake(sim_link_->endpoint()) || !link_->connected() || now >= room_at_ns_ ||
         (behind_switch_ && behind_switch_->wakes(now));
}

void Trainer::join() {
  JoinRequest request{.spec = job_.spec,
                      .rank = lost_ ? static_cast<int32_t>(lost_->rank) : start_.rank,
                      .replace = start_.replace && !lost_,
                      .transport = "sim",
                      .id = fmt::format("trainer-{}-{}", id_, joins_),
                      .epoch = lost_ ? lost_->epoch : 0,
                      .saves = saves_ || saves_residuals(job_.spec),
                      .interest = {}};
  // A process that takes another one's place may be elsewhere.
  std::vector<uint64_t>& hosts = request.spec.rank_hosts;
  if (start_.replace && !hosts.empty()) {
    std::ranges::rotate(hosts, hosts.begin() + static_cast<ptrdiff_t>(id_ % hosts.size()));
  }
  const auto& interest = job_.plan.interest;
  if (!interest.empty()) request.interest = interest.at(static_cast<uint32_t>(request.rank));
  control().call<JoinReply>(
      "join", mail_,
      [this, request](const Reply<JoinReply>& reply) { server().join(request, reply); },
      [this](const Result<JoinReply>& result) { on_join(result); });
}

void Trainer::on_join(const Result<JoinReply>& result) {
  if (!result) {
    const bool patient = start_.patient || start_.replace || lost_;
    const bool again =
        result.code == ErrorCode::kTimeout || result.code == ErrorCode::kUnavailable ||
        result.code == ErrorCode::kRewound || (result.code == ErrorCode::kTaken && patient) ||
        (result.code == ErrorCode::kMismatch && box() > 0);  // it has a job whose root has died
    const uint64_t most_ns = patience_ns(job_.spec);
    if (again && !job_.ended && rack_.net().now_ns() < started_ns_ + most_ns) {
      std::weak_ptr<Mail> mail = mail_;
      rack_.net().after(most_ns / kTries, [this, mail] {
        if (auto open = mail.lock()) open->push_back([this] { join(); });
      });
      return;
    }
    rack_.resolved(job_);
    return on_error(result.code, result.message);
  }
  rack_.resolved(job_);
  if (job_.ended) return crash(true);  // the server made another job of the same name
  reply_ = *result.value;
  life_ = box() == 0 ? rack_.life(job_) : rack_.life_below(job_, reply_->epoch);
  job_.oracle.joined({reply_->rank, reply_->incarnation}, saves_);
  try {
    link_ = connect();
    session_ = std::make_unique<Session>(*reply_, *link_, rack_.plan().send_order);
    coder_ = std::make_unique<GradientCoder>(*reply_, job_.plan.carry_over > 0);
    session_->when_dropped([this](size_t key, const ChunkLayout& chunk, const std::byte* slot) {
      if (coder_->is_coded(key)) coder_->carry(key, chunk, slot);
    });
  } catch (const Error& error) {
    return ask_why(Error(error.code(), error.what()));
  }
  collected_.assign(session_->keys(), 0);
  saved_rounds_ = std::make_unique<SavedRounds>(*reply_, saves_ || saves_residuals(job_.spec));
  parts_.clear();
  parts_out_ = 0;
  transfer_ = nullptr;
  sets_unsure_ = false;
  begin_course();
  state_ = State::kRunning;
  broadcasting_ = reply_->send_initial;
  if (broadcasting_) {
    session_->send_initial(
        [this](size_t key) { return job_.oracle.initial(static_cast<uint32_t>(key)).data(); });
  }
  set_timer();
  restore();
}

std::unique_ptr<WorkerLink> Trainer::connect() {
  std::unique_ptr<WorkerLink> link = rack_.net().connect(reply_->offer, near_);
  sim_link_ = link.get();
  behind_switch_ = nullptr;
  if (SimSwitch* const through = rack_.through_switch()) {
    // Below the progress limit.
    constexpr uint64_t kSilenceNs = 60 * kMs, kProbeNs = 40 * kMs, kOrderNs = 100 * kMs;
    return through_switch(std::move(link), *reply_,
                          {.retry_ns = rack_.plan().through_switch->retry_ns,
                           .silence_ns = kSilenceNs,
                           .probe_ns = kProbeNs,
                           .order_ns = kOrderNs},
                          [this, through](const sockaddr_in&, uint16_t, int) {
                            auto inbox = std::make_shared<SimSwitch::Inbox>();
                            auto port = through->open_port(inbox);
                            behind_switch_ = std::move(inbox);
                            return port;
                          });
  }
  const auto& outer = job_.plan.outer;
  const bool is_slow = outer && outer->has_slow_link(reply_->rank);
  const uint64_t rate = is_slow ? outer->slow_link_bytes_per_s : rack_.plan().worker_bytes_per_s;
  if (rate == 0) return link;
  const auto queues = static_cast<uint32_t>(reply_->offer.queues.size());
  return make_paced(std::move(link), queues, rack_.budget_of(rate));
}

void Trainer::beat(std::function<void(Result<Pulse>)> done) {
  control().call<Pulse>(
      "heartbeat", mail_,
      [this, who = credential()](const Reply<Pulse>& reply) { server().heartbeat(who, reply); },
      std::move(done));
}

// The connection failed: the control port knows whether the box has died.
void Trainer::ask_why(const Error& error) {
  if (reply_->epoch == 0) return on_error(error.code(), error.what());
  beat([this, error](const Result<Pulse>& result) {
    if (!result && result.code == ErrorCode::kTimeout) return ask_why(error);
    const bool lost = !result && has_lost_server(result.code);
    on_error(lost ? result.code : error.code(), error.what());
  });
}

void Trainer::set_timer() {
  std::weak_ptr<Mail> mail = mail_;
  rack_.net().after(uint64_t{job_.plan.spec.lease_ms} * kMs / 3, [this, mail] {
    if (!mail.expired()) timer_due_ = true;
  });
}

void Trainer::heartbeat() {
  beat([this](const Result<Pulse>& result) {
    // Whoever is leaving hears that it has left, too.
    if (result) job_.durable = std::max(job_.durable, result.value->durable_round);
    const bool heard = !result && result.code != ErrorCode::kTimeout;
    if (heard && state_ != State::kLeaving) on_error(result.code, result.message);
  });
}

// The error is that the box died, after which the job goes on.
bool Trainer::has_lost_server(ErrorCode code) const {
  return reply_ && reply_->epoch > 0 &&
         (code == ErrorCode::kUnavailable || code == ErrorCode::kRewound);
}

void Trainer::rejoin() {
  rack_.net().trace("joins again", id_, reply_->rank);
  lost_ = std::exchange(reply_, std::nullopt);
  mail_ = std::make_shared<Mail>();
  session_.reset();
  link_.reset();
  state_ = State::kJoining;
  fragment_ = 0;
  to_push_.clear();
  wait_key_ = 0;
  hung_until_ns_ = 0;
  looking_again_ = timer_due_ = reconnecting_ = asleep_ = closed_seen_ = finished_rounds_ = false;
  started_ns_ = rack_.net().now_ns();
  ++joins_;
  rack_.joining(job_);
  join();
}

void Trainer::on_error(ErrorCode code, const std::string& message) {
  if (done()) return;
  if (has_lost_server(code)) return rejoin();
  rack_.net().trace("error", id_, static_cast<uint64_t>(code));
  if (code == ErrorCode::kFenced) misbehave();
  error_.emplace(code, message);
  state_ = State::kDone;
  session_.reset();
  link_.reset();
}

// What a fenced process may still do by mistake: nothing of it may have any effect.
void Trainer::misbehave() {
  if (session_ == nullptr) return;
  SimRandom& random = rack_.random();
  for (std::byte& byte : link_->gradients()) byte = static_cast<std::byte>(random.next());
  for (int i = 0; i < 20; ++i) {
    const auto chunk = static_cast<uint32_t>(random.below(job_.layout.chunks.size()));
    const ChunkLayout& c = job_.layout.chunks[chunk];
    const Imm imm{c.index, static_cast<uint32_t>(random.below(256)), ImmKind::kData};
    const auto queues = static_cast<uint32_t>(reply_->layout.queue_chunks.size());
    link_->endpoint().post({c.queue % queues}, {.local_offset = c.gradient_offset,
                                                .remote_offset = c.slot_offset,
                                                .bytes = c.slot_bytes,
                                                .imm = encode(imm)});
  }
  link_->endpoint().flush();
}

void Trainer::crash(bool silent) {
  if (done()) return;
  rack_.net().trace("process ends", id_, silent);
  crashed_ = true;
  state_ = State::kDone;
  mail_ = std::make_shared<Mail>();
  session_.reset();
  if (link_ != nullptr) rack_.net().crash(*sim_link_, silent);
  link_.reset();
}

void Trainer::hang(uint64_t ms, bool beating) {
  rack_.net().trace("hang", id_, ms, beating);
  hung_until_ns_ = rack_.net().now_ns() + ms * kMs;
  whole_since_ns_ = std::max(whole_since_ns_, hung_until_ns_);
  beating_ = beating;
  rack_.net().after(ms * kMs, [] {});  // so that there is a moment of waking up
}

// Reliable connections break in both cases, since nothing is acknowledged. Shared memory is not
// cut.
void Trainer::cut_off(bool mute, uint64_t ms) {
  rack_.net().trace("cut off", id_, mute, ms);
  control().cut(mail_, mute, ms * kMs);
  whole_since_ns_ = std::max(whole_since_ns_, rack_.net().now_ns() + ms * kMs);
  if (behind_switch_) {
    const uint64_t until = rack_.net().now_ns() + ms * kMs;
    (mute ? behind_switch_->mute_until_ns : behind_switch_->deaf_until_ns) = until;
  }
  while (link_ != nullptr && rack_.net().break_queue_pair(*sim_link_)) {
  }
}

void Trainer::leave_early() {
  leaving_early_ = true;
  if (rack_.random().chance(0.5)) leave();  // what it pushed may count or not: the log knows
}

bool Trainer::poll() {
  if (hung()) {  // only its heartbeats go on
    timer_due_ = false;
    set_timer();
    heartbeat();
    return false;
  }
  bool moved = !mail_->empty();
  while (!done() && !mail_->empty()) {
    auto action = std::move(mail_->front());
    mail_->pop_front();
    action();
  }
  if (done() || session_ == nullptr) return moved;
  if (std::exchange(timer_due_, false)) {
    set_timer();
    heartbeat();
  }
  if (std::exchange(asleep_, false)) session_->disarm();
  if (state_ == State::kLeaving) return moved;
  if (!link_->connected() && !closed_seen_) notice_closed();
  if (session_->broken()) {
    reconnect();
    return moved;
  }
  moved |= session_->poll();
  if (job_.plan.carry_over > 0 && state_ == State::kRunning) carry_over();
  if (!session_->broken()) moved |= train();
  if (!moved && !done()) sleep();
  return moved;
}

void Trainer::notice_closed() {
  closed_seen_ = true;
  heartbeat();  // the control port knows why
}

void Trainer::reconnect() {
  if (std::exchange(reconnecting_, true)) return;
  control().call<Offer>(
      "reconnect", mail_,
      [this, who = credential()](const Reply<Offer>& reply) { server().reconnect(who, reply); },
      [this](const Result<Offer>& result) {
        if (done() || state_ == State::kLeaving) return;
        if (!result && result.code != ErrorCode::kTaken && result.code != ErrorCode::kTimeout) {
          return on_error(result.code, result.message);
        }
        std::weak_ptr<Mail> mail = mail_;
        rack_.net().after(result ? 0 : kMs / 2, [this, mail, result] {
          auto open = mail.lock();
          if (open == nullptr) return;
          open->push_back([this, result] {
            reconnecting_ = false;
            if (!result) return;  // broken still: asks again
            try {
              link_->reconnect(*result.value);
            } catch (const Error&) {
              return;  // outdated already: asks again
            }
            session_->resend();
            whole_since_ns_ = std::max(whole_since_ns_, rack_.net().now_ns());
          });
        });
      });
}

void Trainer::finish() {
  finished_rounds_ = finished_rounds_ || !leaving_early_;
  if (!leaving_early_ && !rack_.may_leave(job_)) return;
  if (parts_out_ > 0 && !leaving_early_) return;
  if (!job_.plan.barrier || leaving_early_) return leave();
  state_ = State::kBarrier;
  control().call<Done>(
      "barrier", mail_,
      [this, who = credential()](const Reply<Done>& reply) { server().barrier(who, reply); },
      [this](const Result<Done>& result) {
        if (!result && result.code != ErrorCode::kTimeout) {
          return on_error(result.code, result.message);
        }
        if (result && !job_.plan.look_again) return leave();
        looking_again_ = static_cast<bool>(result);
        state_ = State::kRunning;  // for the barrier again, or for a last look
      },
      false);
}

void Trainer::leave() {
  const bool again = state_ == State::kLeaving;
  state_ = State::kLeaving;
  control().call<Done>(
      "leave", mail_,
      [this, who = credential()](const Reply<Done>& reply) { server().leave(who, reply); },
      [this, again](const Result<Done>& result) {
        if (done()) return;
        if (!result && result.code == ErrorCode::kTimeout) return leave();
        if (!result && !again) return on_error(result.code, result.message);
        left_ = true;
        state_ = State::kDone;
        session_.reset();
        link_.reset();
      });
}

std::string Trainer::describe() const {
  std::string text = fmt::format("trainer {}", id_);
  if (reply_) text += fmt::format(" (rank {}, incarnation {})", reply_->rank, reply_->incarnation);
  constexpr const char* kStates[] = {"joining",        "restoring", "running",
                                     "in the barrier", "leaving",   "done"};
  text += fmt::format(": {}, {} pushes", kStates[static_cast<int>(state_)], pushes_);
  if (hung()) text += ", hung";
  if (crashed_) text += ", crashed";
  if (left_) text += ", left";
  if (asleep_) text += ", asleep";
  if (reconnecting_) text += ", reconnecting";
  if (session_ && session_->broken()) text += ", broken: " + session_->problem();
  if (error_) text += fmt::format(", {}: {}", name_of(error_->code()), error_->what());
  for (size_t k = 0; session_ && k < session_->keys(); ++k) {
    text += fmt::format(" {}{}", session_->round(k), session_->ready(k) ? "" : "*");
  }
  return text;
}

}  // namespace phub::sim
