// Jobs of a size that no other test has: 64 worker processes on one machine, and 50,000 keys.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "phub/control/router.h"
#include "tests/worker/box.h"
#include "transport/control/messages_json.h"

namespace phub {
namespace scale_test {

using testing::Box;
using testing::each_rank;

// 64 processes on one core, and the sanitizers, may be slow.
constexpr uint32_t kLongMs = 250'000;

// Small integers: every sum of them is exact, and another one for another rank, round or element.
float gradient_of(uint32_t rank, uint64_t round, size_t key, size_t element) {
  return static_cast<float>((rank * 31 + round * 7 + key * 3 + element) % 97);
}

void fill(Worker& worker, uint32_t rank, uint64_t round) {
  for (size_t k = 0; k < worker.keys(); ++k) {
    const std::span<float> gradient = worker.gradient(k);
    for (size_t e = 0; e < gradient.size(); ++e) gradient[e] = gradient_of(rank, round, k, e);
  }
}

// Elements that are not the sum over all ranks.
size_t wrong_elements(const Worker& worker, uint32_t ranks, uint64_t round) {
  size_t wrong = 0;
  for (size_t k = 0; k < worker.keys(); ++k) {
    const std::span<const float> sums = worker.parameters(k);
    for (size_t e = 0; e < sums.size(); ++e) {
      float expected = 0;
      for (uint32_t r = 0; r < ranks; ++r) expected += gradient_of(r, round, k, e);
      wrong += sums[e] != expected;
    }
  }
  return wrong;
}

// All of one rank's life. Throws Error; returns the number of wrong elements.
size_t train(const WorkerOptions& options, uint64_t rounds) {
  Worker worker(options);
  const auto rank = static_cast<uint32_t>(options.rank);
  size_t wrong = 0;
  for (uint64_t round = 1; round <= rounds; ++round) {
    fill(worker, rank, round);
    for (size_t k = 0; k < worker.keys(); ++k) worker.push(k);
    worker.wait_all();
    wrong += wrong_elements(worker, worker.world_size(), round);
  }
  worker.barrier();
  worker.leave(kLongMs);
  return wrong;
}

// Processes that wait for a short text, here the server's address, and then run `body(rank, text)`,
// whose result is their exit status. REQUIRES: this process has one thread.
class WaitingProcesses {
 public:
  using Body = std::function<int(uint32_t rank, const std::string& text)>;

  WaitingProcesses(uint32_t count, const Body& body) {
    for (uint32_t rank = 0; rank < count; ++rank) {
      int ends[2];
      if (pipe(ends) != 0) throw std::runtime_error("pipe");
      const pid_t parent = getpid();
      const pid_t pid = fork();
      if (pid < 0) throw std::runtime_error("fork");
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(126);
        close(ends[1]);
        _exit(run(body, rank, ends[0]));
      }
      close(ends[0]);
      processes_.push_back({pid, ends[1]});
    }
  }
  ~WaitingProcesses() {
    for (const auto& [pid, pipe] : processes_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  WaitingProcesses(const WaitingProcesses&) = delete;
  WaitingProcesses& operator=(const WaitingProcesses&) = delete;

  // Lets them run to their ends; what waitpid() says of each.
  std::vector<int> run_all(const std::string& text) {
    std::vector<int> statuses;
    for (const auto& [pid, pipe] : processes_) {
      if (write(pipe, text.data(), text.size()) < 0) std::perror("write");
      close(pipe);
    }
    for (const auto& [pid, pipe] : processes_) waitpid(pid, &statuses.emplace_back(), 0);
    processes_.clear();
    return statuses;
  }

 private:
  struct Process {
    pid_t pid;
    int pipe;
  };

  static int run(const Body& body, uint32_t rank, int pipe) {
    std::array<char, 256> text;
    const ssize_t n = read(pipe, text.data(), text.size());
    if (n <= 0) return 125;
    try {
      return body(rank, std::string(text.data(), static_cast<size_t>(n)));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
      return 1;
    }
  }

  std::vector<Process> processes_;
};

JobSpec spec_of(std::string name, std::vector<KeySpec> keys, uint32_t ranks) {
  JobSpec spec;
  spec.name = std::move(name);
  spec.keys = std::move(keys);
  spec.world_size = ranks;
  spec.optimizer = "none";
  spec.on_loss = "fail";
  spec.lease_ms = spec.join_limit_ms = spec.progress_limit_ms = kLongMs;
  return spec;
}

WorkerOptions options_of(JobSpec spec, uint32_t rank, const std::string& server) {
  WorkerOptions options = options_from_environment();
  options.server = server;
  options.spec = std::move(spec);
  options.rank = static_cast<int32_t>(rank);
  options.connect_timeout_ms = kLongMs;
  return options;
}

constexpr uint32_t kProcesses = 64;

JobSpec spec_of_processes(const std::string& name) {
  return spec_of(name,
                 {{.name = "a", .elements = 1},
                  {.name = "b", .elements = 33},
                  {.name = "c", .elements = 20'000},
                  {.name = "d", .elements = 20'000}},
                 kProcesses);
}

// The ranks of a job, each at the server that it has of what the processes are told: addresses with
// spaces between them, for as many ranks each.
WaitingProcesses processes_of(const JobSpec& spec, uint32_t servers) {
  return {spec.world_size, [spec, servers](uint32_t rank, const std::string& addresses) {
            std::istringstream words(addresses);
            std::string server;
            for (uint32_t i = 0; i <= rank * servers / spec.world_size; ++i) words >> server;
            const size_t wrong = train(options_of(spec, rank, server), 5);
            if (wrong > 0) std::fprintf(stderr, "rank %u: %zu elements are wrong\n", rank, wrong);
            return wrong > 0 ? 2 : 0;
          }};
}

void expect_all_right(const std::vector<int>& statuses) {
  ASSERT_EQ(statuses.size(), kProcesses);
  for (uint32_t r = 0; r < kProcesses; ++r) EXPECT_EQ(statuses[r], 0) << "rank " << r;
}

TEST(ScaleTest, SixtyFourProcessesInOneJob) {
  WaitingProcesses processes = processes_of(spec_of_processes("processes"), 1);
  Box box;
  expect_all_right(processes.run_all(box.address()));
  EXPECT_TRUE(box.becomes_empty()) << "all have left";
}

TEST(ScaleTest, SixtyFourProcessesInFourRacksBelowFourBoxes) {
  constexpr uint32_t kRacks = 4;
  JobSpec spec = spec_of_processes("racks");
  spec.groups = "16,16,16,16";
  spec.chunk_elements = 4096;
  WaitingProcesses processes = processes_of(spec, kRacks);
  const char* shards = std::getenv("PHUB_TEST_SHARDS");
  const std::string before = shards ? shards : "0";
  setenv("PHUB_TEST_SHARDS", "3", 1);
  Box root("pack:1 core:1 pu:1");
  setenv("PHUB_TEST_SHARDS", before.c_str(), 1);
  ASSERT_EQ(root.status().shards.size(), 3u);
  std::vector<std::unique_ptr<Box>> racks;
  std::string addresses;
  for (uint32_t i = 0; i < kRacks; ++i) {
    racks.push_back(std::make_unique<Box>("pack:1 core:1 pu:1", uint64_t{1} << 33, Box::Wrap{},
                                          CheckpointOptions{}, root.address()));
    addresses += racks.back()->address() + " ";
  }
  expect_all_right(processes.run_all(addresses));
  for (const auto& rack : racks) EXPECT_TRUE(rack->becomes_empty());
  EXPECT_TRUE(root.becomes_empty()) << "all have left";
}

TEST(ScaleTest, FiftyThousandKeys) {
  constexpr uint32_t kRanks = 2;
  std::vector<KeySpec> keys;
  for (size_t k = 0; k < 50'000; ++k) {
    keys.push_back({.name = fmt::format("encoder.layer.{}.attention.output.dense.weight", k),
                    .elements = 1 + k * 37 % 100});
  }
  const JobSpec spec = spec_of("keys", keys, kRanks);
  const std::string request = to_json(JoinRequest{.spec = spec, .rank = 0});
  RecordProperty("join_request_bytes", std::to_string(request.size()));
  EXPECT_LT(request.size() * 10, kMaxJoinBytes) << "far below what the server takes";
  Box box;
  each_rank(kRanks, [&](uint32_t rank) {
    EXPECT_EQ(train(options_of(spec, rank, box.address()), 2), 0u) << "rank " << rank;
  });
}

// The sums are looked at: a rank that contributes something else is noticed by all.
TEST(ScaleTest, AWrongContributionIsNoticed) {
  const JobSpec spec = spec_of("wrong", {{.name = "a", .elements = 10}}, 2);
  Box box;
  each_rank(2, [&](uint32_t rank) {
    Worker worker(options_of(spec, rank, box.address()));
    fill(worker, rank, 1);
    if (rank == 1) worker.gradient(0)[4] += 1;
    worker.push_pull(0);
    EXPECT_EQ(wrong_elements(worker, 2, 1), 1u) << "rank " << rank;
    worker.leave();
  });
}

}  // namespace scale_test
}  // namespace phub
