// The way in which the chunks of a job complete: in lock-step (lock_step.h), perhaps with a gate
// (gated.h) or a parent (uplinked.h), or by clocks (clocked.h).
//
// A chunk is *ready* when it can be closed. It *closes* when its participants are fixed and their
// slots are read; from then on boundaries and lost ranks change nothing of this round. It is *done*
// when its result is there; then it is *finished*: the next round begins, and the result goes to
// its readers. Between closed and done its result is *pending*, if it depends on others than the
// chunk's own ranks: on the other chunks of the round, behind a gate, or on other racks.
//
// The functions that are called for every arrival are called on the class of the way, not through
// this one: CoreJob::step() chooses once per pass.
#pragma once

#include <cstdint>

#include "phub/core/chunk_table.h"
#include "phub/core/job_parameters.h"
#include "phub/core/messages.h"
#include "phub/core/outbox.h"
#include "phub/core/reducer.h"
#include "phub/core/reports.h"
#include "phub/core/shelves.h"
#include "phub/core/trace.h"
#include "transport/wire.h"

namespace phub {

// The stages around a way; all live as long as the core job.
struct Stages {
  const JobParameters& parameters;
  ChunkTable& table;
  Reducer& reducer;
  Outbox& outbox;
  CoreTrace& trace;
  Reports& reports;
  Shelves& shelves;
};

class Way {
 public:
  enum class Verdict : uint8_t {
    kAccepted,    // and marked in the table
    kDuplicate,   // it has arrived already
    kComplete,    // of a round whose result may have been lost: that is to be sent again
    kWrongRound,  // a protocol violation
  };

  enum class Closed : uint8_t {
    kNotNow,   // it stays ready
    kPending,  // next_done() tells when it is done
    kDone,
  };

  explicit Way(const Stages& stages) : stages_(stages) {}
  virtual ~Way() = default;

  // Hot. A contribution of a rank has arrived.
  virtual Verdict accept(uint32_t rank, uint32_t index, const Imm& imm) = 0;
  virtual bool ready(uint32_t index) const = 0;
  virtual Closed close(uint32_t index) = 0;  // REQUIRES: ready(index)
  // Of the chunks that are pending, one that is done now; kNoChunk: none. Asked in every pass.
  virtual uint32_t next_done() { return kNoChunk; }
  // Whether chunks may have become ready, since this was asked, by what is neither an arrival nor a
  // boundary. Asked in every pass, after next_done().
  virtual bool moved_on() { return false; }
  // Whether what next_done() waited for is there. Any time, by the core's thread.
  virtual bool is_called() const { return false; }
  // Before the core sleeps: what next_done() waits for will wake it, by this descriptor (eventfd,
  // edge triggered; -1: there is none). False: it is there already.
  virtual bool arm() { return true; }
  virtual void disarm() {}
  virtual int wake_fd() const { return -1; }
  // What it sends waits for the budget of a NIC, or for room: it may be that nobody rings when
  // there is. For how long nothing but an arrival makes a try worth while; 0: nothing waits.
  virtual uint64_t waits_for_room_ns() const { return 0; }
  virtual void finish(uint32_t index) = 0;  // REQUIRES: it is done

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
  // The rank is expected in its old rounds still. What it sent and can be relied on counts;
  // notes the last round that it took part in. REQUIRES: it is detached.
  virtual void lose(const Boundary::Lost& lost) = 0;
  // The rank is attached and expected from its first round on: sends it the round before.
  virtual void admit(const Boundary::Admitted& admitted) = 0;
  // After all that changed.
  virtual void settle(uint32_t /*index*/) {}

  // The rank, which has reconnected, lacks the result that it may have: sends it.
  virtual void resend(uint32_t rank, uint32_t index);

  // What a checkpoint of before `round` keeps of the chunk beside its arrays; and of all chunks,
  // before the job begins with its first round.
  virtual void save(uint32_t index, uint64_t round, const SavedClocks& to) const = 0;
  virtual void restore(const SavedClocks& from) = 0;
  // Of the optimizer, on the chunk, before `round` begins.
  virtual uint64_t steps_before(uint32_t index, uint64_t round) const = 0;
  virtual void set_steps_before(uint32_t index, uint64_t round, uint64_t steps) = 0;

  // Of the connection to a parent: what another thread does to it now, this one does not see. Then
  // it is a new one, and what was not answered is sent again.
  virtual void suspend_parent() {}
  virtual void resume_parent() {}

  virtual bool anyone_waits(uint32_t index) const = 0;
  // Of 64 ranks, those that have to contribute before the chunk goes on.
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
  if (stages_.table[index].round == 0) return;  // comes to all
  send(rank, index);
}

}  // namespace phub
