#include "transport/variables.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <set>
#include <string_view>

#include "transport/text.h"

namespace phub {
namespace {

constexpr std::string_view kPrefix = "PHUB_";

// Without the prefix.
const std::vector<std::string_view>& known_variables() {
  static const std::vector<std::string_view> known = {
      // of workers and clients
      "SERVER", "JOB", "RANK", "WORLD_SIZE", "MIN_RANKS", "TRANSPORT", "WORKER_TRACE",
      "WORKER_NIC_BUDGET", "SEND_ORDER", "CARRY_OVER", "TOKEN", "TOKEN_FILE", "CA", "CLIENT_CERT",
      "CLIENT_KEY", "LIBRARY", "PROGRAM",
      // of `phub serve`: its options
      "CONFIG", "LISTEN", "JOIN", "PARENT", "PARENT_TRANSPORT", "PARENT_BUDGET", "TOKENS",
      "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "TLS_DATA", "INSECURE", "TRANSPORTS", "DEVICES",
      "OFI_PROVIDER", "DATA_PORT", "SWITCH", "SWITCH_SLOTS", "NIC_BUDGET", "CORES", "PIN",
      "MEMORY_LIMIT", "SOCKET_DIR", "TOPOLOGY", "SPIN_US", "LOG_LEVEL", "TRACE", "CHECKPOINTS",
      "CHECKPOINT_EVERY", "CHECKPOINT_KEEP", "TRACE_EVENTS",
      // of scripts and tests, which resemble others
      "BOXES", "BOX_HOSTS", "SERVE", "PORT", "SHARD_TOKEN_FILE", "SLURM", "BIN", "SWITCH_ELEMENTS",
      "GOLDEN_FILE"};
  return known;
}

}  // namespace

std::vector<std::string> misspelt_variables(const char* const* environment) {
  std::vector<std::string> lines;
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    std::string_view name(*environment);
    name = name.substr(0, name.find('='));
    if (!name.starts_with(kPrefix)) continue;
    const std::string_view own = name.substr(kPrefix.size());
    const auto& known = known_variables();
    if (std::ranges::find(known, own) != known.end()) continue;
    const std::string near = nearest(own, known);
    if (near.empty()) continue;
    lines.push_back(
        fmt::format("{} is set, and phub does not read it: {}{}?", printable(name), kPrefix, near));
  }
  return lines;
}

void say_misspelt_variables() {
  static std::set<std::string> said;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  for (const std::string& line : misspelt_variables(environ)) {
    if (said.insert(line).second) std::fputs(fmt::format("phub: {}\n", line).c_str(), stderr);
  }
}

}  // namespace phub
