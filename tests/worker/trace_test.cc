// What `phub serve --trace` and a worker with a trace write of a run: every chunk's arrivals, sums
// and write-backs, every key's exchanges, each as often as they happened.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/process.h"
#include "worker/progress/worker_trace.h"

namespace phub {
namespace trace_test {

using nlohmann::json;
using testing::each_rank;
using testing::Process;
using namespace std::chrono_literals;

constexpr uint32_t kRanks = 2, kRounds = 5;

// By name and phase.
std::map<std::string, std::vector<json>> read_trace(const std::string& path) {
  std::map<std::string, std::vector<json>> events;
  const json file = json::parse(std::ifstream(path));
  for (const json& event : file["traceEvents"]) {
    events[fmt::format("{} {}", event["name"].get<std::string>(), event["ph"].get<std::string>())]
        .push_back(event);
  }
  return events;
}

// Times of a chunk's events in one round of the box.
double time_of(const std::vector<json>& events, const std::string& of, uint64_t round) {
  for (const json& event : events) {
    if (event["args"]["of"] == of && event["args"]["round"] == round) return event["ts"];
  }
  ADD_FAILURE() << of << " has no event in round " << round;
  return 0;
}

TEST(TracePath, TellsTheRanksApart) {
  EXPECT_EQ(trace_path_of("a-%r.json", 3, 4), "a-3.json");
  EXPECT_EQ(trace_path_of("a.json", 3, 4), "a.json.3");
  EXPECT_EQ(trace_path_of("a.json", 0, 1), "a.json");
}

TEST(TraceRun, HoldsWhatHappened) {
  std::string folder = ::testing::TempDir() + "trace_run_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  Process server({PHUB_BINARY, "serve", "--listen", "127.0.0.1:0", "--trace",
                  fmt::format("{}/box.json", folder)},
                 fmt::format("{}/log", folder));
  const std::string address = server.listening_address();
  JobSpec spec;
  spec.name = "traced";
  spec.keys = {{.name = "large", .elements = 20'000}, {.name = "small", .elements = 5}};
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  each_rank(kRanks, [&](uint32_t rank) {
    WorkerOptions options;
    options.server = address;
    options.spec = spec;
    options.rank = static_cast<int32_t>(rank);
    options.trace = fmt::format("{}/rank-%r.json", folder);
    Worker worker(options);
    worker.wait_all();
    std::vector<float> own(5), result(5);
    worker.register_memory(1, {.gradient = own.data(), .parameters = result.data()});
    for (uint32_t round = 0; round < kRounds; ++round) {
      worker.push(0);
      worker.push(1);
      worker.wait_all();
    }
    worker.barrier();
  });
  server.send(SIGTERM);
  ASSERT_EQ(server.wait(60s), 0) << server.output();

  auto box = read_trace(fmt::format("{}/box.json", folder));
  constexpr size_t kChunks = 4;  // 3 of the large key, 1 of the small one
  EXPECT_EQ(box["arrival i"].size(), kChunks * kRounds * kRanks);
  EXPECT_EQ(box["wait for ranks b"].size(), kChunks * kRounds);
  EXPECT_EQ(box["sum and optimize X"].size(), kChunks * kRounds);
  EXPECT_GE(box["write back X"].size(), kChunks * kRounds);
  EXPECT_FALSE(box["sleep X"].empty());
  for (uint64_t round = 1; round <= kRounds; ++round) {
    for (const char* chunk : {"large[0]", "large[2]", "small[0]"}) {
      EXPECT_LE(time_of(box["wait for ranks b"], chunk, round),
                time_of(box["sum and optimize X"], chunk, round));
    }
  }
  for (const json& arrival : box["arrival i"]) {
    EXPECT_EQ(arrival["args"]["job"], "traced");
    EXPECT_LT(arrival["args"]["rank"], kRanks);
  }

  auto rank = read_trace(fmt::format("{}/rank-1.json", folder));
  EXPECT_EQ(rank["exchange b"].size(), 2 * kRounds);
  EXPECT_EQ(rank["copy in X"].size(), kRounds);
  EXPECT_GE(rank["copy out X"].size(), kRounds);
  EXPECT_LE(time_of(rank["exchange b"], "small", 1),
            time_of(box["arrival i"], "small[0]", 1) + 1e6);
  std::filesystem::remove_all(folder);
}

TEST(TraceRun, AFileThatCannotBeStopsTheServerAtOnce) {
  Process server({PHUB_BINARY, "serve", "--listen", "127.0.0.1:0", "--trace", "/nowhere/box.json"},
                 ::testing::TempDir() + "trace_run_refused_" + std::to_string(getpid()));
  EXPECT_NE(server.wait(60s), 0);
  EXPECT_THAT(server.output(), ::testing::HasSubstr("trace file '/nowhere/box.json'"));
}

}  // namespace trace_test
}  // namespace phub
