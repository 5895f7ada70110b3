// Messages between the control thread and the cores, and the mailboxes that they go through.
//
// Every change of the ranks that take part in a job goes through one mechanism, the *boundary*:
//   control → cores   kHold:   complete no round that you have not closed a chunk of yet
//   cores → control   kHeld:   the highest round that is not closed
//   control           R = the highest of all: the first round that no chunk anywhere has closed
//   control → cores   kCommit: ranks lost, ranks admitted from R on, hyperparameters from R on,
//                              other branches from rounds after R on
//   cores → control   kCommitted; later kSnapped, kGotState or kSetState, if asked for
// Between hold and commit a core still completes chunks of earlier rounds, so no rank waits for
// long.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "phub/core/branch_orders.h"
#include "phub/core/hyper.h"
#include "phub/core/index_set.h"
#include "transport/control/interest.h"
#include "transport/transport.h"

namespace phub {

class CoreJob;
struct KeyStateMemory;

inline constexpr uint64_t kNever = ~uint64_t{0};

// Immutable while the cores apply it; owned by the control thread.
struct Boundary {
  struct Lost {
    uint32_t rank = 0;
    uint64_t expected_again = kNever;  // policy wait: pause before this round
    std::span<uint64_t> last_rounds =
        {};  // out: per chunk of the job, the last round it took part in
  };
  struct Admitted {
    uint32_t rank = 0;
    uint32_t incarnation = 0;
    uint64_t first_round = 0;  // R, or later if its predecessor took part in R
    std::span<const std::byte> slots;
    std::span<const ChunkInterest> interest = {};  // by chunk of the job; empty: everything
  };
  uint64_t round = 0;  // R
  std::vector<Lost> lost;
  std::vector<Admitted> admitted;
  std::vector<uint32_t> forgotten;  // no longer expected (a pause that is over)
  std::optional<HyperView> hyper;   // nullopt: unchanged
  // All orders about branches that are still needed, new ones for rounds after R; nullopt:
  // unchanged.
  std::optional<std::span<const BranchOrder>> orders;
  bool snapshot = false;         // copy every chunk as it is before R or a later round,
  uint64_t snapshot_round = 0;   // this round; up to R: before R
  bool snapshot_at_end = false;  // no rank comes any more: each chunk is copied as it is
  // snapshot_round counts, whatever R is; the snapshot before is dropped if it is incomplete.
  bool snapshot_exact = false;
  bool moves_state = false;  // gets or sets the state of some keys, before R:
  KeyStateMemory* get_state = nullptr;
  const KeyStateMemory* set_state = nullptr;
};

// The traffic of one queue of a core, ever.
struct QueueCounters {
  uint64_t chunks = 0;                   // completed
  uint64_t bytes_in = 0, bytes_out = 0;  // gradients'; results'

  friend bool operator==(const QueueCounters&, const QueueCounters&) = default;
};

// The chunks that other ranks have sent and one rank has not.
struct Lack {
  uint32_t chunks = 0;
  uint32_t chunk = 0;  // index in the job: the first of the lowest round
  uint64_t round = kNever;

  void add(const Lack& other) {
    chunks += other.chunks;
    if (std::pair(other.round, other.chunk) < std::pair(round, chunk)) {
      round = other.round, chunk = other.chunk;
    }
  }
};

// Filled in by a core on kProbe, read by the control thread after kProbed.
struct Probe {
  uint64_t min_round = 0;             // as of kHeld
  uint64_t chunks_completed = 0;      // ever
  uint64_t switch_chunks = 0;         // ever: through a switch that adds
  EndpointCounters endpoint;          // ever
  std::vector<uint64_t> arrivals;     // per rank, ever: chunks
  std::vector<uint64_t> parts;        // parts in a switch, likewise; empty: not asked for
  std::vector<uint64_t> waited_for;   // bit per rank: missing where others have arrived
  std::vector<Lack> lacks;            // per rank; empty: not asked for
  std::vector<QueueCounters> queues;  // this core's; empty: not asked for

  // Ranks `word` * 64 + bit have not sent this chunk, and others have.
  void add(uint32_t chunk, uint64_t round, uint32_t word, uint64_t ranks) {
    waited_for[word] |= ranks;
    if (lacks.empty()) return;
    for_each_bit(ranks, word, [&](uint32_t rank) {
      lacks[rank].add({.chunks = 1, .chunk = chunk, .round = round});
    });
  }
};

struct CoreMessage {
  enum Type : uint8_t { kAddJob, kRemoveJob, kHold, kCommit, kProbe, kDetach, kAttach };
  Type type = kAddJob;
  CoreJob* job = nullptr;
  const Boundary* boundary = nullptr;  // kCommit
  Probe* probe = nullptr;              // kProbe
  uint32_t rank = 0;                   // kDetach, kAttach: a reconnection of the same incarnation
  uint32_t incarnation = 0;
};

struct CoreReport {
  enum Type : uint8_t {
    kAdded,
    kRemoved,
    kHeld,
    kCommitted,
    kProbed,
    kDetached,
    kAttached,
    kBroken,       // a queue pair broke
    kViolation,    // protocol violation by a rank
    kNonFinite,    // the job's policy is to stop; rank == kNoRank: the sum overflowed
    kExcluded,     // a rank was left out of a chunk for its NaN or Inf
    kFailed,       // the job cannot go on on this core: CoreJob::failure()
    kSnapped,      // every chunk is copied as it was before `round`
    kGotState,     // so is the state of the keys that was asked for
    kSetState,     // the keys have the state that was set
    kParentBroke,  // the connection to the parent broke; once
    kClosed,       // all cores have closed a round; another box decides on it
    kDecided,      // the decision on a round is here; other boxes are to be told
    kQuorum,       // so many ranks have sent all of `round` that it is complete after its grace
    kSwitchEnded,  // the switch takes no more chunks: `why`; rank == kNoRank: no rank's fault
    kSwitchBegun,  // it takes chunks again, from `round` on
  };
  enum Violation : uint8_t {
    kStream,        // a malformed frame
    kChunk,         // a chunk that the queue does not have
    kKind,          // an unknown kind, or initial parameters that the job does not take
    kRound,         // another round than the chunk's
    kBytes,         // another size than the chunk's
    kPlace,         // another place than the chunk's
    kInterest,      // a chunk that the rank neither writes nor reads
    kWeight,        // a weight that is no finite number of at least 2^-126
    kParticipants,  // a rack without ranks that took part, or with more than it has
    kSlot,          // a gradient where another one of the rank lies
  };
  static constexpr uint32_t kNoRank = ~0u;
  Type type = kAdded;
  Violation violation = kStream;
  uint32_t core = 0;
  CoreJob* job = nullptr;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint32_t chunk = 0;      // index in the job
  uint64_t said = 0;       // kViolation: the number that the rank sent; kSwitchEnded: 1 where a
                           // boundary ended it, which is in the log
  uint64_t round = 0;      // kHeld: highest in progress; kNonFinite, kExcluded, kSnapped, kClosed,
                           // kDecided, kQuorum: that one
  uint64_t started = 0;    // kHeld: highest round that any contribution has arrived for
  uint64_t min_round = 0;  // kHeld, kCommitted: lowest round in progress at chunks that wait for
                           // some rank; kNever: there are none
  uint64_t lowest = 0;     // kHeld: the lowest at any chunk
  const char* why = nullptr;  // kSwitchEnded; lives for ever
};

// Single producer, single consumer, fixed size.
template <typename T, size_t kCapacity>
class Mailbox {
 public:
  bool push(const T& value) {
    uint64_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_.load(std::memory_order_acquire) == kCapacity) return false;
    slots_[tail % kCapacity] = value;
    tail_.store(tail + 1, std::memory_order_seq_cst);
    return true;
  }
  bool pop(T& value) {
    uint64_t head = head_.load(std::memory_order_relaxed);
    if (head == tail_.load(std::memory_order_acquire)) return false;
    value = slots_[head % kCapacity];
    head_.store(head + 1, std::memory_order_release);
    return true;
  }
  bool empty() const {
    return head_.load(std::memory_order_relaxed) == tail_.load(std::memory_order_seq_cst);
  }
  size_t room() const {
    return kCapacity -
           (tail_.load(std::memory_order_relaxed) - head_.load(std::memory_order_acquire));
  }

 private:
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::vector<T> slots_ = std::vector<T>(kCapacity);
};

}  // namespace phub
