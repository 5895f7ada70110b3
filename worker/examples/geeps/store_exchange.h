// An exchange with a store of rows (../../iterstore/store.h): the pieces of parameters are tables
// of the store, whose rows every process reads, and adds −rate · gradient to. It is for plain SGD.
// In lock-step the bits are those of a job of the box with that optimizer, if the rate is a power
// of two: then no product is rounded.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "worker/geeps/cache.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/key_queue.h"
#include "worker/iterstore/store.h"
#include "worker/memory/key_arrays.h"

namespace phub::examples {

// A clock of the store is one of all keys: their updates go out when the last of them is pushed.
class StoreExchange final : public geeps::Exchange {
 public:
  // Waits for all ranks. `initial`: of rank 0, the parameters of all keys one after another; those
  // of others do not count. Throws Error as a store does.
  StoreExchange(const WorkerOptions& worker, std::span<const geeps::TableSpec> tables, double rate,
                std::span<const float> initial);
  ~StoreExchange() override;  // REQUIRES: no next() is in progress

  // From the first clock on that has not begun.
  void set_rate(double rate) { rate_ = static_cast<float>(rate); }

  size_t keys() const override { return tables_.size(); }
  const std::string& name(size_t key) const override { return tables_.at(key).name; }
  size_t elements(size_t key) const override { return gradients_[key].size(); }
  std::span<float> gradient(size_t key) override { return gradients_[key]; }
  std::span<const float> parameters(size_t key) const override { return parameters_[key]; }

  void push(size_t key, int32_t priority) override;
  void push_null(size_t key) override;
  std::optional<size_t> next() override { return done_.next(); }
  void stop() override { done_.stop(); }

  std::optional<uint32_t> slack() const override;
  uint32_t rank() const override { return static_cast<uint32_t>(worker_.rank); }
  uint32_t world_size() const override { return worker_.spec.world_size; }

 private:
  enum class Pushed : uint8_t { kNo, kGradient, kNull };

  void begin(std::span<const float> initial);
  void push(size_t key, Pushed what);
  void run(const std::stop_token& stop);
  void exchange(iterstore::StoreThread& mine, std::span<const Pushed> pushed);

  const WorkerOptions worker_;
  const std::vector<geeps::TableSpec> tables_;  // by key
  std::vector<std::vector<uint64_t>> rows_;     // by table: all of its rows
  std::atomic<float> rate_;
  KeyArrays gradients_, parameters_;
  std::vector<float> change_;  // the change of one key
  iterstore::Store store_;
  geeps::KeyQueue done_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable_any changed_;
  std::vector<Pushed> pushed_;  // by key, in the clock to come
  size_t missing_ = 0;          // the number of these that are missing

  std::jthread thread_;
};

}  // namespace phub::examples
