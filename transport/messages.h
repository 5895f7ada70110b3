// The control messages, decoded. JSON on the wire; transport/README.md documents every field.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "transport/error.h"
#include "transport/job_spec.h"
#include "transport/nic.h"

namespace phub {

inline constexpr uint32_t kProtocolVersion = 1;

// POST /v1/jobs/{job}/join — creates the job if it is not there.
struct JoinRequest {
  uint32_t version = kProtocolVersion;
  JobSpec spec;
  int32_t rank = -1;     // -1: the lowest free one
  bool replace = false;  // the rank's present incarnation, if any, is fenced first
  std::string transport = "shm";
};

inline constexpr uint64_t kChunkAlignment = 32;  // elements

// Where every key and chunk is. Offsets and sizes are in elements.
struct JobLayout {
  std::vector<uint64_t> key_offset;                 // in the gradient memory and in the results
  std::vector<std::vector<uint32_t>> queue_chunks;  // [queue][index] = chunk, numbered key by key
  uint64_t total_elements = 0;                      // with the padding between keys
  // Where each queue's chunks begin in the box's memory; there they lie one after another, each
  // at a multiple of kChunkAlignment. Empty: the box's memory is laid out as the worker's.
  std::vector<uint64_t> queue_offset;

  friend bool operator==(const JobLayout&, const JobLayout&) = default;
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
};

// Names one incarnation and proves it. For heartbeat, leave, barrier, hyper.
struct Credential {
  std::string job;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string ticket;
};

// Answer to a heartbeat: how the job is doing.
struct Pulse {
  uint64_t completed_round = 0;   // completed for every chunk
  std::vector<uint32_t> missing;  // expected ranks that are lost or not there yet
  std::string error;              // set once the job failed; the code beside it
  ErrorCode error_code = ErrorCode::kInternal;
};

// GET /v1/jobs/{job}/log — everything that a reference needs to recompute the run.
struct ChunkRange {  // chunks [first, last] took part for the last time in `round` (0: never)
  uint32_t first = 0, last = 0;
  uint64_t round = 0;

  friend bool operator==(const ChunkRange&, const ChunkRange&) = default;
};
struct LogRecord {
  enum class Kind { kAdmitted, kLost, kLeft, kHyper, kExcluded, kFailed };
  Kind kind = Kind::kAdmitted;
  uint64_t round = 0;  // admitted: first round; hyper: from; excluded: the round; else 0
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string reason;                    // lost, failed
  std::vector<ChunkRange> last_rounds;   // lost, left: participation, all chunks in order
  uint32_t chunk = 0;                    // excluded
  std::map<std::string, double> values;  // hyper

  friend bool operator==(const LogRecord&, const LogRecord&) = default;
};

struct RankStatus {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  std::string state;  // "joining", "live", "lost", "left", "absent"
  uint64_t first_round = 0;
  std::string reason;  // lost
};
struct JobStatus {
  std::string name;
  std::string state;  // "assembling", "running", "paused", "failed"
  std::string error;
  std::string optimizer;
  uint64_t keys = 0, chunks = 0, elements = 0, memory_bytes = 0;
  uint64_t completed_round = 0;  // by every chunk
  double rounds_per_s = 0;       // over the last seconds
  uint64_t chunks_completed = 0;
  std::string transport;
  EndpointCounters counters;  // of the box's endpoints
  std::vector<RankStatus> ranks;
  std::vector<uint32_t> waiting_for;  // ranks that the oldest open chunk lacks
};
struct ServerStatus {
  uint32_t version = kProtocolVersion;
  std::string topology;
  std::vector<std::string> transports;
  std::vector<std::string> nics;  // of each transport, for people: what was chosen, and why
  uint32_t cores = 0;
  uint64_t memory_bytes = 0, memory_limit_bytes = 0;
  double uptime_s = 0;
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

}  // namespace phub
