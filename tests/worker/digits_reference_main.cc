// digits_reference --log LOG.json PARAMETERS…: recomputes a run of the digits example in one
// process, from the job's membership log, and compares the final parameters with those that the
// workers wrote, byte for byte. Exit status 1 if they differ.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/worker/digits_reference.h"
#include "transport/control/messages_json.h"
#include "transport/error.h"

namespace phub::digits {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(ErrorCode::kNotFound, "{}: {}", path, std::strerror(errno));
  return {std::istreambuf_iterator<char>(file), {}};
}

// Prints the verdict.
bool compare(const std::vector<float>& expected, const std::string& path) {
  const std::string bytes = read_file(path);
  const size_t expected_bytes = expected.size() * sizeof(float);
  if (bytes.size() != expected_bytes) {
    fmt::print("{}: {} bytes, the reference has {}\n", path, bytes.size(), expected_bytes);
    return false;
  }
  size_t differing = 0;
  size_t first = 0;
  for (size_t i = expected.size(); i-- > 0;) {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    if (bits != std::bit_cast<uint32_t>(expected[i])) {
      ++differing;
      first = i;
    }
  }
  if (differing == 0) {
    fmt::print("{}: equal, byte for byte ({} bytes)\n", path, bytes.size());
    return true;
  }
  float actual = 0;
  std::memcpy(&actual, bytes.data() + first * sizeof(float), sizeof(float));
  fmt::print("{}: {} of {} parameters differ, first number {}: {:a}, the reference has {:a}\n",
             path, differing, expected.size(), first, actual, expected[first]);
  return false;
}

// Says what the log knows of ranks that went before the last round and of ranks that came later.
void print_changes(const std::vector<LogRecord>& log, uint64_t rounds) {
  for (const LogRecord& record : log) {
    if (record.kind == LogRecord::Kind::kAdmitted && record.round > 1) {
      fmt::print("log: rank {} (incarnation {}) takes part from round {} on\n", record.rank,
                 record.incarnation, record.round);
    } else if (record.kind == LogRecord::Kind::kLost || record.kind == LogRecord::Kind::kLeft) {
      const auto [first, last] = std::ranges::minmax(record.last_rounds, {}, &ChunkRange::round);
      if (first.round >= rounds) continue;
      fmt::print("log: rank {} (incarnation {}) took part for the last time in round {}{}\n",
                 record.rank, record.incarnation, first.round,
                 first.round == last.round ? "" : fmt::format(" to {}, by chunk", last.round));
    }
  }
}

int run(int argc, char** argv) {
  Training training;
  std::string data = "build/data/digits.csv";
  std::string log;
  std::vector<std::string> files;
  CLI::App app("Recomputes a run of the digits example and compares its parameters.");
  add_options(app, training);
  app.add_option("--data", data, "The digits as CSV")->capture_default_str();
  app.add_option("--log", log, "Membership log of the job; without: all ranks from first to last");
  app.add_option("parameters", files, "What the workers wrote")->required();
  CLI11_PARSE(app, argc, argv);

  const std::vector<LogRecord> records =
      log.empty() ? quiet_log(training.world) : from_json<LogPage>(read_file(log)).records;
  const std::vector<float> expected = recompute(training, load(data).train, records);
  print_changes(records, training.rounds);
  bool equal = true;
  for (const std::string& file : files) equal = compare(expected, file) && equal;
  return equal ? 0 : 1;
}

}  // namespace
}  // namespace phub::digits

int main(int argc, char** argv) {
  try {
    return phub::digits::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "digits_reference: {}\n", e.what());
    return 1;
  }
}
