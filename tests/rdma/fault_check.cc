// Whether what fault workers noted of a job is what the server's log of it says (fault_oracle.h).
//
// Prints the number of results that were checked and what the log says of ranks that were lost;
// status 1 and a sentence where something is wrong.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "tests/worker/fault_oracle.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub {
namespace {

int check(const std::string& server, const std::string& job,
          const std::vector<std::string>& notes) {
  const JobSpec spec = from_json<JobSpec>(job);
  const std::vector<LogRecord> log = ControlClient(server).log(spec.name);
  const size_t chunks = chunks_of(spec).size();
  std::vector<testing::Sight> sights;
  size_t results = 0;
  for (const std::string& path : notes) {
    sights.push_back(testing::read_sight(path, chunks));
    if (sights.back().rounds.empty()) {
      fmt::print("{} has no result of any round\n", path);
      return 1;
    }
    results += sights.back().rounds.size() * chunks;
  }
  const std::string wrong = testing::check_sights(spec, log, std::move(sights));
  if (!wrong.empty()) {
    fmt::print("{}\n", wrong);
    return 1;
  }
  fmt::print("{} results\n", results);
  for (const LogRecord& record : log) {
    if (record.kind != LogRecord::Kind::kLost) continue;
    fmt::print("lost rank {} incarnation {}: {}\n", record.rank, record.incarnation, record.reason);
  }
  return 0;
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  std::string server, job;
  std::vector<std::string> notes;
  CLI::App app("compares what workers saw of a job with its log");
  app.add_option("--server", server)->required();
  app.add_option("--job", job, "as JSON")->required();
  app.add_option("notes", notes)->required();
  CLI11_PARSE(app, argc, argv);
  try {
    return phub::check(server, job, notes);
  } catch (const std::exception& error) {
    fmt::print("{}\n", error.what());
    return 1;
  }
}
