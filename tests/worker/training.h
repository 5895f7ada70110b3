// A job of processes that train and note what they see (fault_worker.cc), to be disturbed.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <deque>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/transport/shm_rig.h"
#include "tests/worker/fault_oracle.h"
#include "tests/worker/process.h"
#include "transport/control/control_client.h"
#include "transport/control/messages_json.h"

namespace phub::testing {

// Far more than anything takes here, for machines with other things to do.
inline constexpr std::chrono::milliseconds kLong{60000};

template <typename Condition>
bool becomes(Condition condition, std::chrono::milliseconds limit = kLong) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  return true;
}

using Flags = std::vector<std::string>;

// Lies beside the test's own program.
inline std::string fault_worker() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "fault_worker";
}

// One job and the processes that were ever in it.
class Training {
 public:
  Training(std::string server, JobSpec spec) : server_(std::move(server)), spec_(std::move(spec)) {}

  // A worker for a rank (-1: any). `launcher`: the words before its command, of a program that
  // becomes it.
  Process& start(int32_t rank, const Flags& flags = {}, const Flags& launcher = {}) {
    return start_at(server_, rank, flags, launcher);
  }
  // At another server than that whose status and log are looked at.
  Process& start_at(const std::string& server, int32_t rank, const Flags& flags = {},
                    const Flags& launcher = {}) {
    const std::string at = directory_.path() + "/" + std::to_string(workers_.size());
    std::vector<std::string> command = launcher;
    command.insert(command.end(), {fault_worker(), "--server", server, "--job", to_json(spec_),
                                   "--notes", at + ".notes", "--rank", std::to_string(rank)});
    command.insert(command.end(), flags.begin(), flags.end());
    notes_.push_back(at + ".notes");
    undone_.emplace_back();
    return workers_.emplace_back(command, at + ".out");
  }

  JobStatus status() const {
    for (JobStatus& job : ControlClient(server_).status().jobs) {
      if (job.name == spec_.name) return job;
    }
    return {};
  }
  RankStatus rank(uint32_t rank) const {
    const JobStatus job = status();
    const auto at = std::ranges::find(job.ranks, rank, &RankStatus::rank);
    return at == job.ranks.end() ? RankStatus{} : *at;
  }
  std::vector<LogRecord> log() const { return ControlClient(server_).log(spec_.name); }
  uint64_t round() const { return status().completed_round; }
  ::testing::AssertionResult goes_on(uint64_t rounds) const {
    const uint64_t goal = round() + rounds;
    if (becomes([&] { return round() >= goal; })) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "stuck in round " << round() << " before " << goal;
  }

  // Everyone who is still there leaves.
  void end() {
    for (Process& worker : workers_) worker.send(SIGTERM);
    for (Process& worker : workers_) {
      EXPECT_TRUE(worker.wait(kLong).has_value()) << "hangs: " << worker.output();
    }
  }
  // The server is dead: the lives of all workers end, and those that go on begin another.
  void end_lives() {
    for (size_t i = 0; i < notes_.size(); ++i) {
      while (std::filesystem::exists(notes_of(i, undone_[i].size()))) {
        undone_[i].push_back(~uint64_t{0});
      }
    }
  }
  // What was seen of this round and later ones in lives that have ended has been undone.
  void undo_from(uint64_t round) {
    for (std::vector<uint64_t>& lives : undone_) {
      for (uint64_t& undone : lives) undone = std::min(undone, round);
    }
  }
  // From now on workers start at this server.
  void move_to(std::string server) {
    server_ = std::move(server);
    end_lives();
  }
  // What everybody saw is what the log says.
  void check() const { check(log()); }
  void check(const std::vector<LogRecord>& log) const {
    std::vector<Sight> sights;
    size_t seen = 0;
    for (size_t i = 0; i < notes_.size(); ++i) {
      std::vector<Sight> lives;
      while (lives.empty() || std::filesystem::exists(notes_of(i, lives.size()))) {
        lives.push_back(read_sight(notes_of(i, lives.size()), chunks_of(spec_).size()));
      }
      uint64_t undone = ~uint64_t{0};
      for (size_t life = lives.size(); life-- > 0;) {
        Sight& sight = lives[life];
        if (life < undone_[i].size()) undone = std::min(undone, undone_[i][life]);
        std::erase_if(sight.rounds, [undone](const Seen& seen) { return seen.round >= undone; });
        seen += sight.rounds.size();
        if (sight.first_round > 0) undone = std::min(undone, sight.first_round);
        sights.push_back(std::move(sight));
      }
    }
    EXPECT_GT(seen, 0u);
    EXPECT_EQ(check_sights(spec_, log, std::move(sights)), "");
  }

 private:
  std::string notes_of(size_t worker, size_t life) const {
    return notes_of_life(notes_[worker], static_cast<int>(life));
  }

  std::string server_;
  const JobSpec spec_;
  const TemporaryDirectory directory_;
  std::deque<Process> workers_;
  std::vector<std::string> notes_;
  std::vector<std::vector<uint64_t>> undone_;  // for each of them, by its lives that have ended
};

// It ended as it should.
inline bool left(Process& worker) {
  return worker.wait(kLong) == 0 && worker.output().ends_with("left\n");
}

}  // namespace phub::testing
