// What a job must have computed, from its membership log alone: every gradient is a pure function,
// the arithmetic is the scalar reference's, and one process adds in rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "phub/plan/plan.h"
#include "tests/oracle/replay.h"
#include "tests/sim/rack_plan.h"
#include "transport/control/messages.h"

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
  void fill_key(const Contribution& from, uint32_t key, std::span<std::byte> out) const;
  const std::vector<float>& initial(uint32_t key) const { return initial_[key]; }

  // A worker has the result of a key's round before it. `pushed`: it took part in that round.
  // Returns what is wrong, or "": in lock-step every worker must see the same bytes.
  std::string saw(const Contribution& by, uint32_t key, std::span<const std::byte> result,
                  bool pushed);

  // The job goes on from a checkpoint: what was seen of `round` and later ones is void, and
  // everything if it is not in lock-step.
  void undo_from(uint64_t round);

  // After the job's end: recomputes everything that was seen. Returns what is wrong, or "".
  std::string check(const std::vector<LogRecord>& log);

  uint64_t observations() const { return observations_; }

 private:
  using Witness = std::tuple<Member, uint32_t, uint64_t>;  // who, chunk, round

  void fill_chunk(const Contribution& from, uint32_t chunk, std::byte* out) const;
  bool has_bad(const Contribution& from, uint32_t key) const;

  // These throw Error that says what is wrong.
  void check_witnesses(const Participation& participation) const;
  void check_rounds(uint32_t chunk, const Participation& participation,
                    const HyperHistory& hyper) const;
  void check_digits_of(uint32_t chunk, const Replay& replay, std::span<const std::byte> seen) const;

  // Of jobs that are not in lock-step.
  struct History;
  History history_of(uint32_t rank, uint32_t chunk, const Participation& participation) const;
  void check_clocks(uint32_t chunk, const Participation& participation) const;
  std::string check_clock(const Contribution& by, uint32_t chunk, const History& history,
                          uint32_t rank, size_t count, const Participation& participation) const;

  const JobPlan& job_;
  const Plan& plan_;
  kernels::DType gradient_dtype_, parameter_dtype_;
  std::vector<std::vector<float>> initial_;                       // per key
  std::vector<uint32_t> first_chunk_;                             // per key, and one past the last
  std::vector<std::map<uint64_t, std::vector<std::byte>>> seen_;  // per chunk: round → result
  // Of jobs that are not in lock-step, per chunk: who had what.
  std::vector<std::vector<std::pair<Contribution, std::vector<std::byte>>>> seen_out_of_step_;
  std::set<Witness> witnessed_;
  uint64_t observations_ = 0;
};

}  // namespace phub::sim
