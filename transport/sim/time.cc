#include "transport/sim/time.h"

#include <algorithm>
#include <utility>

namespace phub {

void SimTime::after(uint64_t delay_ns, std::function<void()> action) {
  events_.push_back({now_ns_ + delay_ns, order_++, std::move(action)});
  std::push_heap(events_.begin(), events_.end(), later);
}

uint64_t SimTime::next_ns() const { return events_.front().time; }

void SimTime::run_next() {
  std::pop_heap(events_.begin(), events_.end(), later);
  Event event = std::move(events_.back());
  events_.pop_back();
  now_ns_ = std::max(now_ns_, event.time);
  event.action();
}

void SimTime::advance(uint64_t ns) {
  const uint64_t end = now_ns_ + ns;
  while (!idle() && next_ns() <= end) run_next();
  now_ns_ = end;
}

}  // namespace phub
