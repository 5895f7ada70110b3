#include "bench/zerocompute_worker.h"

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <vector>

#include "bench/zerocompute_pattern.h"

namespace phub {
namespace {

// Thrown when another worker gave up, which has said why.
struct Aborted {};

class WorkerProcess {
 public:
  WorkerProcess(const CaseSpec& spec, SharedCase& shared, uint32_t rank)
      : spec_(spec),
        shared_(shared),
        head_(shared.head()),
        slot_(shared.slots()[rank]),
        rank_(rank),
        width_(kernels::bytes_of(spec.dtype)),
        checker_(spec.checker, shared.reference()),
        worker_(options_of(spec, rank)) {
    for (const KeySpec& key : spec.table.keys) {
      key_first_.push_back(elements_);
      elements_ += key.elements;
      slot_.chunks += (key.elements + chunk_elements() - 1) / chunk_elements();
    }
    if (spec.copy) copy_.resize(elements_ * width_);
  }

  void run() {
    worker_.wait_all();  // the parameters that the job begins with
    for (uint32_t seen = 0;; ++seen) {
      park();
      head_.orders.wait(seen, 0);
      if (head_.workers.aborted()) throw Aborted();
      if (head_.order.finish) break;
      do {
        run_round(++round_);
      } while (!head_.stop.load(std::memory_order_acquire));
    }
    slot_.stats = worker_.stats();
    worker_.leave();
  }

 private:
  static WorkerOptions options_of(const CaseSpec& spec, uint32_t rank) {
    WorkerOptions options = spec.worker;
    options.rank = static_cast<int32_t>(rank);
    return options;
  }

  uint32_t chunk_elements() const { return spec_.worker.spec.chunk_elements; }

  void meet() {
    if (!head_.workers.wait()) throw Aborted();
  }

  void park() {
    meet();
    if (rank_ == 0) eventfd_write(shared_.parked_fd(), 1);
  }

  void run_round(uint64_t round) {
    for (size_t k = 0; k < key_first_.size(); ++k) {
      fill_gradients(rank_, round, key_first_[k], spec_.table.keys[k].elements, spec_.dtype,
                     worker_.gradient_bytes(k).data());
    }
    meet();
    slot_.start_ns = monotonic_ns();
    exchange();
    slot_.end_ns = monotonic_ns();
    meet();
    if (rank_ == 0) finish_round();
    check_slice(round);
    meet();
    check_edges(round);
  }

  void exchange() {
    const size_t keys = key_first_.size();
    for (size_t k = 0; k < keys; ++k) worker_.push(k);
    if (!spec_.copy) {
      worker_.wait_all();
      return;
    }
    for (size_t k = 0; k < keys; ++k) {
      worker_.wait(k);
      worker_.pull(k,
                   {copy_.data() + key_first_[k] * width_, spec_.table.keys[k].elements * width_});
    }
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
      head_.recorded.store(index + 1);
    }
    const bool stop = rounds_of_order_ >= order.rounds || head_.recorded.load() == kMaxRounds ||
                      (rounds_of_order_ >= order.least_rounds && end >= order.deadline_ns);
    if (stop) rounds_of_order_ = 0;
    head_.rounds_done.fetch_add(1);
    head_.stop.store(stop, std::memory_order_release);
  }

  const std::byte* results(size_t key) const {
    return spec_.copy ? copy_.data() + key_first_[key] * width_
                      : worker_.parameter_bytes(key).data();
  }

  // All elements are compared in every round: each on one worker, on another one the next round.
  void check_slice(uint64_t round) {
    const uint64_t part = (rank_ + round) % spec_.workers;
    const uint64_t begin = elements_ * part / spec_.workers;
    const uint64_t end = elements_ * (part + 1) / spec_.workers;
    for (size_t k = 0; k < key_first_.size(); ++k) {
      const uint64_t first = std::max(begin, key_first_[k]);
      const uint64_t last = std::min(end, key_first_[k] + spec_.table.keys[k].elements);
      if (first >= last) continue;
      note(round, k, last - first,
           checker_.advance_and_check(round, first, last - first,
                                      results(k) + (first - key_first_[k]) * width_));
    }
  }

  // And on every worker the first and last element of every chunk.
  void check_edges(uint64_t round) {
    for (size_t k = 0; k < key_first_.size(); ++k) {
      for_each_chunk_edge(key_first_[k], spec_.table.keys[k].elements, chunk_elements(),
                          [&](uint64_t first, size_t n) {
                            const std::byte* at = results(k) + (first - key_first_[k]) * width_;
                            note(round, k, n, checker_.check(round, first, n, at));
                          });
    }
  }

  void note(uint64_t round, size_t key, uint64_t compared, const Mismatch& mismatch) {
    slot_.checked += compared;
    if (mismatch.count == 0) return;
    if (slot_.wrong == 0) {
      set_text(slot_.wrong_text,
               fmt::format("round {}, rank {}, key {} '{}', element {}: {} instead of {}", round,
                           rank_, key, spec_.table.keys[key].name,
                           mismatch.element - key_first_[key], mismatch.found, mismatch.expected));
    }
    slot_.wrong += mismatch.count;
  }

  const CaseSpec& spec_;
  SharedCase& shared_;
  SharedHead& head_;
  WorkerSlot& slot_;
  const uint32_t rank_;
  const size_t width_;
  Checker checker_;
  Worker worker_;
  std::vector<uint64_t> key_first_;  // of the model's elements, without padding
  uint64_t elements_ = 0;
  std::vector<std::byte> copy_;
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
