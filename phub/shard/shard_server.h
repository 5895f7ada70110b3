// A box that serves under another server: it has parts of that server's jobs, and does with them
// what it is ordered to. Members, calls and boundaries are the server's.
//
// One control thread calls everything here, as with Server; shard_link.h brings the mail.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "phub/background.h"
#include "phub/clock.h"
#include "phub/core/mail.h"
#include "phub/job/memory.h"
#include "phub/machine.h"
#include "phub/notes.h"
#include "phub/shard/served_part.h"
#include "phub/shard/shard_piece.h"
#include "transport/control/shard_messages.h"

namespace phub {

struct ShardServerOptions : MachineOptions {
  std::string name;  // of this host, for people
  uint64_t memory_limit_bytes = ~0ull;
  kernels::Store store = kernels::kDefaultStore;
  Notes::Print note;  // is told of refused connections; null: nobody is
};

class ShardServer {
 public:
  static constexpr uint32_t kPollMs = 100;

  ShardServer(ShardServerOptions options, std::vector<std::unique_ptr<Transport>> transports,
              const Clock& clock);
  ~ShardServer();

  void start_threads();
  void stop_threads();

  ShardHello hello() const;
  // An order of the server. What is wrong with it is reported, or noted.
  void handle(const ShardOrder& order);
  // Handles everything that is due: reports of the cores, events of the transports.
  void poll();
  // What happened since the last call, for the server.
  std::vector<ShardReport> take_reports() { return std::exchange(reports_, {}); }
  // What is to move between here and the server, if anything is; then, what became of it.
  std::optional<ShardPiece> next_piece();
  void moved(const ShardPiece& piece, const std::optional<Error>& failed);
  // The server is gone, or knows this shard no more: ends all parts, and with them the connections
  // of their ranks.
  void end_all();
  bool empty() const { return parts_.empty(); }

  std::vector<int> event_fds() const;
  std::string describe() const { return machine_.describe(); }
  uint32_t cores() const { return machine_.cores(); }
  Core& core(uint32_t i) { return machine_.core(i); }

 private:
  struct CoreOfPart {
    ServedPart* part = nullptr;
    uint32_t core = 0;  // of the part
  };

  void handle(const TransportEvent& event);

  const ShardServerOptions options_;
  const Clock& clock_;
  Machine machine_;
  CoreMail mail_;
  MemoryBudget budget_;
  Notes notes_;
  std::map<uint64_t, ServedPart> parts_;  // by the job's number at the server
  std::unordered_map<const CoreJob*, CoreOfPart> by_core_job_;
  std::vector<ShardReport> reports_;
  std::vector<TransportEvent> events_;
  ShardHost host_;
  Background builder_{"phub-builder"};  // last: its thread uses the members above
};

}  // namespace phub
