// The messages between a server and the boxes that serve under it. Such a box, a *shard*, has a
// part of the chunks of the server's jobs; the server alone has their members. JSON on the wire;
// shards.md documents every field.
//
// The shard sends requests, the server's orders come with the answers: POST /v1/shards once, then
// POST /v1/shards/{shard}/mail again and again, with reports of events or to wait for orders.
// Orders and reports are numbered from 0. Messages that were lost with a connection are sent again,
// and count once.
//
// A shard's part of a job's checkpoint goes over …/copies/{job}/{round}/{offset}, in pieces: to the
// server after each snapshot, from it if the job goes on from one. The state of keys that a rank
// reads or sets goes over …/states/{job}/{state}/{offset} in the same way, and so does a branch
// that comes from files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/branch_messages.h"
#include "transport/control/messages.h"

namespace phub {

// A word for each kind of order and report (ShardOrder::kind, ShardReport::kind).
enum class ShardDo : uint8_t {
  kMake,       // a part of a job: report kMade
  kAdmit,      // memory and queue pairs of a rank: kOffered
  kReconnect,  // new queue pairs of a rank: kOffered
  kRevoke,     // close the connections of a rank
  kStart,      // the cores get the part
  kHold,       // as the messages to a core (phub/core/messages.h): kHeld …
  kCommit,
  kProbe,
  kDetach,
  kAttach,
  kRemove,
  kDecide,  // the decision on a round that is applied as a whole
  kState,   // memory for the state of keys, or a branch; a state to be set is fetched: kStateThere
  kDropState,
  kFreeDock,  // every chunk has copied its state from there
};
enum class ShardSays : uint8_t {
  kMade,  // it could be made; or, with a code, it could not; kOffered has the same
  kOffered,
  kHeld,  // from here on as a core's reports
  kCommitted,
  kProbed,
  kDetached,
  kAttached,
  kRemoved,
  kSnapped,  // and the server has the core's copy
  kBroken,
  kViolation,
  kNonFinite,
  kExcluded,
  kFailed,        // a core can do no more for the job; core kNoCore: the box or its link cannot
  kDisconnected,  // the connections of a rank ended
  kActive,        // something has happened since the last probe
  kLeaves,        // the last report: the shard ends
  kClosed,        // all chunks of a round that is applied as a whole are summed there
  kStateThere,    // the memory for kState is there; or, with a code, it could not be taken
  kGotState,      // as a core's reports; and the server has the core's copy
  kSetState,
};

struct ShardNode {    // a NUMA node
  uint32_t node = 0;  // as the operating system counts
  uint64_t memory_bytes = 0;

  friend bool operator==(const ShardNode&, const ShardNode&) = default;
};
struct ShardCore {
  uint32_t node = 0;  // in the list of nodes
  uint32_t cpu = 0;   // as the operating system counts

  friend bool operator==(const ShardCore&, const ShardCore&) = default;
};
struct ShardNic {
  std::string transport;
  std::string name;
  uint32_t node = 0;  // in the list of nodes

  friend bool operator==(const ShardNic&, const ShardNic&) = default;
};
struct ShardHello {
  uint32_t version = kProtocolVersion;
  std::string name;   // for people: the host
  uint64_t host = 0;  // the machine's number (numa/host.h); 0: unknown
  std::vector<ShardNode> nodes;
  std::vector<ShardCore> cores;
  std::vector<std::string> transports;
  std::vector<ShardNic> nics;
};
struct ShardWelcome {
  uint64_t shard = 0;     // its number, chosen at random
  uint32_t lease_ms = 0;  // without mail for so long it is lost, and so are its jobs
};

// A part of a job, as the server plans it for the shard.
struct ShardQueue {
  uint32_t core = 0;  // in the list of CPUs
  std::string nic;

  friend bool operator==(const ShardQueue&, const ShardQueue&) = default;
};
struct ShardRestored {  // the checkpoint that a job goes on from
  uint64_t round = 0;   // its
  uint32_t ranks = 0;   // ranks that it knows: max_ranks or more
  std::vector<uint32_t> expected;
  std::vector<uint64_t> steps;  // as the manifest has them
  std::vector<HyperChange> hyper;
  std::vector<BranchMove> moves;  // those that are still to come
  std::vector<uint32_t> docks;    // shelves to which some of them copy from files

  friend bool operator==(const ShardRestored&, const ShardRestored&) = default;
};
struct ShardPart {
  JobSpec spec;
  std::string transport;
  std::vector<uint32_t> cpus;  // the CPUs of the cores of this part
  std::vector<ShardQueue> queues;
  std::vector<std::vector<uint32_t>> queue_chunks;  // as in JobLayout
  std::vector<uint64_t> queue_offset;
  std::vector<uint64_t> queue_slots;
  std::vector<uint32_t> queue_shares;
  uint32_t first_queue = 0, all_queues = 0;  // as workers count them
  bool saved = false;                        // snapshots are taken of it
  std::vector<ShardRestored> restored;       // one, or none: the job begins

  friend bool operator==(const ShardPart&, const ShardPart&) = default;
};

struct ShardLost {
  uint32_t rank = 0;
  uint64_t expected_again = 0;

  friend bool operator==(const ShardLost&, const ShardLost&) = default;
};
struct ShardAdmitted {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t first_round = 0;

  friend bool operator==(const ShardAdmitted&, const ShardAdmitted&) = default;
};
struct ShardBoundary {
  uint64_t round = 0;
  std::vector<ShardLost> lost;
  std::vector<ShardAdmitted> admitted;
  std::vector<uint32_t> forgotten;
  std::vector<HyperChange> hyper;
  std::vector<BranchMove> moves;  // before rounds after this one, ascending
  uint64_t lowest_round = 0;      // the lowest round that a chunk is in
  bool snapshot = false;          // as Boundary has it
  uint64_t snapshot_round = 0;
  uint64_t state = 0;   // the number of a state of keys that is read or set; 0: none
  uint64_t branch = 0;  // likewise: the branch that one of the moves copies from files

  friend bool operator==(const ShardBoundary&, const ShardBoundary&) = default;
};

// The decision on a round that is applied as a whole (RoundVerdict); floats by their bits.
struct ShardDecision {
  uint64_t round = 0;
  uint64_t norm = 0;    // the bits of a double
  uint32_t factor = 0;  // the bits of a float
  bool skipped = false;
  // If the optimizer has trust ratios, of each key the norm of its parameters and that of its
  // update; else none.
  std::vector<uint64_t> norms;

  friend bool operator==(const ShardDecision&, const ShardDecision&) = default;
};

// The state of keys that a rank reads or sets. Its bytes are f32, by chunk of the part in ascending
// order: the parameters, then each of the optimizer's states. Behind them are 64-bit numbers by
// chunk: the optimizer's steps. The state may also be a branch that comes from files, which is set:
// arrays in the layout of the box's memory, then the steps by chunk of the job.
struct ShardKeys {
  uint64_t number = 0;  // its number in the job: from 1 on
  bool set = false;
  std::vector<uint32_t> keys;  // none: it is a branch

  friend bool operator==(const ShardKeys&, const ShardKeys&) = default;
};

struct ShardOrder {
  ShardDo kind = ShardDo::kMake;
  uint64_t job = 0;  // its number at the server
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string ticket;                   // kAdmit, kReconnect
  std::vector<KeyInterest> interest;    // kAdmit: as the rank said it; empty: everything
  std::vector<ShardPart> part;          // kMake: one
  std::vector<ShardBoundary> boundary;  // kCommit: one
  std::vector<ShardDecision> decision;  // kDecide: one
  uint64_t round = 0;                   // kProbe: the latest that some box has begun to close
  std::vector<ShardKeys> state;         // kState: one
  uint64_t number = 0;                  // kDropState: of the state; kFreeDock: the shelf

  friend bool operator==(const ShardOrder&, const ShardOrder&) = default;
};

struct ShardLack {
  uint32_t rank = 0;
  uint32_t chunks = 0;
  uint32_t chunk = 0;
  uint64_t round = 0;

  friend bool operator==(const ShardLack&, const ShardLack&) = default;
};
struct ShardQueueCounters {
  uint64_t chunks = 0;
  uint64_t bytes_in = 0, bytes_out = 0;  // gradients; results

  friend bool operator==(const ShardQueueCounters&, const ShardQueueCounters&) = default;
};
struct ShardProbe {
  uint64_t chunks_completed = 0;
  EndpointCounters endpoint;
  std::vector<uint64_t> arrivals;    // per rank
  std::vector<uint64_t> waited_for;  // bit per rank
  std::vector<ShardLack> lacks;
  std::vector<ShardQueueCounters> queues;

  friend bool operator==(const ShardProbe&, const ShardProbe&) = default;
};
struct ShardRounds {  // a lost rank's last rounds in the chunks of a core
  uint32_t rank = 0;
  std::vector<ChunkRange> rounds;

  friend bool operator==(const ShardRounds&, const ShardRounds&) = default;
};
struct ShardReport {
  static constexpr uint32_t kNoCore = ~uint32_t{0};

  ShardSays kind = ShardSays::kMade;
  uint64_t job = 0;
  uint32_t core = 0;  // the core of the part
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint32_t violation = 0;
  uint32_t chunk = 0;
  uint64_t said = 0, round = 0, started = 0, min_round = 0;
  uint64_t lowest = 0;   // kHeld: as CoreReport has it
  bool refused = false;  // kMade, kOffered, kStateThere: could not be, and why
  ErrorCode code = ErrorCode::kInternal;
  std::string text;                      // the reason
  std::vector<QueueOffer> queues;        // kOffered
  bool tls = false;                      // kOffered
  std::vector<ShardProbe> probe;         // kProbed: one
  std::vector<ShardRounds> last_rounds;  // kCommitted
  // kClosed: of the part's chunks, ascending, the sums of the squares of their gradients: the bits
  // of doubles. If the optimizer has trust ratios, three for each: also those of its parameters and
  // of its update.
  std::vector<uint64_t> squares;
  uint64_t state = 0;  // kStateThere: its number

  void refuse(const Error& why) { refused = true, code = why.code(), text = why.what(); }

  friend bool operator==(const ShardReport&, const ShardReport&) = default;
};

struct ShardMail {
  uint64_t received = 0;  // orders so far: those before this number are not sent again
  uint64_t first = 0;     // number of the first of the reports
  std::vector<ShardReport> reports;
  bool wait = false;  // for an order, for a third of the lease at most
};
struct ShardOrders {
  uint64_t first = 0;  // number of the first of them
  std::vector<ShardOrder> orders;
};

inline constexpr uint64_t kCopyPieceBytes = uint64_t{1} << 20;  // at most

// The place of a piece of a checkpoint, or of the state of keys.
struct CopyPlace {
  uint64_t job = 0;     // its number at the server
  uint64_t round = 0;   // the checkpoint's round
  uint64_t offset = 0;  // within the shard's part of it
  uint64_t state = 0;   // the number of a state, and there is no round; 0: it is of a checkpoint
};

}  // namespace phub
