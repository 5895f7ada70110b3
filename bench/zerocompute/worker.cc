#include <sys/eventfd.h>

#include <algorithm>

#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/run.h"

namespace phub {
namespace {

// Thrown when another worker gave up, whose slot has the reason.
struct Aborted {};

class WorkerProcess {
 public:
  WorkerProcess(const CaseSpec& spec, SharedCase& shared, uint32_t rank)
      : shared_(shared),
        head_(shared.head()),
        slot_(shared.slots()[rank]),
        number_(rank),
        workers_(spec.workers),
        rank_(spec, rank, shared.reference()) {
    slot_.sizes = sizes_of(spec, rank_.keys());
  }

  void run() {
    for (uint32_t seen = 0;; ++seen) {
      park();
      head_.orders.wait(seen, 0);
      if (head_.workers.aborted()) throw Aborted();
      if (head_.order.finish) break;
      do {
        run_round(++round_);
      } while (!head_.stop.load(std::memory_order_acquire));
    }
    slot_.checked = rank_.checked();
    slot_.wrong = rank_.wrong();
    set_text(slot_.wrong_text, rank_.wrong_text());
    slot_.stats = rank_.worker().stats();
    rank_.worker().leave();
  }

 private:
  void meet() {
    if (!head_.workers.wait()) throw Aborted();
  }

  void park() {
    meet();
    if (number_ == 0) eventfd_write(shared_.parked_fd(), 1);
  }

  void run_round(uint64_t round) {
    rank_.fill(round);
    meet();
    const int64_t run_before_ns = own_run_ns();
    slot_.start_ns = monotonic_ns();
    slot_.pushed_ns = rank_.exchange();
    slot_.end_ns = monotonic_ns();
    if (head_.order.record) slot_.run_ns += own_run_ns() - run_before_ns;
    meet();
    if (number_ == 0) finish_round();
    // All elements are compared in every round: each on one worker, on another one the next round.
    rank_.check_part(round, (number_ + round) % workers_, workers_);
    meet();
    rank_.check_edges(round);
  }

  // Rank 0, between two barriers: the round's time, and whether it was the last of this order.
  void finish_round() {
    int64_t start = INT64_MAX, end = INT64_MIN;
    for (const WorkerSlot& slot : shared_.slots()) {
      start = std::min(start, slot.start_ns);
      end = std::max(end, slot.end_ns);
    }
    const Order& order = head_.order;
    ++rounds_of_order_;
    if (order.record) {
      const uint64_t index = head_.recorded.load();
      shared_.round_us()[index] = static_cast<double>(end - start) / 1e3;
      if (index < kLatenessRounds) {
        for (WorkerSlot& slot : shared_.slots()) {
          slot.pushed_us[index] = static_cast<double>(slot.pushed_ns - start) / 1e3;
          slot.done_us[index] = static_cast<double>(slot.end_ns - start) / 1e3;
        }
      }
      head_.recorded.store(index + 1);
    }
    const bool stop = rounds_of_order_ >= order.rounds || head_.recorded.load() == kMaxRounds ||
                      (rounds_of_order_ >= order.least_rounds && end >= order.deadline_ns);
    if (stop) rounds_of_order_ = 0;
    head_.rounds_done.fetch_add(1);
    head_.stop.store(stop, std::memory_order_release);
  }

  SharedCase& shared_;
  SharedHead& head_;
  WorkerSlot& slot_;
  const uint32_t number_;
  const uint32_t workers_;
  Rank rank_;
  uint64_t round_ = 0;
  uint64_t rounds_of_order_ = 0;
};

}  // namespace

int run_worker(const CaseSpec& spec, SharedCase& shared, uint32_t rank) {
  WorkerSlot& slot = shared.slots()[rank];
  try {
    WorkerProcess(spec, shared, rank).run();
    return 0;
  } catch (const Aborted&) {
    return 1;
  } catch (const std::exception& error) {
    set_text(slot.error, error.what());
  }
  shared.head().workers.abort();
  return 1;
}

}  // namespace phub
