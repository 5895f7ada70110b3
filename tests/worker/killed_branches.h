// What the tests of killed branches share: a server that saves its jobs, with shards or without, a
// job with branches, and its ranks.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/branch_rounds.h"
#include "tests/worker/server_process.h"
#include "tests/worker/shard_process.h"
#include "tests/worker/training.h"
#include "transport/control/control_client.h"
#include "worker/worker.h"

namespace phub::testing {

inline constexpr uint32_t kLongMs = 120'000;
inline constexpr uint32_t kShelves = 2;
using Workers = std::vector<std::unique_ptr<Worker>>;

inline JobSpec spec_of(const std::string& name, uint32_t ranks = 1, uint32_t branches = kShelves) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 3000, .priority = 1},
               {.name = "b", .elements = 7, .lr_scale = 0.5, .group = 1},
               {.name = "c", .elements = 640}};
  spec.world_size = ranks;
  spec.chunk_elements = 96;
  spec.optimizer = "momentum";
  spec.hyper = {{"lr", 0.0625}, {"momentum", 0.5}, {"lr_exponential", 0.9}};
  spec.branches = branches;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

using Saver = std::function<RankState(uint64_t round)>;
inline Workers join(const ServerProcess& server, const JobSpec& spec, const std::string& transport,
                    const Saver& saver = nullptr) {
  Workers workers(spec.world_size);
  each_rank(spec.world_size, [&](uint32_t rank) {
    WorkerOptions options = server.options(spec);
    options.rank = static_cast<int32_t>(rank);
    options.transport = transport;
    options.saver = saver;
    workers[rank] = std::make_unique<Worker>(options);
    workers[rank]->wait_all();
  });
  return workers;
}

// What rank 0 has after each of the rounds, and which branch the next is of. `decide(round)`: rank
// 0, before it pushes that round.
using SeenRounds = std::vector<std::pair<uint32_t, Model>>;
inline void train(const Workers& workers, uint64_t first, uint64_t last, SeenRounds& seen,
                  const std::function<void(uint64_t round)>& decide = nullptr) {
  each_rank(static_cast<uint32_t>(workers.size()), [&](uint32_t rank) {
    Worker& worker = *workers[rank];
    for (uint64_t round = first; round <= last; ++round) {
      if (rank == 0 && decide) decide(round);
      push(worker, round, worker.branch_in(round));
      if (rank == 0) seen.emplace_back(worker.branch_in(round + 1), model_of(worker));
    }
  });
}

inline BranchStatus status_of(Worker& worker, uint32_t branch) {
  for (const BranchStatus& status : worker.branches().branches) {
    if (status.branch == branch) return status;
  }
  ADD_FAILURE() << "there is no branch " << branch;
  return {};
}

inline void await_on_disk(Worker& worker, uint32_t branch) {
  EXPECT_TRUE(becomes([&] { return status_of(worker, branch).on_disk; }));
}

inline uint64_t save(Worker& worker) {
  const uint64_t round = worker.checkpoint();
  worker.await_checkpoint(round, kLongMs);
  return round;
}

class SavingServer {
 public:
  // `program`: the path of phub.
  SavingServer(const char* program, size_t shards, uint32_t keep = 3,
               const Flags& flags_of_shards = {}, uint64_t every = 1'000'000)
      : program_(program),
        keep_(keep),
        every_(every),
        flags_of_shards_(flags_of_shards),
        shards_(shards) {
    start();
  }

  // `flags`: more of phub serve.
  void start(const std::string& topology = "pack:1 core:2 pu:1", Flags flags = {}) {
    flags.insert(flags.end(), {"--checkpoints", folder(), "--checkpoint-every",
                               std::to_string(every_), "--checkpoint-keep", std::to_string(keep_)});
    flags.insert(flags.end(), kShortShardLease.begin(), kShortShardLease.end());
    server_.emplace(program_, flags, "127.0.0.1:0", topology);
    for (size_t i = 0; i < shards_.size(); ++i) start_shard(i);
    await_shards(shards_.size());
  }
  void kill() { EXPECT_EQ(server_->end(SIGKILL), -SIGKILL); }
  void restart_shard(size_t i) {
    kill_shard(i);
    await_shards(shards_.size() - 1);
    start_shard(i);
    await_shards(shards_.size());
  }
  void stop_shard(size_t i) { shards_[i]->stop(); }
  void kill_shard(size_t i) { shards_[i]->end(SIGKILL); }
  ServerStatus status() const { return ControlClient(server_->address()).status(); }
  const ServerProcess& operator*() const { return *server_; }
  // Memory does not reach from box to box.
  std::string transport() const { return shards_.empty() ? "shm" : "tcp"; }
  std::string folder() const { return directory_.path() + "/checkpoints"; }
  // Of all checkpoints of all jobs.
  std::vector<std::filesystem::path> files_of(uint32_t branch) const {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder())) {
      const std::string name = entry.path().filename();
      if (name.starts_with(fmt::format("branch-{}-", branch))) files.push_back(entry.path());
    }
    return files;
  }

 private:
  void start_shard(size_t i) {
    shards_[i] = std::make_unique<ShardProcess>(program_, server_->address(), flags_of_shards_);
  }
  void await_shards(size_t count) const {
    EXPECT_TRUE(becomes([&] { return status().shards.size() == count; }));
  }

  const char* const program_;
  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  const uint32_t keep_;
  const uint64_t every_;
  const Flags flags_of_shards_;
  std::vector<std::unique_ptr<ShardProcess>> shards_;  // end after the server, which ends its jobs
  std::optional<ServerProcess> server_;
};

// Of an instance with so many shards.
inline const auto name_of_shards = [](const auto& instance) {
  return instance.param == 0 ? std::string("OneBox") : "WithShards";
};

}  // namespace phub::testing
