// The control messages, decoded. JSON on the wire; the documents of this folder say what every
// field means.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/control/interest.h"
#include "transport/control/job_spec.h"
#include "transport/control/loss_messages.h"
#include "transport/error.h"
#include "transport/layout.h"
#include "transport/transport.h"

namespace phub {

inline constexpr uint32_t kProtocolVersion = 1;
// Limit of the state that a rank's training saves in a checkpoint.
inline constexpr uint64_t kMaxStateBytes = uint64_t{64} << 20;
// Limit of a rank's part of a checkpoint, which also has the residuals of its coded keys. (If the
// ranks are racks, the box does not know which keys their ranks code: any may be.)
inline uint64_t most_part_bytes(const JobSpec& spec) {
  const uint64_t coded = spec.rack_ranks.empty() ? coded_elements(spec) : elements_of(spec);
  return kMaxStateBytes + coded * sizeof(float);
}
inline constexpr uint64_t kPartPieceBytes = uint64_t{16} << 20;   // at most, of a part in pieces
inline constexpr size_t kMostSaverStays = size_t{4} * kMaxRanks;  // in the news of a rack

// The sender of a request, as the box found out from its token. It does not travel.
struct Caller {
  std::string name;          // the token's name; "": the box asks for none
  std::string id;            // the token's id, which no other has
  bool may_replace = false;  // take a rank from an incarnation that is alive
  bool is_admin = false;
};

// POST /v1/jobs/{job}/join — creates the job if it is not there.
struct JoinRequest {
  uint32_t version = kProtocolVersion;
  JobSpec spec;
  int32_t rank = -1;     // -1: the lowest free one
  bool replace = false;  // the rank's present incarnation, if any, is fenced first
  std::string transport = "shm";
  // Chosen at random by the worker, the same when it sends the join again because it got no answer:
  // then it gets the answer of the first. Empty: every join is another one.
  std::string id = {};
  // The epoch of the life of the job which this worker was in and lost; 0: it was in none. The job
  // must go on, as this life or a later one.
  uint64_t epoch = 0;
  uint32_t incarnation = 0;  // in that life; 0: none
  std::string owner = {};    // of a source (phub/job/standby.h): whose token made the job there
  bool saves = false;  // this rank has state of its own, which belongs to the job's checkpoints; of
                       // a rack: one of its ranks has
  std::vector<KeyInterest> interest = {};  // the ranges that it writes and reads; empty: everything
  // It does not travel.
  Caller caller = {};
  std::shared_ptr<void> held = {};  // its memory of the box, until this is released
};

// The places of all keys and chunks. Offsets and sizes are in elements, but for queue_slots.
struct JobLayout {
  std::vector<uint64_t> key_offset;                 // in the gradient memory and in the results
  std::vector<std::vector<uint32_t>> queue_chunks;  // [queue][index] = chunk, numbered key by key
  uint64_t total_elements = 0;                      // with the padding between keys
  // The place where each queue's chunks begin in the box's memory; there they lie one after
  // another, each at a multiple of kChunkAlignment. Empty: the box's memory is laid out as the
  // worker's.
  std::vector<uint64_t> queue_offset;
  std::vector<uint64_t> queue_slots;   // and their gradients, in bytes (Layout)
  std::vector<uint32_t> queue_shares;  // and how many slots they share (Layout)

  friend bool operator==(const JobLayout&, const JobLayout&) = default;
};

JobLayout routes_of(const Layout& layout);

// A rank's part of a checkpoint.
struct RankPart {
  uint32_t rank = 0;  // a rank of the training
  uint64_t bytes = 0;

  friend bool operator==(const RankPart&, const RankPart&) = default;
};

// Chunks that go through a switch that adds: those in int32 of some queues, which one core of the
// box has (transport/switch/stream.h).
struct SwitchStream {
  std::string address;      // UDP, of that core: "10.0.0.1:7718"
  uint32_t first_slot = 0;  // the first of its slots at the switch
  uint32_t slots = 1;
  std::vector<uint32_t> queues;

  friend bool operator==(const SwitchStream&, const SwitchStream&) = default;
};
struct SwitchOffer {
  uint64_t generation = 0;
  uint32_t workers = 0;               // the ranks below this send through the switch
  uint32_t port = 0;                  // UDP, at which they hear the box's answers; 0: any
  std::vector<SwitchStream> streams;  // none: there is no switch
  // This generation has ended: the worker sends directly until it hears of another
  // (transport/switch/generation.h).
  bool later = false;

  friend bool operator==(const SwitchOffer&, const SwitchOffer&) = default;
};

struct JoinReply {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t first_round = 1;   // the first round this rank takes part in; it gets the results of
                              // the round before without asking
  bool send_initial = false;  // this rank is the one that sends the initial parameters
  Offer offer;
  JobLayout layout;
  JobSpec spec;  // as the server keeps it
  // The worker that created the job gets a token that joins and deletes this job, if the box asks
  // for tokens.
  std::string job_token = {};
  // Counts the lives of a job that outlives its server, in which a later one goes on from a
  // checkpoint; 0: this job ends with its server.
  uint64_t epoch = 0;
  // A rank that saves, and a rack, sends parts after every round that is a multiple of this; 0:
  // this job has no checkpoints.
  uint64_t save_every = 0;
  // This rank's part in the checkpoint of the round before its first; a rack gets those of its
  // ranks.
  std::vector<RankPart> parts;
  SwitchOffer through_switch;
  std::vector<KeyInterest> interest = {};  // this rank's, as it said

  uint64_t part_bytes(uint32_t whose) const {  // 0: there is none
    const auto part = std::ranges::find(parts, whose, &RankPart::rank);
    return part == parts.end() ? 0 : part->bytes;
  }
};
// The layout that the server's plan leads to. Throws Error(kInternal) when keys, chunks and queues
// of the reply do not fit together.
Layout layout_of(const JoinReply& reply);

// Names one incarnation in one life of the job, and proves it. For heartbeat, leave, barrier,
// hyper, and the calls with a rank's part, where it is in the path.
struct Credential {
  std::string job;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string ticket;
  uint64_t epoch = 0;
  // Somebody who is none of the job's ranks, but may decide for it; `epoch` is the life of the job
  // that they have seen, or 0. Not on the wire.
  bool is_admin = false;
};

// Rounds in which a rank of the training that saves its own state took part.
struct SaverStay {
  uint32_t rank = 0;  // a rank of the training
  uint64_t first = 1;
  uint64_t last = 0;  // 0: it is still there
  // It stands for all ranks of a rack that was lost before it had said which of them took part.
  bool unknown = false;

  bool covers(uint64_t round) const { return first <= round && (last == 0 || round <= last); }
  friend bool operator==(const SaverStay&, const SaverStay&) = default;
};

// POST …/rack: the news that a rack tells of itself; or why a rank has failed.
struct RackNews {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t epoch = 0;
  std::string name;                         // the name of its box
  std::vector<uint32_t> live;               // those of its ranks that are there
  uint64_t number = 0;                      // of a source: the highest counts, whatever comes last
  std::vector<uint32_t> incarnations = {};  // theirs, at a standby's source (phub/job/standby.h)
  std::string failure;  // the reason why it cannot go on: then the rank is lost; "": it can
  bool saves = false;   // one of its ranks has state of its own, or had
  // For all rounds up to this one, `savers` has all ranks that took part.
  uint64_t known_round = 0;
  std::vector<SaverStay> savers;

  bool same_news(const RackNews& other) const {
    return name == other.name && live == other.live && incarnations == other.incarnations &&
           failure == other.failure && saves == other.saves && known_round == other.known_round &&
           savers == other.savers;
  }
};

// Answer to a heartbeat: how the job is doing.
struct Pulse {
  uint64_t completed_round = 0;   // completed for every chunk
  uint64_t durable_round = 0;     // the last that survives the server; 0: none does
  std::vector<uint32_t> missing;  // expected ranks that are lost or not there yet
  bool assembling = false;        // the first ranks have not been there all at one time yet
  bool standby_lost = false;      // the rank is to say that it will never join it: forgo_standby
};

// POST …/hyper: the values that were asked for hold from this round on.
struct HyperReply {
  uint64_t round = 0;
};

// GET /v1/jobs/{job}/log — everything that a reference needs to recompute the run.
struct ChunkSpan {  // chunks [first, last]
  uint32_t first = 0, last = 0;

  friend bool operator==(const ChunkSpan&, const ChunkSpan&) = default;
};
struct ChunkRange {  // chunks [first, last] took part for the last time in `round` (0: never)
  uint32_t first = 0, last = 0;
  uint64_t round = 0;

  friend bool operator==(const ChunkRange&, const ChunkRange&) = default;
};
struct LogRecord {
  enum class Kind {
    kAdmitted,
    kLost,
    kLeft,
    kHyper,
    kExcluded,
    kFailed,
    kSet,
    kForked,
    kScheduled,
    kDiscarded,
    kKilled,
    kRevived,
    kLate
  };
  Kind kind = Kind::kAdmitted;
  // admitted, excluded: first round; late: the first without it; hyper, set, scheduled:
  // from; forked: it is as its parent is before this one; discarded, killed: gone before this one;
  // revived: there before it; else 0
  uint64_t round = 0;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string reason;                    // lost, failed
  std::vector<ChunkRange> last_rounds;   // lost, left: participation, all chunks in order
  uint64_t last_round = 0;               // excluded, late: in all rounds up to this one
  std::vector<ChunkSpan> chunks;         // excluded, ascending; set, whose state
  std::map<std::string, double> values;  // hyper; forked: those that differ from its parent's
  uint32_t branch = 0;                   // forked, scheduled, discarded, killed, revived
  uint32_t parent = 0;                   // forked: the branch that it is a copy of
  uint32_t fragment = 0;                 // late: of its keys (KeySpec)

  friend bool operator==(const LogRecord&, const LogRecord&) = default;
};
// The records from number `first` on, as many as a page holds.
struct LogPage {
  uint64_t first = 0;  // higher than the one that was asked for: those before it were dropped
  bool more = false;   // there are records behind these
  std::vector<LogRecord> records;

  friend bool operator==(const LogPage&, const LogPage&) = default;
};

// A branch of a job that may have some (branch_messages.h).
struct BranchStatus {
  uint32_t branch = 0;  // 0 is the branch as which the job began
  uint32_t parent = 0;
  uint64_t round = 0;    // it was forked before this round; 0: it was not
  uint64_t rounds = 0;   // those that it has run, its parent's up to there included
  bool runs = false;     // in the round that is in progress
  uint64_t killed = 0;   // before this round; 0: it is not
  bool on_disk = false;  // it was killed, and a durable checkpoint has it: its shelf is free
  uint64_t batch = 0;    // its hyperparameter `batch`: samples of a rank's gradient; 0: none is set
  // In a job without an optimizer: the hyperparameters that it and those that it comes from were
  // forked with, which the ranks apply.
  std::map<std::string, double> values = {};

  friend bool operator==(const BranchStatus&, const BranchStatus&) = default;
};

struct RankStatus {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string state;  // "joining", "live", "lost", "left", "absent"
  uint64_t first_round = 0;
  std::string reason;          // lost
  uint64_t contributions = 0;  // contributions to chunks, ever
  double lease_age_s = 0;      // since its last heartbeat, while it is live
  double waited_s = 0;         // while others wait for it: the time since it sent anything
  uint64_t waited_chunks = 0;  // chunks that others have sent and it has not
  uint64_t waited_round = 0;   // the round of the oldest of them; 0: the initial parameters
  std::string waited_key;      // the key of that chunk
  uint64_t late = 0;           // rounds in a row that went on without it; 0: it was in the latest
  std::string rack;            // the name of its box, where the rank is a rack
  std::vector<uint32_t> rack_live;  // and those of the rack's own ranks that are there
};

// Chunks and their bytes, as seen from the box: completed, gradients in, results out; the rates are
// over the last seconds.
struct Flow {
  uint64_t chunks = 0, bytes_in = 0, bytes_out = 0;
  double chunks_per_s = 0, bytes_in_per_s = 0, bytes_out_per_s = 0;

  Flow& operator+=(const Flow& other) {
    chunks += other.chunks, bytes_in += other.bytes_in, bytes_out += other.bytes_out;
    chunks_per_s += other.chunks_per_s;
    bytes_in_per_s += other.bytes_in_per_s, bytes_out_per_s += other.bytes_out_per_s;
    return *this;
  }
  friend bool operator==(const Flow&, const Flow&) = default;
};
struct QueueStatus {
  uint32_t queue = 0;  // the job's queue
  std::string nic;
  Flow flow;

  friend bool operator==(const QueueStatus&, const QueueStatus&) = default;
};
struct JobCoreStatus {  // the work of one core for a job
  uint32_t core = 0;    // the server's core; of another box: the job's
  uint32_t box = 0;     // 0: the server; then the boxes that serve under it
  EndpointCounters counters;
  std::vector<QueueStatus> queues;

  friend bool operator==(const JobCoreStatus&, const JobCoreStatus&) = default;
};
// What was decided for a job, for people: "factors" or "placement", and a sentence.
inline constexpr uint64_t kMostRemarks = 32;       // of a job
inline constexpr uint64_t kMaxRemarkBytes = 4096;  // of a text
struct Remark {
  std::string subject, text;

  friend bool operator==(const Remark&, const Remark&) = default;
};
struct JobStatus {
  std::string name;
  std::string state;  // "assembling", "running", "paused", "failed"
  std::string error;
  std::string optimizer;
  uint64_t keys = 0, chunks = 0, elements = 0, memory_bytes = 0;
  // The windows of its gradients in the server: their bytes now, by how many they are larger than
  // they were made, and how often they grew.
  uint64_t window_bytes = 0, window_grown_bytes = 0, window_growths = 0;
  uint64_t completed_round = 0;  // by every chunk
  uint64_t durable_round = 0;    // in the newest checkpoint; 0: there is none
  // If ranks save their own state: the round of the next checkpoint, which has their parts; 0: not
  // known.
  uint64_t next_saved_round = 0;
  uint64_t void_snapshots = 0;  // those in which a rank's part was missing
  uint64_t failed_saves = 0;    // checkpoints that could not be written
  double rounds_per_s = 0;      // over the last seconds
  uint64_t chunks_completed = 0;
  uint64_t switch_chunks = 0;  // chunks that came through a switch that adds
  std::string standby;         // the job's: its address, and whether it is lost; "": it has none
  std::string switch_ended;    // the reason why none comes that way any more; empty: some do
  std::string transport;
  EndpointCounters counters;  // those of the box's endpoints
  Flow flow;
  std::vector<JobCoreStatus> cores;
  uint32_t max_ranks = 0;
  std::vector<RankStatus> ranks;       // but those that were never there
  std::vector<uint32_t> missing;       // expected ranks that are not live
  std::vector<uint32_t> waiting_for;   // ranks that others wait for
  std::vector<BranchStatus> branches;  // for a job that may have several
  std::vector<Remark> remarks;         // the latest of each subject
  std::vector<RoundLoss> losses;       // of each name the latest that LossPage has
};

// The box itself: the work of all jobs together, those that have ended included.
struct CoreStatus {
  uint32_t core = 0;
  uint32_t cpu = 0;  // as the operating system counts
  uint64_t busy_passes = 0, idle_passes = 0, sleeps = 0;
  double asleep_s = 0;
  double awake = 0;  // share of the last seconds
  Flow flow;

  friend bool operator==(const CoreStatus&, const CoreStatus&) = default;
};
struct NicStatus {
  std::string name;
  std::string transport;
  uint64_t budget_bytes_per_s = 0;  // its limit; 0: none
  Flow flow;

  friend bool operator==(const NicStatus&, const NicStatus&) = default;
};
struct NodeStatus {
  uint32_t node = 0;  // as the operating system counts
  uint64_t memory_bytes = 0;
  std::vector<CoreStatus> cores;
  std::vector<NicStatus> nics;

  friend bool operator==(const NodeStatus&, const NodeStatus&) = default;
};
struct ShardStatus {  // a box that serves under the server
  std::string name;
  uint32_t cores = 0;

  friend bool operator==(const ShardStatus&, const ShardStatus&) = default;
};
struct ServerStatus {
  uint32_t version = kProtocolVersion;
  std::string topology;
  std::vector<std::string> transports;
  std::vector<std::string> nics;  // by transport, for people: the choice and its reason
  uint32_t cores = 0;
  uint64_t memory_bytes = 0, memory_limit_bytes = 0;
  double uptime_s = 0;
  std::vector<NodeStatus> nodes;
  std::vector<ShardStatus> shards;
  std::string parent;                      // the server whose rack this is; empty: it has none
  uint64_t parent_budget_bytes_per_s = 0;  // limit of each NIC for the way there; 0: none
  std::vector<JobStatus> jobs;
};

// A result or an error, as the server's answers are.
template <typename T>
struct Result {
  std::optional<T> value;
  ErrorCode code = ErrorCode::kInternal;
  std::string message;

  Result(T v) : value(std::move(v)) {}  // NOLINT: implicit on purpose
  Result(ErrorCode c, std::string m) : code(c), message(std::move(m)) {}
  explicit operator bool() const { return value.has_value(); }
};
struct Done {};
// POST …/part/…: a piece of the state that a rank saves after `round`, from byte `offset` on, of
// `all` bytes.
struct PartPiece {
  uint32_t whose = 0;  // the sender's own, or that of a rank of the training that the rack has
  uint64_t round = 0, offset = 0, all = 0;
};
struct PartBytes {  // GET …/part/…: a piece of the part that the rank sent
  std::string bytes;
};
// Takes the answer to a call. Called exactly once, possibly later, on the control thread. It may
// outlive the connection of the request: the answer is then dropped.
template <typename T>
using Reply = std::function<void(Result<T>)>;

// The body of POST …/hyper.
struct HyperRequest {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t round = 0;
  std::map<std::string, double> values;
  uint64_t epoch = 0;
};

// The body of POST …/remarks.
struct RemarkRequest {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t epoch = 0;
  Remark remark;

  friend bool operator==(const RemarkRequest&, const RemarkRequest&) = default;
};

// An error as it travels (RFC 9457). The title of a problem of this type is the phrase of its
// status (4.2.1).
inline constexpr std::string_view kProblemType = "about:blank";
struct Problem {
  std::string type = std::string(kProblemType);
  std::string title;
  uint32_t status = 0;
  std::string detail;
  ErrorCode code = ErrorCode::kInternal;
};

}  // namespace phub
