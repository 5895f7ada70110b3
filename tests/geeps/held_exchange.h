// An exchange that keeps what is pushed, and whose results come when the test says so.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/error.h"
#include "worker/device/host_pages.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/key_queue.h"
#include "worker/geeps/tables.h"

namespace phub::geeps::testing {

// Floats that are mapped twice: for everybody as it is said, and for who writes them.
class TwiceMapped {
 public:
  // The pages of the first `reads_only` floats cannot be written; the others are their neighbours.
  TwiceMapped(size_t reads_only, size_t others) {
    const auto whole = [](size_t floats) {
      return (floats * sizeof(float) + host_page_bytes() - 1) / host_page_bytes() *
             host_page_bytes();
    };
    others_at_ = whole(reads_only) / sizeof(float);
    bytes_ = whole(reads_only) + whole(others);
    const int file = memfd_create("test", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(file, static_cast<off_t>(bytes_)), 0);
    shared_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    writers_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    EXPECT_TRUE(shared_ != MAP_FAILED && writers_ != MAP_FAILED);
    EXPECT_EQ(mprotect(shared_, whole(reads_only), PROT_READ), 0);
  }
  ~TwiceMapped() {
    munmap(shared_, bytes_);
    munmap(writers_, bytes_);
  }
  TwiceMapped(const TwiceMapped&) = delete;
  TwiceMapped& operator=(const TwiceMapped&) = delete;

  const float* read_only() const { return static_cast<const float*>(shared_); }
  float* others() const { return static_cast<float*>(shared_) + others_at_; }
  float* writable() const { return static_cast<float*>(writers_); }

 private:
  size_t others_at_ = 0, bytes_ = 0;
  void* shared_ = nullptr;
  void* writers_ = nullptr;
};

// Parameters are not the cache's to write, and gradients lie behind them.
class HeldExchange : public Exchange {
 public:
  struct Push {
    size_t key;
    int32_t priority;
    bool null;
    std::vector<float> gradient;
  };
  // Keys of these names, of so many elements.
  HeldExchange(std::vector<std::string> names, const std::vector<size_t>& elements)
      : names_(std::move(names)),
        memory_(std::reduce(elements.begin(), elements.end()),
                std::reduce(elements.begin(), elements.end())) {
    size_t at = 0;
    for (const size_t floats : elements) {
      parameters_.emplace_back(memory_.read_only() + at, floats);
      writable_.emplace_back(memory_.writable() + at, floats);
      gradients_.emplace_back(memory_.others() + at, floats);
      at += floats;
    }
  }
  // Those of keys, without digests.
  explicit HeldExchange(std::span<const KeySpec> keys)
      : HeldExchange(names_of(keys), elements_of(keys)) {}
  explicit HeldExchange(std::span<const TableSpec> tables) : HeldExchange(keys_of(tables)) {}

  size_t keys() const override { return names_.size(); }
  const std::string& name(size_t key) const override { return names_[key]; }
  size_t elements(size_t key) const override { return gradients_[key].size(); }
  std::span<float> gradient(size_t key) override { return gradients_[key]; }
  std::span<const float> parameters(size_t key) const override { return parameters_[key]; }
  void push(size_t key, int32_t priority) override {
    add({key, priority, false, {gradients_[key].begin(), gradients_[key].end()}});
  }
  void push_null(size_t key) override { add({key, 0, true, {}}); }
  std::optional<size_t> next() override { return here_.next(); }
  void stop() override { here_.stop(); }
  std::optional<uint32_t> slack() const override { return slack_is; }
  uint32_t rank() const override { return rank_is; }
  uint32_t world_size() const override { return world_is; }
  std::vector<uint32_t> missing_ranks() override { return missing; }

  // What it says.
  std::optional<uint32_t> slack_is = 0;
  uint32_t rank_is = 1, world_is = 4;
  std::vector<uint32_t> missing = {2, 3};

  void wait_for_push(size_t pushes) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return pushes_.size() >= pushes; });
  }
  // The next push, with its gradient: waits for it.
  Push take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return pushes_.size() > taken_; });
    return std::move(pushes_[taken_++]);
  }
  std::vector<size_t> pushed() {
    const std::lock_guard lock(mutex_);
    std::vector<size_t> keys;
    for (const Push& push : pushes_) keys.push_back(push.key);
    return keys;
  }
  void answer(size_t key) {  // parameters -= gradient
    for (size_t i = 0; i < writable_[key].size(); ++i) writable_[key][i] -= gradients_[key][i];
    give_back(key);
  }
  void give_back(size_t key) { here_.add(key); }
  void fail(const Error& error) { here_.fail(error); }
  void refuse_pushes(const std::string& why) {
    const std::lock_guard lock(mutex_);
    refusal_ = why;
  }
  // Until it is open again, push() does not return.
  void set_open(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

 private:
  static std::vector<std::string> names_of(std::span<const KeySpec> keys) {
    std::vector<std::string> names;
    for (const KeySpec& key : keys) names.push_back(table_name(key.name));
    return names;
  }
  static std::vector<size_t> elements_of(std::span<const KeySpec> keys) {
    std::vector<size_t> elements;
    for (const KeySpec& key : keys) elements.push_back(key.elements);
    return elements;
  }
  void add(Push push) {
    std::unique_lock lock(mutex_);
    if (!refusal_.empty()) throw Error(ErrorCode::kFenced, refusal_);
    pushes_.push_back(std::move(push));
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }

  std::vector<std::string> names_;
  TwiceMapped memory_;
  std::vector<std::span<const float>> parameters_;
  std::vector<std::span<float>> gradients_, writable_;
  KeyQueue here_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Push> pushes_;
  size_t taken_ = 0;
  std::string refusal_;
  bool open_ = true;
};

}  // namespace phub::geeps::testing
