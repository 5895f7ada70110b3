// One simulated box below another: the production server of a rack (phub/job/rack.h). In the stead
// of ParentClient's threads and sockets the control net of the box above carries its calls, and the
// simulated network its sums.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "phub/job/parent.h"
#include "phub/server.h"
#include "tests/sim/control_net.h"
#include "tests/sim/virtual_clock.h"
#include "transport/paced/transport.h"
#include "transport/sim/net.h"

namespace phub::sim {

// What one process of a rack has of its parent.
class SimParent final : public Parent {
 public:
  using Handler = std::function<ControlHandler&()>;  // REQUIRES: it lives
  struct Watch {
    // The box above answers: it admits the rack; a state of keys may be read or sent.
    std::function<void(const JoinReply& reply)> admits;
    std::function<void(const Credential& who)> begins_state;
    std::function<void(const JoinReply& reply)> joined;  // the answer is here
  };
  // How the rack sends: the box on its host, or SimNet::kNoBox, and the budget of its NICs; no rate
  // is none.
  struct Way {
    uint32_t near = SimNet::kNoBox;
    NicBudget budget;
  };
  SimParent(SimNet& net, ControlNet& control, Handler handler, uint32_t box, Watch watch,
            const Way& way)
      : net_(net),
        control_(control),
        handler_(std::move(handler)),
        box_(box),
        watch_(std::move(watch)),
        near_(way.near),
        shares_(way.budget) {}

  std::string name() const override { return "the box above"; }
  std::string transport() const override { return "sim"; }
  std::string rack_name() const override { return fmt::format("rack {}", box_); }
  uint64_t nic_bytes_per_s() const override { return shares_.budget().bytes_per_s; }
  void join(JoinRequest request, Reply<JoinReply> reply) override;
#define PHUB_CALL(name, Answer, ...) \
  void name(const Credential& who, Reply<Answer> reply, uint32_t timeout_ms) override;
#define PHUB_REQUEST(name, Request, Answer, ...)                                \
  void name(const Credential& who, const Request& request, Reply<Answer> reply, \
            uint32_t timeout_ms) override;
#include "transport/control/calls.def"
  void send_part(const Credential& who, const PartPiece& place, std::string piece,
                 Reply<Done> reply) override;
  void restored_part(const Credential& who, uint32_t whose, uint64_t offset,
                     Reply<PartBytes> reply) override;
  void read_state(const Credential& who, uint64_t offset, Reply<PartBytes> reply) override;
  void write_state(const Credential& who, uint64_t offset, std::string piece,
                   Reply<Done> reply) override;
  void forget(const Credential& who) override;
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override {
    std::unique_ptr<WorkerLink> link = net_.connect(offer, layout, box_, near_);
    return nic_bytes_per_s() > 0 ? make_paced(std::move(link), layout, shares_) : std::move(link);
  }
  void poll() override;
  int event_fd() const override { return -1; }

  bool has_mail() const { return !mail_->empty(); }
  void cut_off(bool mute, uint64_t ns) { control_.cut(mail_, mute, ns); }
  // Its process ends. With `silent` its host died, and nobody hears of it.
  void die(bool silent);

 private:
  template <typename T>
  void call(const char* name, std::function<void(ControlHandler&, const Reply<T>&)> request,
            Reply<T> reply, bool may_come_twice = true);
  void close(const Credential& who);

  SimNet& net_;
  ControlNet& control_;
  const Handler handler_;
  const uint32_t box_;
  const Watch watch_;
  const uint32_t near_;
  BudgetShares shares_;
  std::shared_ptr<Mail> mail_ = std::make_shared<Mail>();
  std::map<std::pair<std::string, uint32_t>, Credential> leases_;  // by job and incarnation
};

class RackBox {
 public:
  using MakeServer = std::function<std::unique_ptr<Server>(Parent& parent, const Clock& clock)>;
  // `box`: its number in the network. `control`: its own. `above`, `handler`: of the box above.
  RackBox(SimNet& net, uint32_t box, std::unique_ptr<ControlNet> control, ControlNet& above,
          SimParent::Handler handler, SimParent::Watch watch, const SimParent::Way& way,
          MakeServer make);
  ~RackBox();
  RackBox(const RackBox&) = delete;
  RackBox& operator=(const RackBox&) = delete;

  void poll();  // one pass of its control thread
  // Unlike the root's, the control threads of racks make no pass for nothing: there may be many.
  bool runnable() const;
  void wake() { passes_ = kPasses; }

  void crash(bool silent);
  void start();  // after a crash
  void hang(uint64_t ns);
  void stand_still(uint64_t ms) { clock_.jump(ms); }
  void cut_off(bool mute, uint64_t ns) { parent_->cut_off(mute, ns); }

  uint32_t box() const { return box_; }
  uint64_t life() const { return life_; }  // a new one after each start
  ControlNet& control() { return *control_; }
  Server* server() const { return server_.get(); }  // null: it is dead

 private:
  static constexpr uint32_t kPasses = 4;  // what a pass begins beside it is done in those behind it

  void set_timer();

  SimNet& net_;
  const uint32_t box_;
  VirtualClock clock_;
  const std::unique_ptr<ControlNet> control_;
  ControlNet& above_;
  const SimParent::Handler handler_;
  const SimParent::Watch watch_;
  const SimParent::Way way_;
  const MakeServer make_;
  std::unique_ptr<SimParent> parent_;  // outlives the server
  std::unique_ptr<Server> server_;
  uint64_t life_ = 0;
  uint32_t passes_ = 0;
  uint64_t hangs_until_ns_ = 0;
  uint64_t due_ns_ = 0, timer_ns_ = 0;
};

}  // namespace phub::sim
