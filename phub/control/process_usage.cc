#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "phub/control/metrics.h"

namespace phub {
namespace {

// When the machine was started, in seconds since the epoch.
double boot_time(const std::string& proc) {
  std::ifstream stat(proc + "/stat");
  for (std::string line; std::getline(stat, line);) {
    if (line.starts_with("btime ")) return std::strtod(line.c_str() + 6, nullptr);
  }
  return 0;
}

}  // namespace

ProcessUsage process_usage(const std::string& proc) {
  ProcessUsage usage;
  std::ifstream file(proc + "/self/stat");
  std::string line;
  std::getline(file, line);
  // The second field is the name in parentheses, which may hold anything.
  const size_t name_end = line.rfind(") ");
  if (name_end != line.npos) {
    std::istringstream rest(line.substr(name_end + 2));
    const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
    const auto number = [&](size_t field) {  // as proc(5) counts
      return fields.size() > field - 3 ? std::strtod(fields[field - 3].c_str(), nullptr) : 0;
    };
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
    usage.cpu_s = (number(14) + number(15)) / ticks;
    usage.threads = static_cast<uint64_t>(number(20));
    usage.start_s = boot_time(proc) + number(22) / ticks;
    usage.virtual_bytes = static_cast<uint64_t>(number(23));
    usage.resident_bytes = static_cast<uint64_t>(number(24) * page);
  }
  std::error_code ignored;
  const std::filesystem::directory_iterator fds(proc + "/self/fd", ignored);
  usage.open_fds = static_cast<uint64_t>(std::distance(begin(fds), end(fds)));
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) usage.max_fds = limit.rlim_cur;
  return usage;
}

}  // namespace phub
