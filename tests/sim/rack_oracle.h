// What a job must have computed, from its membership log alone: every gradient is a pure function,
// the arithmetic is the scalar reference's, and one process adds in rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "phub/plan/plan.h"
#include "tests/oracle/replay.h"
#include "tests/sim/rack_plan.h"
#include "transport/control/branch_messages.h"
#include "transport/control/messages.h"
#include "transport/control/state_messages.h"

namespace phub::sim {

// One worker's contribution.
struct Contribution : Member {
  uint64_t round = 0;
};

class Oracle {
 public:
  Oracle(const JobPlan& job, const Plan& plan);

  // The gradients. They differ by rank, incarnation and round.
  bool is_null(const Contribution& from, uint32_t key) const;
  float weight_of(const Contribution& from, uint32_t key) const;  // 1 unless the job has weights
  void fill_key(const Contribution& from, uint32_t key, std::span<std::byte> out) const;
  const std::vector<float>& initial(uint32_t key) const { return initial_[key]; }

  // A worker has the result of a key's round before it. `pushed`: it took part in that round.
  // Returns what is wrong, or "": in lock-step every worker must see the same bytes.
  std::string saw(const Contribution& by, uint32_t key, std::span<const std::byte> result,
                  bool pushed);
  // And what it was told of the round.
  std::string was_told(const Contribution& by, const std::optional<RoundVerdict>& verdict,
                       bool pushed);

  // What it would have sent of this chunk is carried over to its next round.
  void carried(const Contribution& from, uint32_t chunk) {
    carried_.insert({Member(from), chunk, from.round});
  }

  // The job goes on from a checkpoint of the round before: what was seen of `round` and later ones
  // is void, and everything if it is not in lock-step.
  void undo_from(uint64_t round);

  // A rank's incarnation; in a life that is taken back there may have been one of the same number.
  // What each that saves has of its own after a round is a function of both.
  void joined(const Member& who, bool saves);
  std::string part_of(const Contribution& by) const;
  // A rank goes on from a checkpoint, with its first round right behind; `part` is what it got.
  void restored(const Contribution& with, std::optional<std::string> part);

  // The state of keys. What a rank sets is a function of who it is and which of its calls this is.
  struct SetCall {
    Member who;
    uint32_t nth = 0;
    std::vector<uint32_t> keys;
    std::optional<uint64_t> round;  // from which it holds, if it was told
    bool is_void = false;           // it was told in a life that was taken back

    uint64_t steps(uint32_t key) const { return (who.incarnation * 31 + nth * 7 + key) % 50; }
  };
  std::vector<float> state_of(const SetCall& call) const;  // as it is sent
  // It may be carried out from now on. There may be one call of a rank whose round is not told, as
  // the root's log names ranks.
  void may_set(const SetCall& call) { sets_.push_back(call); }
  void did_set(const SetCall& call, uint64_t round);
  // The answer to a get, which came when so many sets were in the log.
  void got(const std::vector<uint32_t>& keys, const StateReply& reply, std::string_view bytes,
           size_t sets);

  // What a rank was told of branches, which had the results of all rounds up to `complete` when it
  // asked: which one runs in the next round does not change any more.
  void heard_of_branches(uint64_t complete, const BranchChange& change, const BranchReply& reply);

  // After the job's end: recomputes everything that was seen. Returns what is wrong, or "".
  std::string check(const std::vector<LogRecord>& log);

  uint64_t observations() const { return observations_; }
  uint64_t rounds() const;  // of fragments, that somebody has the result of; in lock-step
  uint64_t states() const { return states_; }  // of chunks, that were compared
  uint64_t forks() const { return forks_; }    // of rounds that somebody has the result of
  uint64_t switches() const { return switches_; }
  // From checkpoints that had more than one branch, or what was to come of them.
  uint64_t restored_with_branches() const { return restored_with_branches_; }
  uint64_t revived_runs() const { return revived_runs_; }  // of branches that had been killed

 private:
  using Witness = std::tuple<Member, uint32_t, uint64_t>;  // who, chunk, round

  void fill_chunk(const Contribution& from, uint32_t chunk, std::byte* out) const;
  void fill_factors(const Contribution& from, uint32_t chunk, std::byte* out) const;
  void fill_rows(const Contribution& from, uint32_t chunk, std::byte* out) const;
  float exact_value(uint32_t key, uint64_t hash) const;
  void fix_scale(const ChunkLayout& chunk, std::byte* gradient) const;
  uint32_t digit_elements(const ChunkLayout& chunk) const;
  bool has_bad(const Contribution& from, uint32_t key) const;
  // Whether one of the ranges has some of the chunk. `of`: KeyInterest::writes or reads.
  bool touches(uint32_t rank, uint32_t chunk, std::vector<ElementRange> KeyInterest::*of) const;

  // These throw Error that says what is wrong.
  void check_witnesses(const Participation& participation) const;
  void check_parts(const Participation& participation) const;
  std::optional<Member> heritage(const Member& who, const Participation& participation) const;
  Replay replay_of(uint32_t chunk, const Participation& participation,
                   const HyperHistory& hyper) const;
  using MostSteps = std::map<size_t, uint64_t>;  // of a key's chunks, by SeenState::key
  void check_rounds(Replay replay, uint32_t chunk, const std::vector<SetCall>& sets,
                    MostSteps& most_steps) const;
  void check_branches(const HyperHistory& history);
  void check_killed(uint32_t branch, bool kills, uint64_t round, const HyperHistory& history) const;
  void check_gated_rounds(GatedReplay replay) const;
  static std::string members_of(const Replay& replay);
  void check_round(uint32_t chunk, const Replay& replay) const;

  // rack_oracle_states.cc
  struct SeenState {  // of a chunk, by a get
    uint64_t round = 0;
    size_t sets = 0;
    size_t key = 0;  // counts keys in all gets
    Replay::State state;
  };
  std::vector<SetCall> sets_in(const std::vector<LogRecord>& log) const;
  Replay::State state_of(const SetCall& call, uint32_t chunk) const;
  void set_before_next(Replay& replay, uint32_t chunk, const std::vector<SetCall>& sets) const;
  void check_states(uint32_t chunk, const Replay& replay, const std::vector<SetCall>& sets,
                    MostSteps& most_steps) const;
  void check_steps(const MostSteps& most_steps) const;
  Replay::State slice(uint32_t chunk, std::span<const float> key) const;
  void check_digits_of(uint32_t chunk, const Replay& replay, std::span<const std::byte> seen) const;

  // Of jobs that are not in lock-step.
  struct Update;
  struct Share;
  struct Branch;
  std::vector<Update> updates_of(uint32_t rank, uint32_t chunk, const Participation& participation,
                                 std::span<const LogRecord> log) const;
  std::map<uint32_t, Branch> branches_of(uint32_t chunk, const Participation& participation,
                                         std::span<const LogRecord> log) const;
  void check_clocks(uint32_t chunk, const Participation& participation, const HyperHistory& hyper,
                    std::span<const LogRecord> log) const;
  std::string check_clock(const Contribution& by, uint32_t chunk, const Share& share, uint32_t rank,
                          size_t count, uint64_t least, const Participation& participation) const;

  const JobPlan& job_;
  const Plan& plan_;
  const std::vector<ChunkPlace> places_;
  kernels::DType parameter_dtype_;
  std::vector<std::vector<float>> initial_;                       // per key
  std::vector<uint32_t> first_chunk_;                             // per key, and one past the last
  std::vector<std::map<uint64_t, std::vector<std::byte>>> seen_;  // per chunk: round → result
  // Of jobs that are not in lock-step, per chunk: who had what.
  std::vector<std::vector<std::pair<Contribution, std::vector<std::byte>>>> seen_out_of_step_;
  std::set<Witness> witnessed_;
  std::set<Witness> carried_;
  std::map<uint64_t, RoundVerdict> told_;  // of gated rounds
  uint64_t restored_ = 0;                  // the round of the checkpoint that it goes on from
  std::map<Member, bool> saves_;
  // Who went on after a round, and with what.
  std::vector<std::pair<Contribution, std::optional<std::string>>> parts_;
  std::vector<SetCall> sets_;
  std::vector<std::vector<SeenState>> seen_states_;  // by chunk
  size_t seen_keys_ = 0;
  std::vector<std::pair<uint64_t, uint32_t>> told_to_run_;  // round, branch
  std::vector<std::pair<BranchChange, BranchReply>> decided_;
  uint64_t observations_ = 0, states_ = 0, forks_ = 0, switches_ = 0;
  uint64_t restored_with_branches_ = 0, revived_runs_ = 0;
  std::vector<uint64_t> restored_rounds_;
};

}  // namespace phub::sim
