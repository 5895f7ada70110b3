// An endpoint whose writes keep to the budgets of the NICs that they cross: post() refuses a write
// that there are no tokens for, before it is queued anywhere, so that the poster keeps it in an
// order of its own.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "transport/paced/nic_budget.h"
#include "transport/paced/shares.h"
#include "transport/transport.h"

namespace phub {

// Owned by the endpoint's thread. REQUIRES: its arguments outlive it.
class PacedEndpoint : public virtual Endpoint {
 public:
  PacedEndpoint(Endpoint& endpoint, const NicBudget& budget)
      : endpoint_(endpoint), budget_(budget) {}

  // Sets the budgets of the queues that the thread posts to, by queue.
  void use(std::vector<BudgetShare*> of_queue) { of_queue_ = std::move(of_queue); }

  size_t poll(std::span<Arrival> out) final { return endpoint_.poll(out); }
  bool post(QueuePair to, const Write& write) final;
  void flush() final { endpoint_.flush(); }
  bool arm(std::span<const uint32_t> wake_after) final { return endpoint_.arm(wake_after); }
  void disarm() final { endpoint_.disarm(); }
  int wake_fd() const final { return endpoint_.wake_fd(); }
  EndpointCounters counters() const final { return endpoint_.counters(); }
  bool crosses_nic(QueuePair to) const final { return endpoint_.crosses_nic(to); }
  uint64_t refused_for_ns() const final;

 private:
  Endpoint& endpoint_;
  const NicBudget& budget_;
  std::vector<BudgetShare*> of_queue_;
  uint64_t refused_until_ns_ = 0;  // the earliest that a bucket has told since it was over
  bool no_room_ = false;           // the endpoint itself refused the latest that was paid for
};

inline bool PacedEndpoint::post(QueuePair to, const Write& write) {
  if (!endpoint_.crosses_nic(to)) return endpoint_.post(to, write);
  const uint64_t now = budget_.clock(), bytes = wire_bytes(write.bytes);
  TokenBucket& bucket = of_queue_[to.queue]->bucket(budget_, now);
  if (const uint64_t wait = bucket.wait_ns(bytes, now); wait > 0) {
    const bool over = refused_until_ns_ <= now;
    if (over || now + wait < refused_until_ns_) refused_until_ns_ = now + wait;
    return false;
  }
  no_room_ = !endpoint_.post(to, write);
  return !no_room_ && bucket.take(bytes, now);
}

inline uint64_t PacedEndpoint::refused_for_ns() const {
  if (no_room_) return 0;
  const uint64_t now = budget_.clock();
  return refused_until_ns_ > now ? refused_until_ns_ - now : 1;
}

}  // namespace phub
