// Options from the environment that launchers set: server, job, rank and world size.
#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "transport/control/token.h"
#include "transport/error.h"
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

Ranks checked(const Launcher& launcher, const char* rank, const char* size) {
  if (rank == nullptr || size == nullptr) {
    const auto [there, value, missing] = rank == nullptr
                                             ? std::tuple(launcher.size, size, launcher.rank)
                                             : std::tuple(launcher.rank, rank, launcher.size);
    fail(ErrorCode::kInvalid,
         "{}={} without {}: set both for a rank of {}, or unset {} (PHUB_RANK and PHUB_WORLD_SIZE "
         "win over all others)",
         there, value, missing, launcher.name, there);
  }
  const Ranks ranks = {number(launcher.rank, rank), number(launcher.size, size)};
  if (ranks.rank >= ranks.size || ranks.size > kMaxRanks) {
    fail(ErrorCode::kInvalid,
         "{}={} and {}={} do not fit: ranks count from 0, and there are at most {}", launcher.rank,
         rank, launcher.size, size, kMaxRanks);
  }
  return ranks;
}

std::optional<Ranks> ranks_of_launcher() {
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
    return checked(launcher, rank, size);
  }
  return std::nullopt;
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

}  // namespace

WorkerOptions options_from_environment() {
  WorkerOptions options;
  if (const char* server = std::getenv("PHUB_SERVER")) options.server = server;
  options.token = token_from_environment();
  const std::optional<Ranks> ranks = ranks_of_launcher();
  if (ranks) {
    options.rank = static_cast<int32_t>(ranks->rank);
    options.spec.world_size = ranks->size;
  }
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
