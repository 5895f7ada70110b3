// One core of the box: a thread, the jobs' chunks that it owns, and its mailboxes.
//
// step() is one pass and never blocks: production calls it in run(), the simulator calls it
// directly.
//
// A pass serves the jobs that are awake. A job that has found nothing for a while, beside others
// that did, is armed and put aside. It costs nothing until its endpoint's descriptor in the core's
// epoll is readable, or until it is time to retry results that it owes. Jobs share a core by bytes:
// a job that has taken more than its part of a pass waits until the others have had as much, as
// long as they have work.
#pragma once

#include <atomic>
#include <cstdint>
#include <stop_token>
#include <vector>

#include "phub/clock.h"
#include "phub/core/core_job.h"
#include "phub/core/messages.h"

namespace phub {

// Passes and sleep of a core's thread so far.
struct CoreUsage {
  uint64_t busy_passes = 0, idle_passes = 0;
  uint64_t sleeps = 0;
  uint64_t asleep_ns = 0;
};

class Core {
 public:
  static constexpr size_t kMaxJobs = 1024;

  // `clock` times the retries of owed results; it must outlive the core.
  explicit Core(uint32_t index, const Clock& clock = kSteadyClock);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Writes the core's sleep to `log` from here on. REQUIRES: run() has not begun.
  void trace(TraceLog& log) { trace_ = &log; }

  // Control thread. False when the mailbox is full: try again later.
  bool send(const CoreMessage& message);
  bool receive(CoreReport& report) { return reports_.pop(report); }
  void clear_report_fd();                       // before receiving, so that no report is missed
  int report_fd() const { return report_fd_; }  // eventfd: readable when there are reports

  // The core's thread.
  bool step();
  // Spins for `spin_us` when there is nothing to do, then sleeps until something comes.
  void run(const std::stop_token& stop, int spin_us);
  void wake();  // any thread: makes run() look at its stop token

  // run() calls these around its sleep. arm() asks every job, and send(), to wake this core; it
  // returns false if there is work already. `timeout_ms` becomes the longest sleep (-1: until it is
  // woken).
  bool arm(int& timeout_ms);
  void disarm();
  // Whether another thread has mail for it, or something that a job waits for.
  bool is_called() const;

  CoreUsage usage() const;  // any thread

 private:
  bool read_mailbox();
  bool serve_jobs();
  void look_for_events(int timeout_ms);
  void put_aside(size_t index);
  int find_retry(CoreJob& job) const;
  void note_retry(const CoreJob& job);
  void wake_debtors();
  void wake_up(CoreJob& job);
  void handle(const CoreMessage& message);
  void carry_out(const CoreMessage& message, CoreReport& report);
  // Does `action` for a job. An exception ends that job alone, by a report.
  template <typename Action>
  static bool for_job(CoreJob& job, const Action& action);
  bool forward_reports();
  bool reply(CoreReport report, const CoreMessage& to);
  void sleep();

  const uint32_t index_;
  const Clock& clock_;
  int epoll_fd_ = -1;
  int mailbox_fd_ = -1;
  int report_fd_ = -1;
  std::vector<CoreJob*> jobs_;
  std::vector<CoreJob*> awake_;  // jobs that are not put aside
  size_t armed_ = 0;             // so many of awake_, from the first, are armed
  uint64_t next_retry_ms_ = 0;   // the earliest retry of a job put aside; 0: there is none
  uint32_t passes_ = 0;          // passes since the core looked for events
  TraceLog* trace_ = nullptr;    // null: no trace
  bool reported_ = false;        // since the last wake-up of the control thread
  Mailbox<CoreMessage, 4096> mailbox_;
  Mailbox<CoreReport, 8192> reports_;
  alignas(64) std::atomic<bool> asleep_{false};
  // Written by the core's thread alone, read by others now and then.
  struct alignas(64) {
    std::atomic<uint64_t> busy_passes{0}, idle_passes{0}, sleeps{0};
    // Twice the nanoseconds asleep; while asleep, twice those minus now, plus 1. One word has both,
    // so that a reader never sees the time go back.
    std::atomic<int64_t> asleep{0};
  } usage_;
};

}  // namespace phub
