// One simulated training process: the production session, and a training loop that checks every
// result it gets.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/sim/control_net.h"
#include "tests/sim/rack_plan.h"
#include "tests/sim/rack_switch.h"
#include "transport/control/branch_messages.h"
#include "transport/control/messages.h"
#include "transport/transport.h"
#include "worker/memory/gradient_coder.h"
#include "worker/save/rank_state.h"
#include "worker/save/saved_rounds.h"
#include "worker/session/session.h"

namespace phub::sim {

class Rack;
struct Contribution;
struct JobRun;

class Trainer {
 public:
  struct Start {
    int32_t rank = -1;
    bool replace = false;
    bool patient = false;  // asks again while the rank is taken
    uint32_t box = 0;      // where it joins: Rack::server()
  };
  Trainer(Rack& rack, JobRun& job, uint32_t id, const Start& start);

  // One pass of the process. True if anything moved.
  bool poll();
  // Whether a pass may find something: the process is not dead, hung or asleep.
  bool runnable() const;

  // Faults.
  void crash(bool silent);
  void hang(uint64_t ms, bool beating);
  // Nothing that it sends arrives (`mute`), or nothing that is sent to it.
  void cut_off(bool mute, uint64_t ms);
  void leave_early();
  void disturb() { disturbed_ = true; }

  // Trains to the end, as far as it knows.
  bool staying() const { return joined() && !done() && !leaving_early_; }
  bool done() const { return state_ == State::kDone; }
  bool joined() const { return reply_.has_value(); }
  bool left() const { return left_; }
  bool lacks_part() const { return lacks_part_; }  // the box could not read what it saved
  bool crashed() const { return crashed_; }
  bool disturbed() const { return disturbed_; }
  bool finished_rounds() const { return finished_rounds_; }
  uint32_t id() const { return id_; }
  uint32_t box() const { return start_.box; }
  bool has_rank(uint32_t rank) const { return reply_ && reply_->rank == rank; }
  // Whether it has this rank, or is about to get it.
  bool is_of(uint32_t rank) const {
    return !done() && (reply_ ? reply_->rank == rank : start_.rank == static_cast<int32_t>(rank));
  }
  uint32_t rank() const { return reply_ ? reply_->rank : ~0u; }
  uint32_t incarnation() const { return reply_ ? reply_->incarnation : 0; }
  uint64_t pushes() const { return pushes_; }
  const std::optional<Error>& error() const { return error_; }
  WorkerLink* link() { return link_ ? sim_link_ : nullptr; }  // the network's own
  // Since when it waits for the others' part of a fragment, if it does: all that it has sent should
  // be at the box. REQUIRES: the job has an OuterPlan.
  std::optional<uint64_t> waits_since_ns(uint32_t fragment) const;
  std::string describe() const;

 private:
  enum class State { kJoining, kRestoring, kRunning, kBarrier, kLeaving, kDone };

  void join();
  void on_join(const Result<JoinReply>& result);
  void on_error(ErrorCode code, const std::string& message);
  bool has_lost_server(ErrorCode code) const;
  void ask_why(const Error& error);
  void rejoin();
  void set_timer();
  void beat(std::function<void(Result<Pulse>)> done);
  void heartbeat();
  void reconnect();
  void notice_closed();
  bool train();
  bool train_in_step();
  bool train_freely();
  bool look_again();
  uint64_t latest_round() const;
  uint32_t fragment_of(uint32_t key) const;
  bool has_begun_round_after(uint32_t key) const;
  void collect(uint32_t key);
  void push(uint32_t key);
  void fill(const Contribution& from, uint32_t key);
  void carry_over();

  // trainer_outer.cc
  void begin_course();
  bool train_outer();
  bool computes() const;
  bool is_ready(uint32_t fragment) const;
  bool merge_due();
  std::optional<uint32_t> key_to_wait_for() const;
  uint64_t next_step_of(uint32_t fragment, uint64_t after) const;
  bool send_fragment();
  bool push_rest();
  void compute();
  void sleep_between_steps();

  void call_hyper();
  void finish();
  void leave();
  void misbehave();

  // trainer_parts.cc
  void restore();
  void restore_more();
  void on_restored(const Result<PartBytes>& result);
  void save(uint64_t round);
  std::string part_after(uint64_t round) const;
  struct Part {
    uint64_t round;
    std::string bytes;
    uint64_t sent = 0;  // of them
  };
  void send_part(const Part& part);
  void part_answered(const Result<Done>& result, Part part, uint64_t piece_bytes);
  void send_later(const Part& part);
  void part_ended();

  // trainer_states.cc
  struct StateTransfer;
  using Transfer = std::shared_ptr<StateTransfer>;
  void call_state();
  void begin_state(const Transfer& transfer);
  void state_begun(const Transfer& transfer, const Result<StateReply>& result);
  void read_state(const Transfer& transfer);
  void write_state(const Transfer& transfer);
  size_t sets_before_answer() const;
  void apply_state(const Transfer& transfer);
  void end_state(const Transfer& transfer);
  template <typename T>
  bool has_failed(const Transfer& transfer, const Result<T>& result);

  // trainer_branches.cc
  void call_branches();
  void change_branches(const BranchChange& change);

  void sleep();
  std::unique_ptr<WorkerLink> connect();
  void wake_when_there_is_room();
  void wake_when_parts_are_due();
  bool hung() const;
  Credential credential() const;
  ControlNet& control() const;
  ControlHandler& server() const;

  Rack& rack_;
  JobRun& job_;
  const uint32_t id_;
  const Start start_;
  const bool saves_;     // state of its own, beside residuals
  const uint32_t near_;  // the box on its host, or SimNet::kNoBox
  uint64_t started_ns_;
  std::optional<JoinReply> lost_;  // when it had its rank before, in another life of the job
  uint64_t life_ = 0;              // of the job, in which it joined
  uint32_t joins_ = 0;
  State state_ = State::kJoining;
  std::shared_ptr<Mail> mail_ = std::make_shared<Mail>();

  std::optional<JoinReply> reply_;
  std::unique_ptr<WorkerLink> link_;  // perhaps with a budget, around the network's own
  WorkerLink* sim_link_ = nullptr;
  std::shared_ptr<SimSwitch::Inbox> behind_switch_;  // of its link; null: it has no switch
  std::unique_ptr<Session> session_;
  std::unique_ptr<GradientCoder> coder_;
  std::unique_ptr<SavedRounds> saved_rounds_;
  uint32_t parts_out_ = 0;           // that are being sent
  std::deque<Part> parts_;           // that wait until fewer are
  std::vector<uint64_t> collected_;  // per key: one past the last round that was recorded
  uint32_t fragment_ = 0;            // in step: that is pushed next
  std::vector<uint32_t> to_push_;    // what is left of this round
  uint32_t wait_key_ = 0;            // and then the key that is waited for
  // Where it makes steps by itself: the next one that sends or needs something.
  struct Course {
    uint64_t steps = 0;
    uint64_t computes_until_ns = 0;  // up to that step
    uint64_t sent_at = ~uint64_t{0};
    bool ends = false;
    std::map<uint32_t, uint64_t> under_way;  // fragments, and the step that needs each
    std::vector<uint64_t> sent_ns;           // by fragment: when it was sent last
  };
  Course course_;
  uint64_t whole_since_ns_ = 0;  // it could send and receive since
  uint64_t hung_until_ns_ = 0;
  uint64_t room_at_ns_ = 0;  // while it sleeps: of its NIC's budget
  bool beating_ = false;
  bool looking_again_ = false;
  bool broadcasting_ = false;  // the initial parameters are not all there yet
  bool timer_due_ = false;
  bool reconnecting_ = false;
  bool leaving_early_ = false;
  bool asleep_ = false;
  bool closed_seen_ = false;
  bool finished_rounds_ = false, disturbed_ = false, crashed_ = false, left_ = false;
  bool lacks_part_ = false;
  std::string restored_bytes_;  // of its part, as far as they have come
  uint64_t pushes_ = 0;
  size_t hyper_calls_ = 0;
  size_t branch_calls_ = 0;
  // As it was told last, with those that are killed; and these, and whether they are on disk.
  std::vector<uint32_t> branches_ = {0};
  std::vector<BranchStatus> killed_;
  size_t state_calls_ = 0;    // that are done, or not this rank's
  uint32_t transfers_ = 0;    // that this process began
  Transfer transfer_;         // under way
  bool sets_unsure_ = false;  // a set may have been carried out, or not
  std::optional<Error> error_;
};

}  // namespace phub::sim
