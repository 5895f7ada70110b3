#include "phub/job/local_part.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <utility>

namespace phub {
namespace {

// Ranks leave a quarter of the descriptors free, so that others can still be told what is wrong,
// and running jobs keep their connections. A new descriptor is the lowest free one.
void check_descriptors(int any) {
  rlimit limit{};
  const int lowest = fcntl(any, F_DUPFD_CLOEXEC, 0);
  if (lowest >= 0) close(lowest);
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (lowest >= 0 && static_cast<rlim_t>(lowest) < limit.rlim_cur / 4 * 3) return;
  fail(ErrorCode::kFull,
       "three quarters of the {} file descriptors are in use: end another job, or raise ulimit -n",
       limit.rlim_cur);
}

uint64_t bytes_of(const std::vector<ChunkInterest>& chunks) {
  return chunks.size() * sizeof(ChunkInterest);
}

}  // namespace

void LocalPart::tell(CoreMessage message) {
  for (uint32_t i = 0; i < job_.cores(); ++i) {
    message.job = &job_.core_job(i);
    if (message.type == CoreMessage::kProbe) message.probe = &probe_of_(i);
    mail_.send(cores_[i], message);
  }
}

void LocalPart::start() {
  started_ = true;
  tell({.type = CoreMessage::kAddJob});
}

void LocalPart::remove() {
  if (std::exchange(ending_, true) || !started_) return;
  tell({.type = CoreMessage::kRemoveJob});
}

void LocalPart::close() {
  while (!seats_.empty()) revoke(seats_.begin()->first);
  job_.link().close();
}

void LocalPart::detach_all() {
  for (uint32_t i = 0; i < job_.cores(); ++i) job_.core_job(i).detach_all();
}

// --- ranks ---------------------------------------------------------------------------------------

// The long part of it runs on the builder's thread.
void LocalPart::admit(uint32_t rank, uint32_t incarnation, std::span<const KeyInterest> interest,
                      Offer& offer, Done done) {
  struct Work {
    std::vector<KeyInterest> interest;
    Chunks chunks;
  };
  const auto work = std::make_shared<Work>(Work{{interest.begin(), interest.end()}, {}});
  ++tasks_;
  builder_.run(
      [this, rank, work] {
        check_descriptors(builder_.event_fd());
        check_interest(work->interest, job_.spec());
        job_.link().prepare(rank);
        work->chunks = interest_in_chunks(work->interest, job_.spec().keys, job_.plan());
      },
      [this, rank, incarnation, work, &offer,
       done = std::move(done)](std::optional<Error> refused) {
        --tasks_;
        if (ending_) return;
        if (!refused) {
          refused = error_of([&] { open(rank, incarnation, std::move(work->chunks), offer); });
        }
        done(refused);
      });
}

void LocalPart::open(uint32_t rank, uint32_t incarnation, Chunks chunks, Offer& offer) {
  const uint64_t bytes = bytes_of(chunks);
  if (bytes > 0 && !budget_.has_room(bytes)) {
    fail(ErrorCode::kFull,
         "which chunks rank {} touches takes {} bytes, for which the box has no room now: "
         "raise --memory-limit",
         rank, bytes);
  }
  if (!offer.ticket.empty()) job_.link().use_ticket(offer.ticket);
  Chunks& seat = seats_[rank];
  try {
    offer = job_.link().admit(rank, incarnation);
  } catch (...) {
    seats_.erase(rank);
    throw;
  }
  seat = std::move(chunks);
  interest_bytes_ += bytes;
  budget_.grow(0, bytes);
}

void LocalPart::reconnect(uint32_t rank, uint32_t /*incarnation*/, Offer& offer, Done done) {
  done(error_of([&] {
    if (!offer.ticket.empty()) job_.link().use_ticket(offer.ticket);
    offer = job_.link().reconnect(rank);
  }));
}

// The builder's thread frees the rank's memory, before it prepares that of its successor.
void LocalPart::revoke(uint32_t rank) {
  const auto seat = seats_.find(rank);
  if (seat == seats_.end()) return;
  interest_bytes_ -= bytes_of(seat->second);
  budget_.grow(bytes_of(seat->second), 0);
  seats_.erase(seat);
  BoxLink::HeldMemory held = job_.link().revoke(rank);
  if (!held) return;
  builder_.run([held = std::move(held)]() mutable { held.reset(); });
}

// --- boundaries ----------------------------------------------------------------------------------

void LocalPart::commit(const Commit& commit) {
  Boundary& boundary = commit.boundary;
  for (Boundary::Admitted& admitted : boundary.admitted) {
    admitted.slots = job_.link().slots(admitted.rank);
    admitted.interest = seats_.at(admitted.rank);
  }
  if (!commit.hyper.empty()) {
    boundary.hyper = job_.hyper().change(commit.hyper, commit.lowest_round);
  }
  if (!commit.orders.empty()) {
    boundary.orders = job_.branch_orders().add(commit.orders, commit.lowest_round);
  }
  tell({.type = CoreMessage::kCommit, .boundary = &boundary});
}

bool LocalPart::wants_probe(uint64_t /*begun*/) {
  if (!started_) return false;  // its server knows nothing of it yet
  uint64_t activity = 0;
  for (uint32_t i = 0; i < job_.cores(); ++i) activity += job_.core_job(i).activity();
  return std::exchange(activity_, activity) != activity;
}

void LocalPart::probe(uint64_t begun) {
  if (RoundGate* const gate = job_.gate(); gate && begun > 0) gate->begin_elsewhere(begun);
  wants_probe(begun);  // the answer has all events until now
  tell({.type = CoreMessage::kProbe});
}

}  // namespace phub
