// The time of a simulation, which passes only from event to event.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace phub {

class SimTime {
 public:
  // Events of the same instant run in the order in which they were scheduled.
  uint64_t now_ns() const { return now_ns_; }
  void after(uint64_t delay_ns, std::function<void()> action);
  bool idle() const { return events_.empty(); }
  uint64_t next_ns() const;   // REQUIRES: !idle()
  void run_next();            // REQUIRES: !idle()
  void advance(uint64_t ns);  // moves the clock by `ns` and runs everything that is due

 private:
  struct Event {
    uint64_t time;
    uint64_t order;
    std::function<void()> action;
  };
  static bool later(const Event& a, const Event& b) {
    return a.time != b.time ? a.time > b.time : a.order > b.order;
  }

  uint64_t now_ns_ = 0;
  uint64_t order_ = 0;
  std::vector<Event> events_;  // a heap by time and order
};

}  // namespace phub
