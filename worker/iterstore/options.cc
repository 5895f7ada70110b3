#include "worker/iterstore/options.h"

#include <fmt/format.h>

#include "transport/error.h"
#include "worker/iterstore/recording.h"

namespace phub::iterstore {
namespace {

constexpr uint32_t kMaxThreads = 4096;
}  // namespace

void check_options(const StoreOptions& options) {
  const JobSpec& spec = options.worker.spec;
  const auto refuse = [&spec](const std::string& what) {
    fail(ErrorCode::kInvalid, "store '{}': {}", spec.name, what);
  };
  check_job_name(spec.name + ".4294967295-accesses");  // the longest of its jobs
  if (spec.world_size == 0 || spec.world_size > kMaxRanks) {
    refuse(fmt::format("a job has 1 to {} ranks, not {}", kMaxRanks, spec.world_size));
  }
  if (options.worker.rank < 0 && !options.worker.rank_error.empty()) {
    refuse(options.worker.rank_error);
  }
  if (options.worker.rank < 0 || static_cast<uint32_t>(options.worker.rank) >= spec.world_size) {
    refuse(
        fmt::format("its rank is {}, and must be one of 0 to {}, as the application's data is "
                    "divided by it",
                    options.worker.rank, spec.world_size - 1));
  }
  if ((spec.min_ranks != 0 && spec.min_ranks != spec.world_size) ||
      (spec.max_ranks != 0 && spec.max_ranks != spec.world_size)) {
    refuse(
        "all ranks are there from its beginning, and no others: leave out min_ranks and max_ranks");
  }
  if (!spec.keys.empty() || !options.worker.interest.empty()) {
    refuse("keys and interest are made of its tables, and must be empty");
  }
  if (options.worker.saver) refuse("it saves nothing: leave out the saver");
  if (options.worker.memory_device != nullptr) {
    refuse("its rows lie in host memory: leave out the memory_device");
  }
  if (options.threads == 0 || options.threads > kMaxThreads) {
    refuse(fmt::format("it has 1 to {} threads, not {}", kMaxThreads, options.threads));
  }
  if (options.batches == 0 || options.batches > kParts) {
    refuse(fmt::format("a table has 1 to {} batches, not {}", kParts, options.batches));
  }
  if (!(options.gather_again >= 0 && options.gather_again <= 1)) {
    refuse(
        fmt::format("gather_again is {}, and must be a share from 0 to 1", options.gather_again));
  }
  if (options.gather_again > 0 && spec.consistency != "bsp") {
    refuse(
        "gather_again is for lock-step (consistency bsp): otherwise ranks see at different clocks "
        "that the accesses have changed");
  }
  for (const TableSpec& table : options.tables) {
    if (table.spare == 0 || spec.consistency == "bsp") continue;
    refuse(fmt::format("table '{}' has spare rows, which are for lock-step (consistency bsp)",
                       table.name));
  }
  if (options.gather_again > 0 && !options.static_index) {
    refuse("gather_again needs the static_index, which knows what comes as recorded");
  }
}

}  // namespace phub::iterstore
