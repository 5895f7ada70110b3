// A job's parameters and arrays, as its cores need to know them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/state8.h"
#include "phub/core/messages.h"
#include "phub/job_rules.h"
#include "transport/control/rank_tree.h"
#include "transport/format_schedule.h"
#include "transport/layout.h"

namespace phub {

// Results that come back as differences of the parameters from the view that all ranks have of
// them, in a coded format. Each is added to the view, so a part that the format cannot hold is in
// the next difference.
struct Differences {
  kernels::DType format = kernels::DType::kF32;  // a coded one
  bool stochastic = false;
  uint64_t job = 0;              // rounding_seed()
  uint64_t box_elements = 0;     // all results' at the box,
  uint64_t worker_elements = 0;  // and those at a worker
};

// Every core of a job has the same parameters.
struct JobParameters {
  uint32_t max_ranks = 1;
  std::vector<uint32_t> rack_ranks = {};  // the ranks are racks with so many ranks each; else empty
  JobRules rules = {};
  std::optional<Differences> differences = {};  // if rules.difference
  RankTree tree = {};                           // the order of additions
  bool slots_belong_to_worker = false;
  uint32_t progress_limit_ms = 60'000;  // JobSpec
  uint64_t slack = kNever;  // not in lock-step: how far a rank may be ahead of the slowest
  kernels::Store store = kernels::kDefaultStore;
  uint64_t first_round = 0;  // begins with the arrays' values; 0: the job's beginning
  bool has_parent =
      false;  // results come from the parent, also that before first_round (uplinked.h)
  std::vector<FormatSchedule> schedules = {};  // CoreChunk::schedule
};

inline ResultFormat result_format(const JobParameters& parameters) {
  const auto& differences = parameters.differences;
  return {
      .element_bytes = static_cast<uint32_t>(kernels::bytes_of(parameters.rules.parameter_dtype)),
      .difference =
          differences ? find_slot_format(kernels::name_of(differences->format)) : nullptr};
}

// A job's progress by chunk, as a checkpoint keeps it.
struct SavedClocks {
  uint64_t* steps = nullptr;   // [chunk]: steps that the optimizer has made
  uint64_t* latest = nullptr;  // [chunk][ranks]: round of the rank's last update there; 0: none
  uint32_t ranks = 0;          // the most ranks that the job ever had; lock-step: 0

  uint64_t* of(uint32_t chunk) const { return latest + size_t{chunk} * ranks; }
  static constexpr uint64_t bytes(uint64_t chunks, uint64_t ranks) {
    return chunks * (ranks + 1) * sizeof(uint64_t);
  }
};

// The memory of shelves (branch_orders.h), with the content of each place before any order. Each
// array is laid out as those of the branch that runs.
struct ShelfArrays {
  std::span<float* const> arrays = {};    // [shelf][each]: parameters, and the optimizer's states
  std::span<uint64_t* const> steps = {};  // [shelf][chunk]: that the optimizer made
  size_t each = 0;
};

// The memory of snapshots: f32 arrays, laid out as the arrays of which they are copies. Null means
// that no copy is taken of that array. Either all shelves are copied or none.
struct SnapshotArrays {
  float* parameters = nullptr;
  float* state0 = nullptr;
  float* state1 = nullptr;
  float* view = nullptr;
  SavedClocks clocks = {};
  ShelfArrays shelves = {};
};

// Where a chunk's part of the optimizer's states lies, if keys have less state than elements: it
// has the first elements of both, as they would lie beside the chunk's parameters.
struct StatePiece {
  std::array<uint64_t, 2> offset = {};  // by state array, in elements
  std::array<uint32_t, 2> elements = {};
};

// Arrays of the whole job, laid out as the box's memory (offsets in elements); a core touches only
// its chunks.
struct JobArrays {
  std::byte* results = nullptr;  // parameter_dtype; the values that are written back
  uint64_t result_stride = 0;    // bytes; not in lock-step every rank has results of its own
  float* parameters = nullptr;   // f32; results' memory if those are f32; null: not needed
  float* state0 = nullptr;
  float* state1 = nullptr;
  std::array<kernels::State8, 2> state8 = {};  // in place of these two
  // By chunk of the job; empty: the states are laid out as the parameters.
  std::span<const StatePiece> state_pieces = {};
  float* new_state = nullptr;  // as state0, of keys that are stepped as a whole (key_steps.h)
  float* view = nullptr;       // f32: the results, if they come back as differences; else null
  float* sums = nullptr;       // f32; a gated round's; null: the job is not gated
  SnapshotArrays copy = {};
  ShelfArrays shelves = {};
};

}  // namespace phub
