#include "tests/sim/rack_box.h"

#include <algorithm>

#include "tests/sim/virtual_clock.h"

namespace phub::sim {

// What was asked for is not answered once the process is gone.
template <typename T>
void SimParent::call(const char* name,
                     std::function<void(ControlHandler&, const Reply<T>&)> request, Reply<T> reply,
                     bool may_come_twice) {
  control_.call<T>(
      name, mail_,
      [handler = handler_, request = std::move(request)](const Reply<T>& answer) {
        request(handler(), answer);
      },
      std::move(reply), may_come_twice);
}

void SimParent::join(JoinRequest request, Reply<JoinReply> reply) {
  call<JoinReply>(
      "rack joins",
      [watch = watch_, request = std::move(request)](ControlHandler& above,
                                                     const Reply<JoinReply>& answer) {
        above.join(request, [watch, answer](Result<JoinReply> result) {
          if (result) watch.admits(*result.value);
          answer(std::move(result));
        });
      },
      [watch = watch_, reply = std::move(reply)](Result<JoinReply> result) {
        if (result) watch.joined(*result.value);
        reply(std::move(result));
      });
}

void SimParent::heartbeat(const Credential& who, uint32_t /*timeout_ms*/, Reply<Pulse> reply) {
  leases_[{who.job, who.incarnation}] = who;
  call<Pulse>(
      "rack beats",
      [who](ControlHandler& above, const Reply<Pulse>& answer) { above.heartbeat(who, answer); },
      std::move(reply));
}

void SimParent::tell(const Credential& who, RackNews news, Reply<Done> reply) {
  call<Done>(
      "rack tells",
      [who, news = std::move(news)](ControlHandler& above, const Reply<Done>& answer) {
        above.take_news(who, news, answer);
      },
      std::move(reply));
}

void SimParent::leave(const Credential& who, Reply<Done> reply) {
  call<Done>(
      "rack leaves",
      [who](ControlHandler& above, const Reply<Done>& answer) { above.leave(who, answer); },
      std::move(reply));
}

void SimParent::barrier(const Credential& who, Reply<Done> reply) {
  call<Done>(
      "rack's barrier",
      [who](ControlHandler& above, const Reply<Done>& answer) { above.barrier(who, answer); },
      std::move(reply), false);
}

void SimParent::set_hyper(const Credential& who, const HyperChange& change,
                          Reply<HyperReply> reply) {
  call<HyperReply>(
      "rack's hyper",
      [who, change](ControlHandler& above, const Reply<HyperReply>& answer) {
        above.set_hyper(who, change, answer);
      },
      std::move(reply));
}

void SimParent::checkpoint(const Credential& who, uint64_t round, Reply<CheckpointReply> reply) {
  call<CheckpointReply>(
      "rack asks for a checkpoint",
      [who, round](ControlHandler& above, const Reply<CheckpointReply>& answer) {
        above.checkpoint(who, round, answer);
      },
      std::move(reply));
}

void SimParent::send_part(const Credential& who, const PartPiece& place, std::string piece,
                          Reply<Done> reply) {
  call<Done>(
      "rack sends part",
      [who, place, piece = std::move(piece)](ControlHandler& above, const Reply<Done>& answer) {
        above.check_part(who, place, piece.size());
        above.take_part(who, place, piece, nullptr, answer);
      },
      std::move(reply));
}

void SimParent::restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                              Reply<PartBytes> reply) {
  call<PartBytes>(
      "rack's restored part",
      [who, whose, offset](ControlHandler& above, const Reply<PartBytes>& answer) {
        above.restored_part(who, whose, offset, answer);
      },
      std::move(reply));
}

void SimParent::begin_state(const Credential& who, const StateRequest& request,
                            Reply<StateReply> reply) {
  StateRequest mine = request;
  mine.rank = who.rank;
  mine.incarnation = who.incarnation;
  mine.epoch = who.epoch;
  call<StateReply>(
      "rack begins state",
      [watch = watch_, who, mine](ControlHandler& above, const Reply<StateReply>& answer) {
        above.begin_state(who, mine, [watch, who, answer](Result<StateReply> result) {
          if (result) watch.begins_state(who);
          answer(std::move(result));
        });
      },
      std::move(reply), false);
}

void SimParent::read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) {
  call<PartBytes>(
      "rack reads state",
      [who, offset](ControlHandler& above, const Reply<PartBytes>& answer) {
        above.read_state(who, offset, answer);
      },
      std::move(reply), false);
}

void SimParent::write_state(const Credential& who, uint64_t offset, std::string piece,
                            Reply<Done> reply) {
  call<Done>(
      "rack writes state",
      [who, offset, piece = std::move(piece)](ControlHandler& above, const Reply<Done>& answer) {
        above.check_state_piece(who, offset, piece.size());
        above.write_state(who, offset, piece, nullptr, answer);
      },
      std::move(reply), false);
}

void SimParent::apply_state(const Credential& who, Reply<HyperReply> reply) {
  call<HyperReply>(
      "rack applies state",
      [who](ControlHandler& above, const Reply<HyperReply>& answer) {
        above.apply_state(who, answer);
      },
      std::move(reply), false);
}

void SimParent::end_state(const Credential& who, Reply<Done> reply) {
  call<Done>(
      "rack ends state",
      [who](ControlHandler& above, const Reply<Done>& answer) { above.end_state(who, answer); },
      std::move(reply));
}

void SimParent::reconnect(const Credential& who, Reply<Offer> reply) {
  call<Offer>(
      "rack reconnects",
      [who](ControlHandler& above, const Reply<Offer>& answer) { above.reconnect(who, answer); },
      std::move(reply));
}

// The connection of its heartbeats ends, which the parent hears of.
void SimParent::close(const Credential& who) {
  control_.tell("rack is gone", [handler = handler_, who] { handler().connection_ended(who); });
}

void SimParent::forget(const Credential& who) {
  if (leases_.erase({who.job, who.incarnation}) > 0) close(who);
}

void SimParent::die(bool silent) {
  for (const auto& [name, who] : leases_) {
    if (!silent) close(who);
  }
  leases_.clear();
  mail_ = std::make_shared<Mail>();
}

void SimParent::poll() {
  while (!mail_->empty()) {
    auto action = std::move(mail_->front());
    mail_->pop_front();
    action();
  }
}

RackBox::RackBox(SimNet& net, uint32_t box, std::unique_ptr<ControlNet> control, ControlNet& above,
                 SimParent::Handler handler, SimParent::Watch watch, const SimParent::Way& way,
                 MakeServer make)
    : net_(net),
      box_(box),
      clock_(net),
      control_(std::move(control)),
      above_(above),
      handler_(std::move(handler)),
      watch_(std::move(watch)),
      way_(way),
      make_(std::move(make)) {
  control_->on_request([this] { wake(); });
  start();
}

RackBox::~RackBox() = default;

void RackBox::start() {
  parent_ = std::make_unique<SimParent>(net_, above_, handler_, box_, watch_, way_);
  server_ = make_(*parent_, clock_);
  ++life_;
  hangs_until_ns_ = timer_ns_ = due_ns_ = 0;
  control_->server_started();
  wake();
}

void RackBox::crash(bool silent) {
  control_->server_died();
  parent_->die(silent);
  for (WorkerLink* link : net_.links_from(box_)) net_.crash(*link, silent);
  server_.reset();
}

void RackBox::hang(uint64_t ns) {
  hangs_until_ns_ = net_.now_ns() + ns;
  net_.after(ns, [] {});
}

bool RackBox::runnable() const {
  if (server_ == nullptr || net_.now_ns() < hangs_until_ns_) return false;
  return passes_ > 0 || net_.now_ns() >= due_ns_ || parent_->has_mail() || net_.has_events(box_);
}

void RackBox::poll() {
  if (passes_ > 0) --passes_;
  if (parent_->has_mail() || net_.has_events(box_)) wake();
  server_->poll();
  set_timer();
}

// Its loop sleeps no longer than it says.
void RackBox::set_timer() {
  due_ns_ = net_.now_ns() + server_->poll_interval_ms() * kMs;
  if (net_.now_ns() < timer_ns_ && timer_ns_ <= due_ns_) return;
  timer_ns_ = due_ns_;
  net_.after(due_ns_ - net_.now_ns(), [] {});
}

}  // namespace phub::sim
