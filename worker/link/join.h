// Joins a job: at which server, as which rank, in which life of the job.
#pragma once

#include <chrono>
#include <stop_token>
#include <string>

#include "transport/control/messages.h"
#include "transport/error.h"
#include "worker/worker.h"

namespace phub {

struct Joined {
  std::string server;  // HOST:PORT, of those in the options
  JoinReply reply;
  std::string reached = {};  // the number of the server's address
};

// Whether the rank has state of its own, which belongs to the job's checkpoints: its saver's, or
// residuals.
bool has_state(const WorkerOptions& options);

// Throws Error: of the last server that was asked, if none answers within connect_timeout_ms.
Joined join(const WorkerOptions& options);

// Joins again as the rank that lost its server, in the same life of the job or a later one. Waits
// until `give_up` for a server that may go on with the job. Throws Error: kNotFound, the job has
// ended; kTaken, another worker has the rank; kFenced, the servers that answer have an earlier life
// of the job, or `stop` was called.
Joined rejoin(const WorkerOptions& options, const JoinReply& lost,
              std::chrono::steady_clock::time_point give_up, std::stop_token stop);
// Whether a worker that has just joined again may do so once more after this error: the server died
// again, or other ranks did not come in time. They may the next time.
bool may_rejoin_after(const Error& error);

}  // namespace phub
