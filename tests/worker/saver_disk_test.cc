// What a box saves while its disk is slow, or while it is to end: a box in this process, whose disk
// the test stops.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "phub/checkpoint/files.h"
#include "phub/checkpoint/store.h"
#include "phub/server.h"
#include "tests/worker/box.h"
#include "tests/worker/training.h"
#include "transport/control/http_client.h"
#include "worker/worker.h"

namespace phub::testing {
namespace saver_disk_test {

// The operating system's, but for some files, the parts of ranks: they wait until the disk goes on.
class SlowDisk final : public Files {
 public:
  explicit SlowDisk(std::string slow = "rank-") : slow_(std::move(slow)) {}
  void stop() { set(true); }
  void go_on() { set(false); }

  std::unique_ptr<OutputFile> create(const std::string& path) override {
    std::unique_lock lock(mutex_);
    if (path.find(slow_) != path.npos) goes_on_.wait(lock, [this] { return !stopped_; });
    return disk_.create(path);
  }
  std::unique_ptr<InputFile> open(const std::string& path) override { return disk_.open(path); }
  void make_folder(const std::string& path) override { disk_.make_folder(path); }
  void rename(const std::string& from, const std::string& to) override { disk_.rename(from, to); }
  bool link(const std::string& from, const std::string& to) override {
    return disk_.link(from, to);
  }
  void sync_folder(const std::string& path) override { disk_.sync_folder(path); }
  void remove(const std::string& path) override { disk_.remove(path); }
  std::vector<FolderEntry> list(const std::string& path) override { return disk_.list(path); }
  std::unique_ptr<FileLock> lock(const std::string& path) override { return disk_.lock(path); }

 private:
  void set(bool stopped) {
    const std::lock_guard lock(mutex_);
    stopped_ = stopped;
    goes_on_.notify_all();
  }
  const std::string slow_;  // in the names of these files
  Files& disk_ = system_files();
  std::mutex mutex_;
  std::condition_variable goes_on_;
  bool stopped_ = false;  // guarded by mutex_
};

class SavedBox : public ::testing::Test {
 protected:
  void begin(uint64_t every) {
    box_.emplace("pack:1 core:2 pu:1", uint64_t{1} << 33, Box::Wrap(),
                 CheckpointOptions{.folder = directory_.path(), .every = every, .files = &disk_});
  }
  static JobSpec spec() {
    JobSpec spec;
    spec.name = "one";
    spec.optimizer = "sgd";
    spec.keys = {{"a", 1000}, {"b", 10}};
    spec.lease_ms = 30'000;  // nobody is to be lost for being slow
    return spec;
  }
  JobStatus status() const { return ControlClient(box_->address()).job_status("one"); }
  static void step(Worker& worker) {
    for (size_t key = 0; key < worker.keys(); ++key) worker.push_null(key);
    worker.wait_all();
  }

  const TemporaryDirectory directory_ = TemporaryDirectory::in_memory();
  SlowDisk disk_;
  std::optional<Box> box_;
};

TEST_F(SavedBox, ASlowDiskHoldsUpNoRank) {
  begin(2);
  std::vector<uint64_t> asked;
  WorkerOptions options = box_->options(spec());
  options.saver = [&](uint64_t round) {
    asked.push_back(round);
    return RankState{{"state", {}}};
  };
  Worker worker(options);
  worker.wait_all();
  ASSERT_TRUE(becomes([&] { return status().next_saved_round == 2; }));
  disk_.stop();
  auto training = std::async(std::launch::async, [&] {
    for (int round = 1; round <= 20; ++round) step(worker);
  });
  EXPECT_EQ(training.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(status().durable_round, 0u);
  EXPECT_EQ(HttpClient(box_->address()).request("GET", "/readyz", "", "", 30000).status, 200u)
      << "as it was seen before";
  disk_.go_on();
  training.get();
  EXPECT_EQ(asked, (std::vector<uint64_t>{2, 4, 6, 8, 10, 12, 14, 16, 18, 20}));
  EXPECT_TRUE(becomes([&] { return status().durable_round == 2; }));
  EXPECT_TRUE(becomes([&] {
    step(worker);
    return status().durable_round > 20;
  }));
  EXPECT_EQ(status().void_snapshots, 0u);
  worker.leave();
}

TEST_F(SavedBox, ADiskThatHangsIsNamed) {
  SlowDisk disk{std::string(kParametersFile)};
  box_.emplace("pack:1 core:2 pu:1", uint64_t{1} << 33, Box::Wrap(),
               CheckpointOptions{.folder = directory_.path(), .every = 2, .files = &disk});
  disk.stop();
  WorkerOptions options = box_->options(spec());
  options.spec.progress_limit_ms = 100;
  Worker worker(options);
  for (int round = 1; round <= 4; ++round) step(worker);
  const auto is_named = [](const std::string& note) {
    return note.starts_with("job 'one': round ") && note.ends_with("or does not answer");
  };
  EXPECT_TRUE(becomes([&] { return std::ranges::any_of(box_->notes(), is_named); }));
  disk.go_on();
  EXPECT_TRUE(becomes([&] { return status().durable_round >= 2; }));
  worker.leave();
  box_.reset();  // while the disk is there
}

// As with two signals: the second comes before any core knows of the first one's snapshot.
TEST_F(SavedBox, WhatIsAboutToBeSavedIsNotSavedTwice) {
  begin(1'000'000'000);
  Worker worker(box_->options(spec()));
  for (int round = 1; round <= 20; ++round) step(worker);
  HttpClient probe(box_->address());
  EXPECT_EQ(probe.request("GET", "/readyz", "", "", 30000).status, 200u);
  box_->on_control([](Server& server) {
    server.save_all();
    server.save_all();
  });
  EXPECT_EQ(probe.request("GET", "/readyz", "", "", 30000).status, 503u) << "it is about to end";
  EXPECT_EQ(probe.request("GET", "/healthz", "", "", 30000).status, 200u);
  bool saving = true;
  EXPECT_TRUE(becomes([&] {
    step(worker);
    box_->on_control([&](Server& server) { saving = server.is_saving(); });
    return !saving;
  }));
  const std::filesystem::directory_iterator folders(directory_.path() + "/one");
  EXPECT_EQ(std::ranges::count_if(folders,
                                  [](const auto& entry) {
                                    return entry.path().filename().string().starts_with("round-");
                                  }),
            1);
  EXPECT_GE(status().durable_round, 20u);
  worker.leave();
}

}  // namespace saver_disk_test
}  // namespace phub::testing
