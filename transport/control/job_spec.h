// The options of a job: everything that its workers must agree on. Decided at creation, handed out
// at join.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/choices.h"
#include "transport/slot_format.h"
#include "transport/wire.h"

namespace phub {
namespace json {
struct Field;
}

// The elements before `end`, and behind those of the range before, are exchanged by these ranks.
struct ExchangedRange {
  uint64_t end = 0;
  std::vector<uint64_t> ranks = {};  // bit r % 64 of word r / 64 for each rank r

  friend bool operator==(const ExchangedRange&, const ExchangedRange&) = default;
};

struct KeySpec {
  std::string name;
  uint64_t elements = 0;
  int32_t priority = 0;      // higher goes first where something has to wait
  double lr_scale = 1.0;     // the job's learning rate times this
  double decay_scale = 1.0;  // the job's weight decay times this
  // The shape as the caller sees the elements, the last dimension varying fastest; saved tensors
  // have it. Their product is `elements`. Empty: [elements].
  std::vector<uint64_t> shape = {};
  uint32_t group = 0;  // hyperparameters may have values for one group (HyperName)
  // In a job with a quorum: who takes part in a round is decided for the keys of a fragment, from 0
  // to below kMaxFragments; no number below the last is left out. Ranks may be at different ones.
  // Without a quorum a round of a key waits for all ranks, whatever its fragment.
  uint32_t fragment = 0;
  std::string format = "";  // the format of its gradients on the wire; "": the job's gradient_dtype
  // For a matrix, whose shape has two dimensions. A rank sends its gradient as at most so many
  // pairs of vectors, whose outer products are added up at the server; all devices of a process
  // together. Its format is "factors", and its chunks are whole rows. (If the ranks are racks, it
  // is "f32": they send whole sums, of the same chunks.) 0: the gradient is sent as it is.
  uint32_t rank_limit = 0;
  // Likewise: a rank sends the rows of its gradient that are not zero, at most so many in a round,
  // each with its index. Its format is "rows", and its chunks are whole rows. 0: all are sent.
  // With a rank_limit, too, each push is of rows or of pairs, and rows_limit is all rows.
  uint32_t rows_limit = 0;
  // For a key that sends rows: the optimizer's step of a round changes the rows that somebody sent,
  // and leaves alone parameters and state of the others. False: their gradient is zero, and the
  // step is made.
  bool lazy = false;
  // In a job with optimizer "fold", whose keys are arrays of values, the operation that joins the
  // values of the ranks, in rank order, and then the state and the outcome: "add", "multiply",
  // "min", "max" or "or". With optimizer "none" the outcome of each round is the result. A rank
  // that sends nothing leaves all as it is. The values' type is "f32",
  // "f64", "i32" or "i64"; "": f32. Elements are words of 4 bytes: a value of 64 bits is two, a row
  // has whole values.
  std::string operation = "";
  std::string value_type = "";
  uint32_t tile_rows = 0;  // rows of a chunk of either kind; 0: the server decides
  // The ranks that write or read each range of its elements (KeyInterest), if that is known when
  // the job is created: ascending, the last one up to its elements. A chunk is exchanged by all
  // ranks that have some of it; boxes, cores and NICs share chunks by the bytes that travel. Empty:
  // all of it by all ranks.
  std::vector<ExchangedRange> exchanged_by = {};

  friend bool operator==(const KeySpec&, const KeySpec&) = default;
};

// A hyperparameter's name in a map of values: "lr" is for all groups of keys, "lr@2" for group 2.
// Where a map has both, the group's own counts.
struct HyperName {
  std::string_view field;
  std::optional<uint32_t> group;
};
// Returns nullopt if the text behind the '@' is not a number below kMaxHyperGroups in plain digits:
// "12".
std::optional<HyperName> parse_hyper_name(std::string_view name);

// From this round on, these hyperparameters have these values ("lr": 0.1, …).
struct HyperChange {
  uint64_t round = 1;
  std::map<std::string, double> values;

  friend bool operator==(const HyperChange&, const HyperChange&) = default;
};

struct JobSpec {
  std::string name;
  std::vector<KeySpec> keys;
  uint32_t world_size = 1;  // ranks 0 … world_size-1 are there from round 1 on
  uint32_t min_ranks = 0;   // with these it begins if not all come in time; 0: world_size
  uint32_t max_ranks = 0;   // 0: world_size. Memory is fixed for this many
  // A round of a fragment is complete once so many ranks have sent all of its keys and `grace_ms`
  // is over, or all ranks have. Ranks that are late then take part in its next round. 0: it waits
  // for all.
  uint32_t quorum = 0;
  uint32_t grace_ms = 0;  // how long a round waits for the other ranks once its quorum is there
  // "auto": the box chooses this time by the round from what it measured, at most `grace_ms` unless
  // that is 0 (phub/job/quorum_grace.h).
  Choice<Grace> grace = Grace::kFixed;
  // What a contribution that is some rounds late is multiplied by, once for each round; from 0,
  // which drops it, to 1. With a quorum (late_factor() in transport/contribution_weight.h).
  double late_decay = 1.0;
  uint32_t chunk_elements = 8192;  // a multiple of 32
  std::string optimizer = "none";
  std::map<std::string, double> hyper;  // other values than the optimizer's defaults
  std::vector<HyperChange> schedule;    // by ascending round
  // How the box keeps the optimizer's states, or "8bit" (kernels/state8.h).
  Choice<StateFormat> state_dtype = StateFormat::kF32;
  std::string gradient_dtype = "f32";             // the format of keys without one of their own
  std::string parameter_dtype = "f32";            // results; coded: they come as differences
  Choice<Reduction> reduction = Reduction::kSum;  // or "mean"
  // "yes": each push has a weight, which multiplies its gradient in the sum, and a mean divides by
  // the sum of the weights (transport/contribution_weight.h).
  Choice<Weights> weights = Weights::kNo;
  // Order of additions: "4,4" adds within two groups of four ranks, then their sums (rank_tree.h).
  // All of max_ranks, in lock-step. "": ascending ranks.
  std::string groups;
  // The ranks are racks (boxes with a parent), each the sum of so many of the training's ranks.
  // Their gradients are f32, and say how many of these took part. Empty: they are the training's.
  std::vector<uint32_t> rack_ranks;
  // The one rack is a box with the same job, which this one stands by for (phub/job/standby.h).
  bool mirrors = false;
  // By rank, the number of its machine (numa/host.h), if that is known when the job is created; 0,
  // and ranks behind the last: unknown. If several boxes serve the job, a chunk lies at the machine
  // of the ranks that exchange it, as far as the boxes stay balanced (phub/plan/homes.h).
  std::vector<uint64_t> rank_hosts = {};
  Choice<Work> work = Work::kAll;  // "sum": no optimizer; "none": only completes (benchmarks)
  // "bsp": a round sums all gradients, then everyone goes on. "ssp", "async": each gradient is
  // applied when it comes (one step of the optimizer, or with "none" plain addition to the
  // parameters), and a rank may be `slack` rounds ahead of the slowest, or as far as it likes.
  Choice<Consistency> consistency = Consistency::kBsp;
  uint32_t slack = 0;
  Choice<Initial> initial = Initial::kZeros;  // or "broadcast": rank 0 sends them before round 1
  Choice<OnLoss> on_loss = OnLoss::kShrink;   // "wait", "fail", "stop"
  Choice<OnNonFinite> on_nonfinite = OnNonFinite::kStop;  // "exclude", "pass", "skip"
  Choice<Unused> unused = Unused::kZero;  // "skip": elements without a gradient stay as they are
  // The number of branches that the box keeps beside the one that runs: states of the model, each
  // with hyperparameters of its own, of which one runs in each round (branch_messages.h).
  uint32_t branches = 0;
  // "no": a server that keeps checkpoints takes none of this job, which begins anew after it.
  Choice<Saved> saved = Saved::kYes;
  Choice<RoundingMode> rounding =
      RoundingMode::kNearest;  // or "stochastic": of gradients in coded formats
  uint32_t lease_ms = 3000;
  uint32_t progress_limit_ms = 60000;  // a rank that the others wait for longer than this is lost
  uint32_t wait_limit_ms = 60000;      // on_loss wait: how long the job pauses for a lost rank
  uint32_t join_limit_ms = 60000;      // the time that the first ranks wait for the last

  friend bool operator==(const JobSpec&, const JobSpec&) = default;
};

// The optimizer of jobs whose keys have operations.
inline constexpr std::string_view kFoldOptimizer = "fold";

// Limits that hold before anything is allocated.
inline constexpr size_t kMaxKeys = 1u << 20;
inline constexpr size_t kMaxNameBytes = 255;
inline constexpr uint64_t kMaxElements = 1ull << 40;  // limit of a job
inline constexpr size_t kMaxKeyDimensions = 8;
inline constexpr size_t kMaxExchangedRanges = 1u << 16;  // limit of a key
inline constexpr uint32_t kMaxHyperGroups = 256;
inline constexpr uint32_t kMaxFragments = 256;
inline constexpr uint32_t kMaxBranches = 255;  // beside the one that runs
inline constexpr uint32_t kMaxRankLimit = (1u << 20) - 1;
inline constexpr uint32_t kMaxRowsLimit = kMaxRankLimit;
inline constexpr uint32_t kMaxTileColumns = (1u << 20) - 1;  // limit of a key whose chunks are rows
inline constexpr uint32_t kMaxChunkElements = 1u << 24;
inline constexpr size_t kMaxGroupEntries = 1u << 18;  // the entries of a schedule, times the groups

// The product of the dimensions; nullopt if one is 0, or if it is more than kMaxElements.
std::optional<uint64_t> elements_in(std::span<const uint64_t> shape);

// The groups that its keys are of: from 0 to one below this.
uint32_t hyper_groups(const JobSpec& spec);
// The fragments that its keys are of, likewise.
uint32_t fragments_of(const JobSpec& spec);
// How many ranks it may have at a time: max_ranks, or world_size if that is 0.
inline uint32_t most_ranks(const JobSpec& spec) {
  return spec.max_ranks == 0 ? spec.world_size : spec.max_ranks;
}

// Throws Error(kInvalid) that names the field and the value: empty or duplicate names, zero or too
// many elements, a shape that has another number of them, unknown words, ranks, limits or groups
// out of range, groups of other ranks, unordered schedule, options that do not go together
// (rules.h). (Whether names of hyperparameters fit
// the optimizer is checked by the server, which knows them.)
void validate(const JobSpec& spec);

// The format of the key's gradients, or a schedule of formats (format_schedule.h).
inline const std::string& gradient_format(const JobSpec& spec, const KeySpec& key) {
  return key.format.empty() ? spec.gradient_dtype : key.format;
}

// The elements of all keys whose gradients have a coded format, or a schedule.
uint64_t coded_elements(const JobSpec& spec);
uint64_t elements_of(const JobSpec& spec);

// Gives the keys whose names match the pattern (fnmatch(3): "*.weight", "layer?.*") this format of
// gradients. Returns how many there are. The last call that matches a key counts.
size_t set_format(JobSpec& spec, const std::string& pattern, const std::string& format);

// Factors are sent of the keys whose names match, as KeySpec::rank_limit says; 0: no longer.
// Returns how many there are. (Whether they can be is found by validate().)
size_t set_factors(JobSpec& spec, const std::string& pattern, uint32_t rank_limit);

void set_rank_limit(KeySpec& key, uint32_t rank_limit);  // the same of one

// Rows are sent of the keys whose names match, as KeySpec::rows_limit says. Returns how many there
// are.
size_t set_rows(JobSpec& spec, const std::string& pattern, uint32_t rows_limit, bool lazy);
void set_rows_limit(KeySpec& key, uint32_t rows_limit, bool lazy);  // the same of one

// Keys are arrays of values with operations: all of them, or none.
inline bool folds(const JobSpec& spec) {
  return spec.optimizer == kFoldOptimizer ||
         (spec.optimizer == "none" && !spec.keys.empty() && !spec.keys.front().operation.empty());
}
inline std::string_view value_type_of(const KeySpec& key) {
  return key.value_type.empty() ? "f32" : std::string_view(key.value_type);
}

inline bool is_factors(const KeySpec& key) { return key.format == kFactors; }
inline bool is_rows(const KeySpec& key) { return key.format == kRows; }
// Its gradient is sent in another form than its elements.
inline bool is_compact(const KeySpec& key) { return is_factors(key) || is_rows(key); }
// Its chunks are whole rows: its gradient is compact, here or where the ranks of a rack send it.
inline bool has_tiles(const KeySpec& key) { return key.rank_limit > 0 || key.rows_limit > 0; }
// A chunk of a key with tiles has a multiple of rows_together() rows, so that it has a multiple of
// kChunkAlignment elements, and at most most_tile_rows(); 0: not even one such multiple is
// possible.
uint32_t rows_together(const KeySpec& key);
uint32_t most_tile_rows(const KeySpec& key);
// Rows of a chunk. Keys with factors get as many chunks as `cores`, if they may be so large, since
// each chunk gets the right vectors of all. Keys with rows get chunks of about chunk_elements, as a
// result is a whole chunk. Keys with either get kTilesOfEither chunks, if they may be so large: the
// result of one comes while the rows of the next are sent. More would be longer slots, since each
// has room for all right vectors.
inline constexpr uint64_t kTilesOfEither = 8;
uint32_t tile_rows_for(const KeySpec& key, uint64_t cores, uint32_t chunk_elements);

// The format of a key's gradients in the worker's memory: theirs if that is plain. Coded ones are
// f32 there, and coded when they are pushed; so are factors and rows, and what has a weight.
const std::string& gradient_memory_format(const JobSpec& spec, const KeySpec& key);

// Results come back as differences if the format of parameters is coded: the worker's view of them
// is f32. Null: they come back as they are.
const SlotFormat* difference_format(const JobSpec& spec);
// The format of results in memory.
const std::string& parameter_memory_format(const JobSpec& spec);

// FNV-1a, 64 bits: it stands for the job in the random numbers of its rounding.
uint64_t rounding_seed(std::string_view job);

// Gradients come without a scale, in all rounds.
void drop_grad_scale(JobSpec& spec);
// Has every round wait for all ranks.
void wait_for_all_ranks(JobSpec& spec);

bool clips(const JobSpec& spec);  // a norm may be clipped: max_norm is given
// Its optimizer makes steps by norms of whole keys: lars, lamb.
bool adapts_by_key(const JobSpec& spec);
// Its optimizer makes steps of whole keys: adafactor, muon.
bool steps_whole_keys(const JobSpec& spec);
// Whether its rounds are applied as a whole: norms may be clipped, or rounds skipped, or steps are
// made by norms of keys, or of whole keys.
bool is_gated(const JobSpec& spec);
// Each rank has a copy of the results at the box: the parameters change while it reads them.
bool has_own_results(const JobSpec& spec);

// The arrays of state that the job's optimizer keeps of every key, in order, as PyTorch names them;
// none: it keeps none, or is unknown.
std::vector<std::string_view> optimizer_states(const JobSpec& spec);

// The part of validate() that a path of the control port needs: 1 to 255 letters, digits, '.', '_'
// or '-'.
void check_job_name(std::string_view name);

// An option of a job that is one word, text or number, named as in the JSON of a JobSpec; its name
// is the option "job".
struct JobOption {
  std::string_view name;
  bool is_number;  // from 0 to 2^32 - 1
  const json::Field& field;

  // A text may be that of a number with a fraction. Throws Error(kInvalid), which names the words
  // that there are: it is none of them, or no number. REQUIRES: !is_number.
  void set(JobSpec& spec, std::string_view text) const;
  void set(JobSpec& spec, uint32_t number) const;  // REQUIRES: is_number or is_real()
  bool is_real() const;                            // a number that may have a fraction
};
std::span<const JobOption> job_options();

// "" if equal, else a sentence that names the first difference ("key 3 'fc.weight' has 10 elements
// here and 12 in the job").
std::string difference(const JobSpec& here, const JobSpec& in_the_job);

}  // namespace phub
