// A whole box in the test's process: production server, cores' threads, control port. Workers use
// shared memory, or what PHUB_TRANSPORT says. PHUB_TEST_SHARDS: so many boxes serve under it.
// The box's machine has number 1, those of the others 2, 3, ….
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phub/checkpoint/options.h"
#include "tests/worker/options.h"
#include "transport/control/messages.h"

namespace phub {
class ParentClient;
class Server;
class Transport;
struct SwitchOptions;
}  // namespace phub

namespace phub::testing {

class Box {
 public:
  // What a test puts around a transport.
  using Wrap = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

  explicit Box(uint32_t cores = 2, uint64_t memory_limit_bytes = uint64_t{1} << 33,
               const Wrap& wrap = {});
  // How a rack sends to its parent.
  struct Uplink {
    std::string transport;         // "": as the workers are asked to, or auto
    uint64_t nic_bytes_per_s = 0;  // at most; 0: no limit
    bool is_standby;               // the parent is no parent, but stands by for this box
    std::string standby_of;        // the box for which this one stands by; "": none
  };
  // `parent`: the address of a box whose rack this is. `through_switch`: null: there is none.
  // `listen`: as of phub serve.
  explicit Box(const std::string& topology, uint64_t memory_limit_bytes = uint64_t{1} << 33,
               const Wrap& wrap = {}, const CheckpointOptions& checkpoints = {},
               const std::string& parent = "", const SwitchOptions* through_switch = nullptr,
               const Uplink& uplink = {.transport = "", .nic_bytes_per_s = 0},
               const std::string& listen = "127.0.0.1:0");
  ~Box();

  const std::string& address() const;
  WorkerOptions options(JobSpec spec) const { return options_of(address(), std::move(spec)); }
  WorkerOptions options(JobSpec spec, uint32_t rank) const {
    WorkerOptions of_rank = options(std::move(spec));
    of_rank.rank = static_cast<int32_t>(rank);
    return of_rank;
  }
  std::vector<LogRecord> log(const std::string& job);
  std::vector<std::string> notes();  // what it has told its operator
  ServerStatus status();
  // Waits until no job is left and its memory is free: that is after the answer to the last leave.
  // False after a minute.
  bool becomes_empty();
  // Calls `f` on the control thread, and waits for it.
  void on_control(const std::function<void(Server&)>& f);

 private:
  struct Running;
  std::unique_ptr<Running> running_;
};

// What a parent answers a rack.
JoinReply join_parent(ParentClient& parent, const JoinRequest& request);

// Runs `body(rank)` in a thread per rank; the first exception is thrown on.
void each_rank(uint32_t ranks, const std::function<void(uint32_t rank)>& body);
// The same with a worker for each rank of the job, which has its first parameters.
void each_worker(const Box& box, const JobSpec& spec,
                 const std::function<void(Worker& worker, uint32_t rank)>& body,
                 const std::string& transport = "");

}  // namespace phub::testing
