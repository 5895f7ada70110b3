// What a job must have computed, from its membership log alone: every gradient is a pure function,
// the arithmetic is the scalar reference's, and one process adds in rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "phub/plan.h"
#include "tests/sim/rack_plan.h"
#include "transport/messages.h"

namespace phub::sim {

// One worker's contribution.
struct Contribution {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
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

  // After the job's end: recomputes everything that was seen. Returns what is wrong, or "".
  std::string check(const std::vector<LogRecord>& log);

  uint64_t observations() const { return observations_; }

 private:
  struct Stint {  // of one incarnation
    uint32_t rank = 0;
    uint32_t incarnation = 0;
    uint64_t first = 0;
    std::vector<uint64_t> last;  // per chunk; empty: to the end
    bool covers(uint32_t chunk, uint64_t round) const {
      return round >= first && (last.empty() || round <= last[chunk]);
    }
  };
  struct Model {  // of one chunk
    std::vector<float> parameters, state0, state1;
  };

  void fill_chunk(const Contribution& from, uint32_t chunk, std::byte* out) const;
  bool has_bad(const Contribution& from, uint32_t key) const;
  std::string read_log(const std::vector<LogRecord>& log);
  kernels::Hyper hyper_of(uint32_t key, uint64_t round) const;
  std::string replay(uint32_t chunk);
  std::string compute_round(uint32_t chunk, uint64_t round, Model& model);
  std::string check_digits(uint32_t chunk, uint64_t round,
                           const std::vector<Contribution>& counted) const;

  // Of jobs that are not in lock-step.
  struct History;
  History history_of(uint32_t rank, uint32_t chunk) const;
  std::string check_clocks(uint32_t chunk) const;
  std::string check_clock(const Contribution& by, uint32_t chunk, const History& history,
                          uint32_t rank, size_t count) const;

  const JobPlan& job_;
  const Plan& plan_;
  kernels::Optimizer optimizer_;
  kernels::DType gradient_dtype_, parameter_dtype_;
  std::vector<std::vector<float>> initial_;                       // per key
  std::vector<uint32_t> first_chunk_;                             // per key, and one past the last
  std::vector<std::map<uint64_t, std::vector<std::byte>>> seen_;  // per chunk: round → result
  // Of jobs that are not in lock-step, per chunk: who had what.
  std::vector<std::vector<std::pair<Contribution, std::vector<std::byte>>>> seen_out_of_step_;
  std::set<std::pair<uint64_t, std::pair<uint32_t, uint64_t>>> witnessed_;
  uint64_t observations_ = 0;

  // From the log.
  std::vector<Stint> stints_;
  std::set<std::pair<std::pair<uint32_t, uint64_t>, uint32_t>> excluded_;  // chunk, round, rank
  std::vector<HyperChange> changes_;
};

}  // namespace phub::sim
