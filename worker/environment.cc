// Options from the environment that launchers set: server, job, rank and world size.
#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>

#include "transport/control/token.h"
#include "transport/error.h"
#include "transport/variables.h"
#include "worker/worker.h"

namespace phub {
namespace {

struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
};

// The first of them that sets a variable of its two decides; worker/training.md has the same table.
// Slurm comes after MPI: what mpirun starts inside of a batch script sees the Slurm variables of
// the script, or of mpirun's own helpers.
constexpr std::array<Launcher, 6> kLaunchers = {{
    {"phub", "PHUB_RANK", "PHUB_WORLD_SIZE"},
    {"torchrun", "RANK", "WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS"},
    {"Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE"},  // an indexed Job
}};
constexpr const Launcher& kSlurm = kLaunchers[4];
constexpr const Launcher& kKubernetes = kLaunchers[5];

struct Ranks {
  uint32_t rank = 0;
  uint32_t size = 0;
  bool operator==(const Ranks&) const = default;
};

uint32_t number(const char* variable, std::string_view text) {
  uint32_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorCode::kInvalid, "{}='{}' is not a number", variable, text);
  }
  return value;
}

// The step of Slurm that has started this process. Batch scripts and salloc's shells have none, or
// one of the numbers that Slurm keeps for them.
std::optional<uint32_t> slurm_step() {
  constexpr uint32_t kFirstKept = 0xfffffff0;
  const char* step = std::getenv("SLURM_STEP_ID");
  if (step == nullptr) return std::nullopt;
  const uint32_t id = number("SLURM_STEP_ID", step);
  return id < kFirstKept ? std::optional(id) : std::nullopt;
}

// A step over several components of a heterogeneous job: SLURM_PROCID counts all of its tasks,
// SLURM_NTASKS those of one component. Nothing says over how many components the step is.
void check_one_component() {
  const char* components = std::getenv("SLURM_HET_SIZE");
  if (components == nullptr || number("SLURM_HET_SIZE", components) <= 1) return;
  fail(
      ErrorCode::kInvalid,
      "SLURM_HET_SIZE={}: SLURM_NTASKS has the tasks of one component of the job, and the step may "
      "have several. Set PHUB_RANK to SLURM_PROCID and PHUB_WORLD_SIZE to the tasks of all of "
      "them, or unset SLURM_HET_SIZE for a step of one component",
      components);
}

// REQUIRES: the process is in no step. It is a batch script, or a shell, and no rank.
void check_batch_script() {
  for (const char* name : {kSlurm.size, "SLURM_JOB_NUM_NODES"}) {
    const char* tasks = std::getenv(name);
    if (tasks == nullptr) continue;
    if (number(name, tasks) <= 1) return;
    fail(
        ErrorCode::kInvalid,
        "{}={}, but this process is the batch script or shell itself, and none of its tasks: start "
        "the program with srun, or set PHUB_RANK and PHUB_WORLD_SIZE (0 and 1 to train alone)",
        name, tasks);
  }
}

// One of the pair is missing. `options` gets the world size that is there: the program may have the
// rank.
[[noreturn]] void fail_half(const Launcher& launcher, const char* rank, const char* size,
                            WorkerOptions& options) {
  const auto [there, value, missing] = rank == nullptr
                                           ? std::tuple(launcher.size, size, launcher.rank)
                                           : std::tuple(launcher.rank, rank, launcher.size);
  const uint32_t half = number(there, value);
  if (rank == nullptr && half > 0) options.spec.world_size = half;
  fail(ErrorCode::kInvalid,
       "{}={} without {}: set both for a rank of {}, or unset {} (PHUB_RANK and PHUB_WORLD_SIZE "
       "win over all others)",
       there, value, missing, launcher.name, there);
}

Ranks checked(const Launcher& launcher, const char* rank, const char* size) {
  const Ranks ranks = {number(launcher.rank, rank), number(launcher.size, size)};
  if (ranks.rank >= ranks.size || ranks.size > kMaxRanks) {
    fail(ErrorCode::kInvalid,
         "{}={} and {}={} do not fit: ranks count from 0, and there are at most {}{}",
         launcher.rank, rank, launcher.size, size, kMaxRanks,
         &launcher == &kSlurm
             ? ". In a step of several components (srun A : B) set PHUB_RANK to SLURM_PROCID and "
               "PHUB_WORLD_SIZE to the tasks of all"
             : "");
  }
  return ranks;
}

struct Found {
  const Launcher& launcher;
  Ranks ranks;
};

// The first launcher that is there. Nothing: the process is alone.
std::optional<Found> find_launcher(WorkerOptions& options) {
  for (const Launcher& launcher : kLaunchers) {
    const char* rank = std::getenv(launcher.rank);
    const char* size = std::getenv(launcher.size);
    if (rank == nullptr && size == nullptr) continue;
    if (rank == nullptr && std::string_view(launcher.size) == kKubernetes.size &&
        std::getenv(kKubernetes.rank) != nullptr) {
      continue;  // WORLD_SIZE is that of a launcher below
    }
    if (&launcher == &kSlurm && !slurm_step() &&
        (rank == nullptr || std::string_view(rank) == "0")) {
      check_batch_script();
      continue;
    }
    if (rank == nullptr || size == nullptr) fail_half(launcher, rank, size, options);
    if (&launcher == &kSlurm) check_one_component();
    return Found{launcher, checked(launcher, rank, size)};
  }
  return std::nullopt;
}

// Of a launcher below the one that counts: its ranks, if both variables are there and make sense.
std::optional<Ranks> ranks_below(const Launcher& launcher) {
  const char* rank = std::getenv(launcher.rank);
  const char* size = std::getenv(launcher.size);
  if (rank == nullptr || size == nullptr) return std::nullopt;
  try {
    return checked(launcher, rank, size);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Whether the two say different things about the ranks, and none of them may have started the
// other: a task of Slurm may be an mpirun or torchrun of several ranks.
bool contradict(const Found& found, const Launcher& other, Ranks ranks) {
  if (std::string_view(other.size) == found.launcher.size) return false;  // it has one of the two
  const bool may_be_around = &other == &kSlurm && ranks.size <= found.ranks.size;
  return ranks != found.ranks && !may_be_around;
}

// Says, once, which launchers are not believed. Not to whoever has set PHUB_RANK by hand.
void say_contradictions(const Found& found) {
  static std::set<std::string> said;
  static std::mutex mutex;
  if (&found.launcher == &kLaunchers.front()) return;
  for (const Launcher& other : kLaunchers) {
    if (&other <= &found.launcher) continue;
    const std::optional<Ranks> ranks = ranks_below(other);
    if (!ranks || !contradict(found, other, *ranks)) continue;
    const std::string text = fmt::format(
        "phub: {}={} and {}={} ({}) count, and {}={} and {}={} ({}) do not; PHUB_RANK and "
        "PHUB_WORLD_SIZE win over both\n",
        found.launcher.rank, found.ranks.rank, found.launcher.size, found.ranks.size,
        found.launcher.name, other.rank, ranks->rank, other.size, ranks->size, other.name);
    const std::scoped_lock lock(mutex);
    if (said.insert(text).second) std::fputs(text.c_str(), stderr);
  }
}

// Whether the ranks are those of the Slurm step: it then tells this job from others of the
// allocation. A rank that is started again, or by mpirun, is in a step of its own.
bool are_of_slurm_step(const std::optional<Ranks>& ranks) {
  const char* rank = std::getenv(kSlurm.rank);
  const char* size = std::getenv(kSlurm.size);
  return ranks && rank != nullptr && size != nullptr &&
         *ranks == Ranks{number(kSlurm.rank, rank), number(kSlurm.size, size)};
}

// torchrun was given no run id: its ranks have the address of their store in common.
std::string name_of_torchrun() {
  std::string name = "torchrun";
  for (const char* variable : {"MASTER_ADDR", "MASTER_PORT"}) {
    const char* value = std::getenv(variable);
    if (value != nullptr) name += fmt::format("-{:.200}", value);
  }
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '_') c = '-';
  }
  return name;
}

// The job's name: ours, or what the launcher calls all processes that it started together.
std::string job_name(const std::optional<Ranks>& ranks) {
  if (const char* job = std::getenv("PHUB_JOB")) return job;
  const char* run = std::getenv("TORCHELASTIC_RUN_ID");
  if (run != nullptr && *run != '\0' && std::string_view(run) != "none") return run;
  if (const char* job = std::getenv("SLURM_JOB_ID")) {
    const std::optional<uint32_t> step = slurm_step();
    if (step && are_of_slurm_step(ranks)) return fmt::format("slurm-{}.{}", job, *step);
    return fmt::format("slurm-{}", job);
  }
  return run != nullptr ? name_of_torchrun() : std::string();
}

// Of the launcher. What is wrong with it is an error of the worker, if the program has no rank.
std::optional<Ranks> take_ranks(WorkerOptions& options) {
  try {
    const std::optional<Found> found = find_launcher(options);
    if (!found) return std::nullopt;
    options.rank = static_cast<int32_t>(found->ranks.rank);
    options.spec.world_size = found->ranks.size;
    say_contradictions(*found);
    return found->ranks;
  } catch (const Error& error) {
    options.rank_error = error.what();
    return std::nullopt;
  }
}

}  // namespace

WorkerOptions options_from_environment() {
  say_misspelt_variables();
  WorkerOptions options;
  if (const char* server = std::getenv("PHUB_SERVER")) options.server = server;
  options.token = token_from_environment();
  const std::optional<Ranks> ranks = take_ranks(options);
  options.spec.name = job_name(ranks);
  if (const char* transport = std::getenv("PHUB_TRANSPORT")) options.transport = transport;
  if (const char* ranks = std::getenv("PHUB_MIN_RANKS")) {
    options.spec.min_ranks = number("PHUB_MIN_RANKS", ranks);
  }
  if (const char* trace = std::getenv("PHUB_WORKER_TRACE")) options.trace = trace;
  if (const char* budget = std::getenv("PHUB_WORKER_NIC_BUDGET")) options.nic_budget = budget;
  if (const char* order = std::getenv("PHUB_SEND_ORDER")) options.send_order = order;
  if (const char* rounds = std::getenv("PHUB_CARRY_OVER")) {
    options.carry_over = number("PHUB_CARRY_OVER", rounds);
  }
  for (const char* name : {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"}) {
    if (const char* here = std::getenv(name)) options.local_world_size = number(name, here);
  }
  return options;
}

}  // namespace phub
