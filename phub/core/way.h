// The way in which the chunks of a job complete: in lock-step (lock_step.h), perhaps with a gate
// (gated.h) or a parent (uplinked.h), or by clocks (clocked.h).
//
// A chunk is *ready* when it can be closed. It *closes* when its participants are fixed and their
// slots are read; from then on boundaries and lost ranks do not change this round. It is *done*
// when its result is there; then it is *finished*: the next round begins, and the result goes to
// its readers. Between closed and done its result is *pending*, if it depends on more than the
// chunk's own ranks: behind a gate on the other chunks of the round, or on other racks.
//
// The functions that are called for every arrival are called on the class of the way, not through
// this one: CoreJob::step() chooses once per pass.
#pragma once

#include <array>
#include <cstdint>

#include "phub/core/chunk_table.h"
#include "phub/core/intake.h"
#include "phub/core/job_parameters.h"
#include "phub/core/messages.h"
#include "phub/core/outbox.h"
#include "phub/core/reducer.h"
#include "phub/core/reports.h"
#include "phub/core/shelves.h"
#include "phub/core/trace.h"
#include "transport/wire.h"

namespace phub {

// What handling a chunk or a packet costs a core beside reading and writing its bytes, in bytes.
inline constexpr uint64_t kHandling = 4096;

// The stages around a way; all live as long as the core job.
struct Stages {
  const JobParameters& parameters;
  ChunkTable& table;
  Reducer& reducer;
  Outbox& outbox;
  CoreTrace& trace;
  Reports& reports;
  Shelves& shelves;
  const BoxEndpoint& endpoint;  // for its time
};

// Why chunks go on beside arrivals and boundaries: results that come from elsewhere, from behind a
// gate or from a parent.
class PendingResults {
 public:
  virtual ~PendingResults() = default;

  // A pending chunk that is done now; kNoChunk: none. Asked in every pass.
  virtual uint32_t next_done() { return kNoChunk; }
  // Whether chunks may have become ready since the last call other than by an arrival or a
  // boundary. Asked in every pass, after next_done().
  virtual bool moved_on() { return false; }
  // Whether the event that next_done() waits for has come. The core's thread may ask at any time.
  virtual bool is_called() const { return false; }
  // Before the core sleeps: the event that next_done() waits for will wake it, by one of
  // wake_fds() (eventfd, edge triggered; -1: none). Returns false if the event has come already.
  virtual bool arm() { return true; }
  virtual void disarm() {}
  virtual std::array<int, 2> wake_fds() const { return {-1, -1}; }
  // Messages may wait for the budget of a NIC, or for room, and possibly nothing rings when the
  // wait is over. Returns for how long only an arrival makes another try worth while; 0: nothing
  // waits.
  virtual uint64_t waits_for_room_ns() const { return 0; }
  // Between these calls the core does not touch the connection to a parent, which another thread
  // makes anew. Then unanswered sums are sent again.
  virtual void suspend_parent() {}
  virtual void resume_parent() {}
};

class Way : public PendingResults {
 public:
  enum class Verdict : uint8_t {
    kAccepted,    // and marked in the table
    kDuplicate,   // it has arrived already
    kComplete,    // its round is complete, but the result may be lost: send it again
    kWrongRound,  // a protocol violation
  };

  enum class Closed : uint8_t {
    kNotNow,   // it stays ready
    kPending,  // next_done() tells when it is done
    kDone,
  };

  explicit Way(const Stages& stages) : stages_(stages) {}

  // Hot. A contribution of a rank has arrived.
  virtual Verdict accept(uint32_t rank, uint32_t index, const Imm& imm) = 0;
  virtual bool ready(uint32_t index) const = 0;
  virtual Closed close(uint32_t index) = 0;  // REQUIRES: ready(index)
  virtual void finish(uint32_t index) = 0;   // REQUIRES: it is done

  // The latest round of which the rank may have the result now; kNever: none.
  virtual uint64_t completed(uint32_t rank, uint32_t index) const = 0;

  // Stores a part of the initial parameters, which lies at the beginning of rank 0's slot.
  virtual void store_initial(uint32_t index, uint32_t part);
  // The initial parameters of a chunk are complete.
  virtual void begin(uint32_t index) = 0;

  // At a boundary: the highest round that any contribution to the chunk has arrived for.
  virtual uint64_t started(uint32_t index) const = 0;
  // The last round of the chunk that the rank takes part in, as it stands; 0: none.
  virtual uint64_t last_round(uint32_t rank, uint32_t index) const = 0;
  // The rank is still expected in its old rounds. Counts its reliable contributions, and notes the
  // last round that it took part in. REQUIRES: it is detached.
  virtual void lose(const Boundary::Lost& lost) = 0;
  // The rank is attached and expected from its first round on: sends it the round before.
  virtual void admit(const Boundary::Admitted& admitted) = 0;
  // Called for each chunk after all these changes.
  virtual void settle(uint32_t /*index*/) {}

  // The round of the rank's gradient that was taken out of the slot which it shared, while the
  // result is still to come; kNever: there is none.
  virtual uint64_t taken(uint32_t rank, uint32_t index) const = 0;

  // The rank has reconnected and lacks the result that it may have: sends it.
  virtual void resend(uint32_t rank, uint32_t index);

  // save() writes the chunk's data, beside its arrays, for a checkpoint before `round`; restore()
  // reads those of all chunks, before the job begins with its first round.
  virtual void save(uint32_t index, uint64_t round, const SavedClocks& to) const = 0;
  virtual void restore(const SavedClocks& from) = 0;
  // The optimizer's steps on the chunk before `round` begins.
  virtual uint64_t steps_before(uint32_t index, uint64_t round) const = 0;
  virtual void set_steps_before(uint32_t index, uint64_t round, uint64_t steps) = 0;

  // Where contributions come from beside the endpoint (switched_way.h); null: from nowhere.
  virtual Intake* intake() { return nullptr; }
  // The participants of the chunk's round in progress can no longer change.
  virtual bool is_fixed(uint32_t index) const { return stages_.table[index].closed; }

  virtual bool anyone_waits(uint32_t index) const = 0;
  // A bit for each of 64 ranks: it has to contribute before the chunk goes on.
  virtual uint64_t lacking(uint32_t index, uint32_t word) const = 0;
  // A rank without whose next arrival no chunk can complete; kNoRank: there is none.
  virtual uint32_t indispensable_rank() const { return CoreReport::kNoRank; }

  // For the log: the last round of a rank that is lost.
  void note_last_round(const Boundary::Lost& lost, uint32_t index) const {
    if (lost.last_rounds.empty()) return;
    const uint64_t first = stages_.table.rank(lost.rank).first_round;
    const uint64_t last = last_round(lost.rank, index);
    lost.last_rounds[stages_.table[index].id] = last >= first ? last : 0;
  }

 protected:
  void send(uint32_t rank, uint32_t index) {
    stages_.outbox.send(rank, index, completed(rank, index));
  }

  const Stages stages_;
};

inline void Way::store_initial(uint32_t index, uint32_t part) {
  stages_.reducer.store_initial(stages_.table[index], part);
}

inline void Way::resend(uint32_t rank, uint32_t index) {
  if (stages_.table[index].round == 0) return;  // all ranks get it later
  send(rank, index);
}

}  // namespace phub
