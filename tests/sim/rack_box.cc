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

namespace {

// The box above has begun a state: the rack may read or send it.
Reply<StateReply> watched(const SimParent::Watch& watch, const Credential& who,
                          const Reply<StateReply>& answer) {
  return [watch, who, answer](Result<StateReply> result) {
    if (result) watch.begins_state(who);
    answer(std::move(result));
  };
}
template <typename Answer>
Reply<Answer> watched(const SimParent::Watch& /*watch*/, const Credential& /*who*/,
                      const Reply<Answer>& answer) {
  return answer;
}

}  // namespace

#define PHUB_CALL(name, Answer, ...)                                                            \
  void SimParent::name(const Credential& who, Reply<Answer> reply, uint32_t /*limit*/) {        \
    if (calls::name.is_beat) leases_[{who.job, who.incarnation}] = who;                         \
    call<Answer>(                                                                               \
        "rack: " #name,                                                                         \
        [who](ControlHandler& above, const Reply<Answer>& answer) { above.name(who, answer); }, \
        std::move(reply), calls::name.may_repeat);                                              \
  }
#define PHUB_REQUEST(name, Request, Answer, ...)                                           \
  void SimParent::name(const Credential& who, const Request& request, Reply<Answer> reply, \
                       uint32_t /*limit*/) {                                               \
    call<Answer>(                                                                          \
        "rack: " #name,                                                                    \
        [watch = watch_, who, mine = sent_by(who, request)](ControlHandler& above,         \
                                                            const Reply<Answer>& answer) { \
          above.name(who, mine, watched(watch, who, answer));                              \
        },                                                                                 \
        std::move(reply), calls::name.may_repeat);                                         \
  }
#include "transport/control/calls.def"

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
