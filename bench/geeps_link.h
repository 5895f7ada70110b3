// A simulated network link between a worker's cache and its box. It delays each key by the time
// that its bytes take on the link, in both directions, on top of the time of the exchange behind
// it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

#include "worker/geeps/exchange.h"
#include "worker/geeps/key_queue.h"

namespace phub::geeps_bench {

// A key goes up in slices of the size of a chunk, those of higher priority first; its last slice
// pushes it. Keys come down whole, in their order. The slices of a key come in the order in which
// they went up, but not before the other workers' slices went up: if a result comes later than this
// worker's last slice, all slices of the others are assumed to be late by the same time. Times are
// the link's own, so that delays of the machine do not add up.
class LinkedExchange final : public geeps::Exchange {
 public:
  // REQUIRES: the exchange outlives this, and only this calls it.
  LinkedExchange(geeps::Exchange& behind, double bytes_per_second);
  ~LinkedExchange() override;

  size_t keys() const override { return behind_.keys(); }
  const std::string& name(size_t key) const override { return behind_.name(key); }
  size_t elements(size_t key) const override { return behind_.elements(key); }
  std::span<float> gradient(size_t key) override { return behind_.gradient(key); }
  std::span<const float> parameters(size_t key) const override { return behind_.parameters(key); }
  void push(size_t key, int32_t priority) override;
  void push_null(size_t key) override;
  std::optional<size_t> next() override { return here_.next(); }
  void stop() override { here_.stop(); }
  std::optional<uint32_t> slack() const override { return behind_.slack(); }
  std::vector<uint32_t> missing_ranks() override { return behind_.missing_ranks(); }
  uint32_t rank() const override { return behind_.rank(); }
  uint32_t world_size() const override { return behind_.world_size(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Sending {
    int32_t priority;
    uint64_t order;
    size_t key;
    size_t left_bytes;
    Clock::time_point since;
    bool operator<(const Sending& other) const {  // the first of a heap
      return priority != other.priority ? priority < other.priority : order > other.order;
    }
  };
  struct Key {
    bool null = false;
    Clock::time_point first_up, last_up;  // when its first and its last slice were up
  };
  struct Result {
    size_t key;
    Clock::time_point at;
    bool operator<(const Result& other) const { return key > other.key; }  // the first of a heap
  };

  Clock::duration time_of(size_t bytes) const;
  void send(const std::stop_token& stop);
  void await_results();
  void receive(const std::stop_token& stop);
  template <class Run>
  void guarded(Run run);

  geeps::Exchange& behind_;
  const double bytes_per_second_;
  geeps::KeyQueue here_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable_any sending_changed_, results_changed_;
  std::priority_queue<Sending> sending_;
  std::priority_queue<Result> results_;
  std::vector<Key> keys_;
  uint64_t pushes_ = 0;

  std::vector<std::jthread> threads_;
};

}  // namespace phub::geeps_bench
