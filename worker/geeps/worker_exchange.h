// An exchange with the box: the tables of parameters are the keys of a job (keys_of()). Gradients
// and parameters are the worker's library memory, nothing is copied here, where that memory is f32;
// else they are f32 arrays of this, which pushes and results are converted from and to. Gradients
// may have coded formats. The worker's saver is called by save().
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "worker/geeps/cache.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/key_queue.h"
#include "worker/worker.h"

namespace phub {

namespace geeps {

class WorkerExchange final : public Exchange {
 public:
  // Waits for the present parameters. Throws Error(kInvalid), which names the table, if the
  // worker's keys are not those of keys_of(tables), or rows of a table are sent, or the server
  // saves residuals and the worker has no saver. REQUIRES: if the job needs initial parameters,
  // Worker::broadcast() was called; the worker outlives this, which ends before Worker::rejoin();
  // nothing else pushes to it, calls its wait_any() or registers memory for it.
  WorkerExchange(Worker& worker, std::span<const TableSpec> tables);
  // Nobody is told of pushes in progress. REQUIRES: no next() is in progress.
  ~WorkerExchange() override;
  WorkerExchange(const WorkerExchange&) = delete;
  WorkerExchange& operator=(const WorkerExchange&) = delete;

  size_t keys() const override { return names_.size(); }
  const std::string& name(size_t key) const override { return names_.at(key); }
  size_t elements(size_t key) const override { return worker_.spec().keys.at(key).elements; }
  uint32_t samples(size_t key) const override { return worker_.spec().keys.at(key).rank_limit; }
  std::span<float> gradient(size_t key) override;
  std::span<const float> parameters(size_t key) const override;

  void push(size_t key, int32_t priority) override;
  void push_factors(size_t key, std::span<const FactorPairs> factors, int32_t priority) override;
  void push_null(size_t key) override;
  std::optional<size_t> next() override;
  void stop() override;

  void get_state(std::span<KeyState> states) override { worker_.get_state(states); }
  void set_state(std::span<const KeyState> states) override { worker_.set_state(states); }

  uint64_t saved_after(size_t key) const override;
  void save(RankState tables) override { worker_.save(std::move(tables)); }
  std::optional<std::span<const std::byte>> restored(const std::string& name) const override {
    return worker_.restored(name);
  }

  std::optional<Branches> branches(uint64_t pushes) override;

  std::optional<uint32_t> slack() const override;
  std::vector<uint32_t> missing_ranks() override { return worker_.missing_ranks(); }
  uint32_t rank() const override { return worker_.rank(); }
  uint32_t world_size() const override { return worker_.world_size(); }

 private:
  struct OwnMemory;
  void make_own_memory();
  template <typename Push>
  void push_with(size_t key, Push push);
  [[noreturn]] void fail_with(const Error& error);

  Worker& worker_;
  std::vector<std::string> names_;  // the keys' names, those of the tables
  std::vector<uint64_t> begun_;     // by key: the round before the first push
  std::unique_ptr<OwnMemory> own_;

  std::mutex mutex_;        // guards the members below
  std::vector<bool> away_;  // by key: pushed and not yet returned by next()
  Failure failure_;
  bool stopped_ = false;
};

}  // namespace geeps
}  // namespace phub
