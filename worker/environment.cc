// Options from the environment that launchers set: server, job, rank and world size.
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "transport/control/token.h"
#include "transport/error.h"
#include "worker/worker.h"

namespace phub {
namespace {

// The first launcher that sets both counts.
constexpr std::array<std::pair<const char*, const char*>, 5> kLaunchers = {{
    {"PHUB_RANK", "PHUB_WORLD_SIZE"},
    {"RANK", "WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"SLURM_PROCID", "SLURM_NTASKS"},
    {"JOB_COMPLETION_INDEX", "WORLD_SIZE"},  // an indexed Job of Kubernetes
}};

// The job's name: ours, or what the launcher calls all processes that it started together.
std::string job_name() {
  if (const char* job = std::getenv("PHUB_JOB")) return job;
  const char* run = std::getenv("TORCHELASTIC_RUN_ID");
  if (run != nullptr && std::string_view(run) != "none") return run;  // torchrun without --rdzv-id
  if (const char* job = std::getenv("SLURM_JOB_ID")) return fmt::format("slurm-{}", job);
  return {};
}

uint32_t number(const char* variable, std::string_view text) {
  uint32_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorCode::kInvalid, "{}='{}' is not a number", variable, text);
  }
  return value;
}

}  // namespace

WorkerOptions options_from_environment() {
  WorkerOptions options;
  if (const char* server = std::getenv("PHUB_SERVER")) options.server = server;
  options.token = token_from_environment();
  options.spec.name = job_name();
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
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    if (const char* here = std::getenv(name)) options.local_world_size = number(name, here);
  }
  for (const auto& [rank_name, size_name] : kLaunchers) {
    const char* rank = std::getenv(rank_name);
    const char* size = std::getenv(size_name);
    if (!rank || !size) continue;
    const uint32_t r = number(rank_name, rank);
    options.spec.world_size = number(size_name, size);
    if (r >= options.spec.world_size || options.spec.world_size > kMaxRanks) {
      fail(ErrorCode::kInvalid,
           "{}={} and {}={} do not fit: ranks count from 0, and there are at most {}", rank_name, r,
           size_name, size, kMaxRanks);
    }
    options.rank = static_cast<int32_t>(r);
    break;
  }
  return options;
}

}  // namespace phub
