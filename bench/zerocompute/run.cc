#include "bench/zerocompute/run.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "bench/roofline.h"
#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/model_chunks.h"
#include "bench/zerocompute/shared.h"
#include "kernels/slots.h"
#include "transport/error.h"
#include "worker/examples/processes.h"

namespace phub {
namespace {

// The measured rounds come in this many parts, with the limit measured before, between and after.
constexpr uint32_t kParts = 4;
constexpr uint32_t kLimitPasses = 3;
constexpr uint64_t kLeastRounds = 5;
constexpr int kExitLimitMs = 10000;

// Spinning at the barrier would take the core from workers that have not arrived, unless there are
// more cores than workers.
int64_t barrier_spin_ns(uint32_t workers) {
  return static_cast<long>(workers) < sysconf(_SC_NPROCESSORS_ONLN) ? 20'000 : 0;
}

class Coordinator {
 public:
  Coordinator(const CaseSpec& spec, Progress& progress,
              const volatile std::sig_atomic_t& interrupted)
      : spec_(spec),
        progress_(progress),
        interrupted_(interrupted),
        shared_(spec.workers, Checker::reference_bytes(spec.checker),
                barrier_spin_ns(spec.workers)) {
    children_.reserve(spec.workers);
    for (uint32_t rank = 0; rank < spec.workers; ++rank) {
      const auto body = [this, rank] {
        std::signal(SIGINT, SIG_IGN);  // the coordinator decides
        std::signal(SIGTERM, SIG_DFL);
        return run_worker(spec_, shared_, rank);
      };
      children_.emplace_back(body, SIGKILL);
    }
    wait_parked("joining");
  }

  void issue(const Order& order) {
    shared_.head().order = order;
    shared_.head().stop.store(false);
    shared_.head().orders.raise();
  }

  // Returns when the workers have followed the order and are parked again.
  void wait_parked(std::string_view what) {
    std::vector<pollfd> watched{{.fd = shared_.parked_fd(), .events = POLLIN, .revents = 0}};
    for (const Child& child : children_) {
      watched.push_back({.fd = child.fd(), .events = POLLIN, .revents = 0});
    }
    for (;;) {
      poll(watched.data(), watched.size(), 100);
      if (interrupted_) fail(ErrorCode::kTimeout, "interrupted");
      check_children(false);
      eventfd_t count = 0;
      if (eventfd_read(shared_.parked_fd(), &count) == 0) return;
      progress_.update(fmt::format("{}, {} rounds done", what, shared_.head().rounds_done.load()));
    }
  }

  void finish() {
    issue({.finish = true});
    const int64_t deadline = monotonic_ns() + kExitLimitMs * 1'000'000ll;
    for (Child& child : children_) {
      const int64_t left_ms = (deadline - monotonic_ns()) / 1'000'000;
      if (!child.wait(static_cast<int>(std::max<int64_t>(left_ms, 0)))) {
        fail(ErrorCode::kTimeout, "a worker did not leave within {} s", kExitLimitMs / 1000);
      }
    }
    check_children(true);
  }

  SharedCase& shared() { return shared_; }

 private:
  // Throws the error of the first worker that gave up.
  void check_children(bool may_end) {
    bool failed = shared_.head().workers.aborted();
    for (Child& child : children_) {
      const std::optional<std::string> how = child.ended();
      failed |= how && (!may_end || !how->empty());
    }
    if (!failed) return;
    // Let all workers notice it and write their errors.
    shared_.head().workers.abort();
    shared_.head().orders.raise();
    for (Child& child : children_) child.wait(1000);
    for (uint32_t rank = 0; rank < spec_.workers; ++rank) {
      const char* error = shared_.slots()[rank].error;
      if (*error) fail(ErrorCode::kInternal, "worker {}: {}", rank, error);
    }
    for (uint32_t rank = 0; rank < spec_.workers; ++rank) {
      const std::optional<std::string> how = children_[rank].ended();
      if (how && how->starts_with("killed")) {
        fail(ErrorCode::kInternal, "worker {}: {}", rank, *how);
      }
    }
    fail(ErrorCode::kInternal, "a worker ended before it was told to");
  }

  const CaseSpec& spec_;
  Progress& progress_;
  const volatile std::sig_atomic_t& interrupted_;
  SharedCase shared_;
  std::vector<Child> children_;
};

using Coordinators = std::vector<std::unique_ptr<Coordinator>>;

// All jobs at once; returns when all of them are parked again.
void run_order(const Coordinators& jobs, const Order& order, std::string_view what) {
  for (const auto& job : jobs) job->issue(order);
  for (const auto& job : jobs) job->wait_parked(what);
}

// The times of the server's cores, over the orders that were measured.
class CoreMeter {
 public:
  explicit CoreMeter(pid_t server) : server_(server) {}

  void start() { before_ = read(); }
  void stop() {
    const std::vector<ThreadTimes> now = read();
    if (now.size() != before_.size()) return;
    times_.resize(now.size());
    for (size_t i = 0; i < now.size(); ++i) {
      times_[i].run_ns += now[i].run_ns - before_[i].run_ns;
      times_[i].waited_ns += now[i].waited_ns - before_[i].waited_ns;
    }
  }
  const std::vector<ThreadTimes>& times() const { return times_; }

 private:
  std::vector<ThreadTimes> read() const {
    return server_ > 0 ? core_times(server_) : std::vector<ThreadTimes>();
  }

  pid_t server_;
  std::vector<ThreadTimes> before_, times_;
};

void run_parts(const Coordinators& jobs, const Schedule& schedule, Roofline* roofline,
               CoreMeter& cores, Progress& progress) {
  if (schedule.warmup > 0) {
    run_order(jobs, {.rounds = schedule.warmup, .least_rounds = schedule.warmup}, "warming up");
  }
  const auto measure_limit = [&] {
    if (!roofline) return;
    progress.update("measuring the memory's limit");
    roofline->measure(kLimitPasses);
  };
  measure_limit();
  // Between two parts the first job to finish waits for the last: no more of them than there must
  // be.
  const uint32_t parts = roofline ? kParts : 1;
  uint64_t left = schedule.rounds > 0 ? schedule.rounds : kMaxRounds;
  const int64_t part_ns = static_cast<int64_t>(schedule.seconds * 1e9 / parts);
  for (uint32_t part = 0; part < parts && left > 0; ++part) {
    Order order{.record = true};
    if (schedule.rounds > 0) {
      order.rounds = order.least_rounds = (left + parts - part - 1) / (parts - part);
    } else {
      order.rounds = left;
      order.least_rounds = part == 0 ? (kLeastRounds - parts + 1) : 1;
      order.deadline_ns = monotonic_ns() + part_ns;
    }
    cores.start();
    run_order(jobs, order, "measuring");
    cores.stop();
    uint64_t most = 0;
    for (const auto& job : jobs) most = std::max(most, job->shared().head().recorded.load());
    left = (schedule.rounds > 0 ? schedule.rounds : kMaxRounds) - most;
    measure_limit();
  }
}

CaseResult collect(const SharedCase& shared) {
  CaseResult result{shared.slots()[0].sizes};
  result.rounds = shared.head().recorded.load();
  result.us = summarize(shared.round_us().first(result.rounds));
  result.exchanges_per_s = static_cast<double>(result.rounds) / (result.us.total / 1e6);
  for (const WorkerSlot& slot : shared.slots()) {
    result.wrong += slot.wrong;
    result.checked += slot.checked;
    if (result.wrong_text.empty()) result.wrong_text = slot.wrong_text;
    result.stats.pushes += slot.stats.pushes;
    result.stats.chunks_pushed += slot.stats.chunks_pushed;
    result.stats.chunks_received += slot.stats.chunks_received;
    result.stats.bytes_copied += slot.stats.bytes_copied;
    result.stats.sleeps += slot.stats.sleeps;
  }
  return result;
}

// The figures of the verdict, but for the memory's limit.
Measured measured_of(const CaseSpec& spec, const CaseResult& result, const SharedCase& shared,
                     const Schedule& schedule, const std::vector<ThreadTimes>& cores) {
  Measured m{.workers = spec.workers, .round_us = result.us.p50};
  if (schedule.link_gbps > 0) {
    m.network_us = network_us(result, schedule.link_gbps);
  }
  const double all_ns = result.us.total * 1e3;
  double run_ns = 0;
  for (const WorkerSlot& slot : shared.slots()) {
    const size_t rounds = std::min<size_t>(result.rounds, kLatenessRounds);
    m.pushed_us.push_back(usual_mean(std::span(slot.pushed_us).first(rounds)));
    m.done_us.push_back(usual_mean(std::span(slot.done_us).first(rounds)));
    run_ns += static_cast<double>(slot.run_ns);
  }
  for (const ThreadTimes& core : cores) {
    m.core_busy.push_back(std::min(1.0, static_cast<double>(core.run_ns) / all_ns));
    m.core_waited.push_back(std::min(1.0, static_cast<double>(core.waited_ns) / all_ns));
    run_ns += static_cast<double>(core.run_ns);
  }
  if (!cores.empty()) {
    m.machine_busy = std::min(1.0, run_ns / (all_ns * std::thread::hardware_concurrency()));
  }
  if (schedule.wakeup_us > 0) {
    // One wake-up of the server, which slept between the rounds, and those of a worker.
    const auto rounds = static_cast<double>(shared.head().rounds_done.load());
    m.wakeups = 1 + static_cast<double>(result.stats.sleeps) / rounds / spec.workers;
    m.wakeup_us = schedule.wakeup_us;
  }
  return m;
}

double now_s() { return static_cast<double>(monotonic_ns()) / 1e9; }

}  // namespace

CaseSizes sizes_of(const CaseSpec& spec, std::span<const KeySpec> keys) {
  const ModelChunks chunks(keys, spec.worker.spec.chunk_elements);
  CaseSizes sizes{.elements = chunks.elements(), .keys = keys.size(), .chunks = chunks.size()};
  std::vector<uint64_t> chunks_of_key(keys.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ModelChunk& chunk = chunks[i];
    const KeySpec& key = keys[chunk.key];
    ++chunks_of_key[chunk.key];
    sizes.result_bytes += kernels::slot_bytes(spec.results, chunk.elements);
    if (is_rows(key)) continue;
    kernels::SlotShape slot{.elements = chunk.elements, .dtype = spec.format};
    if (is_factors(key)) {
      slot = {.elements = chunk.elements,
              .form = kernels::SlotForm::kFactors,
              .columns = key.shape[1],
              .limit = key.rank_limit};
    }
    sizes.bytes += kernels::slot_bytes(slot);
  }
  for (size_t k = 0; k < keys.size(); ++k) {
    if (!is_rows(keys[k])) continue;
    // Each row with its index, and their number in each chunk that has some.
    const uint64_t with_rows = std::min<uint64_t>(keys[k].rows_limit, chunks_of_key[k]);
    sizes.bytes +=
        keys[k].rows_limit * kernels::row_bytes(keys[k].shape[1]) + with_rows * sizeof(uint32_t);
  }
  return sizes;
}

double network_us(const CaseSizes& sizes, double link_gbps) {
  return static_cast<double>(std::max(sizes.bytes, sizes.result_bytes)) * 8 / (link_gbps * 1e3);
}

std::vector<CaseResult> run_jobs(std::span<const CaseSpec> jobs, const Schedule& schedule,
                                 Progress& progress,
                                 const volatile std::sig_atomic_t& interrupted) {
  Coordinators coordinators;
  for (const CaseSpec& job : jobs) {
    coordinators.push_back(std::make_unique<Coordinator>(job, progress, interrupted));
  }
  std::unique_ptr<Roofline> roofline;
  MemoryMix mix;
  const CaseSpec& first = jobs.front();
  if (schedule.limit_threads > 0 && first.checker.computes && jobs.size() == 1) {
    mix = mix_of_exchange(total_elements(first.table), first.workers, first.checker.optimizer,
                          first.checker.hyper, first.format, first.dtype);
    roofline = std::make_unique<Roofline>(mix, schedule.limit_threads);
  }
  CoreMeter cores(schedule.server_pid);
  run_parts(coordinators, schedule, roofline.get(), cores, progress);
  std::vector<CaseResult> results;
  for (size_t j = 0; j < jobs.size(); ++j) {
    coordinators[j]->finish();
    results.push_back(collect(coordinators[j]->shared()));
    results[j].measured = {.workers = jobs[j].workers, .round_us = results[j].us.p50};
  }
  if (jobs.size() == 1) {
    results[0].measured =
        measured_of(first, results[0], coordinators[0]->shared(), schedule, cores.times());
  }
  if (roofline) {
    results[0].limit_us = roofline->limit_us();
    results[0].measured.memory_us = results[0].limit_us;
    results[0].limit_gigabytes_per_s = roofline->gigabytes_per_s();
    results[0].limit_threads = schedule.limit_threads;
    results[0].memory_bytes_moved = bytes_moved(mix);
  }
  progress.clear();
  return results;
}

CaseResult run_one_rank(const CaseSpec& spec, const Schedule& schedule, Progress& progress) {
  PHUB_CHECK(spec.worker.rank >= 0 && schedule.rounds > 0);
  // Whole floats: Checker wants them aligned.
  std::vector<float> reference(Checker::reference_bytes(spec.checker) / sizeof(float));
  Rank rank(spec, static_cast<uint32_t>(spec.worker.rank),
            std::as_writable_bytes(std::span(reference)));
  std::vector<double> round_us;
  MachineUse machine;
  for (uint64_t round = 1; round <= schedule.warmup + schedule.rounds; ++round) {
    rank.fill(round);
    rank.worker().barrier();
    machine.start();
    const int64_t start = monotonic_ns();
    rank.exchange();
    const int64_t end = monotonic_ns();
    if (round > schedule.warmup) {
      machine.stop();
      round_us.push_back(static_cast<double>(end - start) / 1e3);
    }
    rank.check_part(round, 0, 1);
    progress.update(fmt::format("{} rounds done", round));
  }
  CaseResult result{sizes_of(spec, rank.keys())};
  result.rounds = round_us.size();
  result.us = summarize(round_us);
  result.exchanges_per_s = static_cast<double>(result.rounds) / (result.us.total / 1e6);
  result.checked = rank.checked();
  result.wrong = rank.wrong();
  result.wrong_text = rank.wrong_text();
  result.stats = rank.worker().stats();
  result.measured = {.workers = spec.workers, .round_us = result.us.p50};
  if (const double busy = machine.busy(); !std::isnan(busy)) result.measured.machine_busy = busy;
  if (schedule.link_gbps > 0) {
    result.measured.network_us = network_us(result, schedule.link_gbps);
  }
  rank.worker().leave();
  progress.clear();
  return result;
}

Progress::Progress(bool enabled) : enabled_(enabled), terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::begin(std::string_view what) {
  clear();
  what_ = what;
  begun_s_ = now_s();
  last_s_ = 0;
}

void Progress::update(std::string_view how_far) {
  const double now = now_s();
  if (!enabled_ || now - begun_s_ < 1 || now - last_s_ < (terminal_ ? 0.2 : 5.0)) return;
  last_s_ = now;
  const std::string line = fmt::format("{}: {}, {:.0f} s", what_, how_far, now - begun_s_);
  std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
  std::fflush(stderr);
  shown_ = terminal_;
}

void Progress::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

}  // namespace phub
