// A job in lock-step, chunk by chunk, recomputed round by round from the job's membership log:
// gradients are functions of who sent them, the arithmetic is reference.h's, and one process adds
// in rank order, or in that of the job's groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/oracle/coded.h"
#include "tests/oracle/groups.h"
#include "tests/oracle/participation.h"
#include "tests/oracle/reference.h"
#include "tests/oracle/whole_steps.h"
#include "transport/control/job_spec.h"
#include "transport/control/messages.h"
#include "transport/verdict.h"

namespace phub {

// The hyperparameters of each key and round: the job's, its schedule's, then those that the log
// says were set; of the same round the later ones count. And what became of its branches.
class HyperHistory {
 public:
  // Throws Error(kInvalid): the log says of branches what cannot be.
  HyperHistory(const JobSpec& spec, std::span<const LogRecord> log);
  reference::Hyper of(uint32_t key, uint64_t round) const;
  // Forks, what was scheduled and discarded, by ascending round.
  std::span<const LogRecord> branches() const { return branches_; }
  std::span<const LogRecord> kills() const { return kills_; }  // and revivals, likewise
  uint32_t branch_in(uint64_t round) const;                    // which one runs
  // Of branches that had been killed: how often one of them went on before a round up to `last`.
  uint64_t revived_runs(uint64_t last) const;

 private:
  void follow_killed(std::span<const LogRecord> log);

  const JobSpec& spec_;
  std::vector<HyperChange> changes_;  // by ascending round
  std::vector<uint64_t> revived_;     // rounds from which one that had been killed ran
  std::vector<LogRecord> branches_, kills_;
};

class Replay {
 public:
  // Writes the gradient of this chunk that `from` pushed in `round`, in the format that it has in
  // memory. False: null.
  using Gradient = std::function<bool(const Member& from, uint64_t round, std::byte* out)>;
  // Whose residuals a member began with, as they were after its last round; nothing: with zero.
  using Heritage = std::function<std::optional<Member>(const Member& who)>;

  // The weight of what `from` pushed in `round`, in a job with weights.
  using Weight = std::function<float(const Member& from, uint64_t round)>;

  // `initial`: the chunk's parameters before the first round. All references outlive the replay.
  // Without `heritage` everyone begins with residuals of zero.
  Replay(const JobSpec& spec, const Participation& participation, const HyperHistory& hyper,
         uint32_t chunk, std::vector<float> initial, Gradient gradient, Heritage heritage = {},
         Weight weight = {});

  // A round without members (everybody who knew it is gone) changes nothing. Throws Error(kInvalid)
  // when the round could not complete, or the log excludes others than those that had to be.
  void next_round();
  // The same in two halves: first the gradient is summed up; then it is applied, times a factor, or
  // the round is skipped.
  void sum_round();
  const std::vector<float>& gradient() const { return sum_; }  // empty: there were no members
  void apply_round(float factor, const reference::Norms& norms = {});
  // Between them, in a job with trust ratios: what the chunk adds to the norms of its key.
  reference::Norms squares() const;
  uint32_t key() const { return place_.key; }
  // Likewise, in a job with steps of whole keys. A chunk that is left out has a gradient of zero.
  reference::Hyper hyper() const { return model_.hyper; }
  uint64_t step_number() const { return round_ + steps_offset_ - skipped_; }
  bool leaves_out() const;  // the summed round is no step
  // Applies the part of its key's step that begins at this element of the key.
  void apply_part(const reference::WholeStep& step, size_t first);
  void skip_round();
  // After it: what is to be another branch goes on from what that has.
  void end_round();

  // A rank has set this state: it is the one before the next round, of which the optimizer has made
  // so many steps.
  struct State {
    std::vector<float> parameters, state0, state1;  // those that the optimizer has
    uint64_t steps = 0;
  };
  void set(State state);

  uint64_t round() const { return round_; }  // the latest
  const std::vector<Member>& counted() const { return counted_; }
  uint64_t sent_for(uint32_t rank) const { return participation_.sent_for(round_, chunk_, rank); }
  const std::vector<float>& parameters() const { return model_.params; }
  State state() const;
  // What workers have of the parameters, in its format.
  std::vector<std::byte> result() const;

 private:
  void receive();
  std::vector<std::byte> received(const Member& from, uint64_t round,
                                  std::vector<std::byte> gradient);
  float weight_of(const Member& from, uint64_t sent_for) const;
  void weigh(const Member& from);
  double sum_of_weights() const;
  void step_rows();
  void send_difference();
  std::vector<float>& residual_of(const Member& who);
  bool add(float factor, std::vector<float>& sum);
  bool is_finite(const Member& from) const;

  const JobSpec& spec_;
  const Participation& participation_;
  const HyperHistory& hyper_;
  const uint32_t chunk_;
  const ChunkPlace place_;
  const reference::Group groups_;  // of all ranks that the job may have
  const bool coded_;
  const bool int32_;
  const reference::DType gradient_dtype_, result_dtype_;  // that of gradients is in memory
  const Gradient gradient_;
  const Heritage heritage_;
  const Weight weight_;
  const bool weighs_;  // contributions have weights: their ranks say so, or they decay
  reference::Model model_;
  std::vector<float> view_;  // of workers, where results come back as differences; else empty
  uint64_t round_ = 0;
  uint64_t steps_offset_ = 0;                           // steps - round_ + skipped_, modulo 2^64
  uint64_t skipped_ = 0;                                // rounds
  std::map<Member, std::vector<float>> residuals_;      // of a coded key
  std::map<Member, std::vector<std::byte>> gradients_;  // of this round, those that are not null;
                                                        // of int32 the slots
  std::map<Member, float> weights_;                // of this round, if it weighs, nulls included
  std::map<Member, std::vector<float>> weighted_;  // gradients_ times these
  std::vector<float> sum_;
  bool unused_ = false;  // by those who are counted in it
  std::vector<Member> counted_;
  uint32_t branch_ = 0;               // that runs
  std::map<uint32_t, State> others_;  // branches
};

// All chunks of a job whose rounds are gated, in step.
class GatedReplay {
 public:
  static bool is_gated(const JobSpec& spec);

  // `chunks` in order. References outlive the replay.
  GatedReplay(const JobSpec& spec, const HyperHistory& hyper, std::vector<Replay> chunks);

  void next_round();  // throws as Replay does
  const Replay& chunk(uint32_t chunk) const { return chunks_[chunk]; }
  const RoundVerdict& verdict() const { return verdict_; }  // on the latest round

 private:
  std::vector<reference::Norms> norms_of_keys() const;
  void step_whole_key(std::span<Replay> chunks);

  const JobSpec& spec_;
  const HyperHistory& hyper_;
  std::vector<Replay> chunks_;
  RoundVerdict verdict_;
};

// The base-4 oracle, which owes nothing to the arithmetic above: every rank sends 4^(rank - first),
// so the digits of `sum` say how often each of `ranks` ranks was counted. What is wrong, or "".
std::string check_digits(float sum, uint32_t first, uint32_t ranks,
                         const std::function<bool(uint32_t rank)>& counted);

}  // namespace phub
