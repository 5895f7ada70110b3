// A box that serves under another server: it has parts of that server's jobs, and does with them
// what it is ordered to. Members, calls and boundaries are the server's.
//
// One control thread calls everything here, as with Server; shard_link.h brings the mail.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
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
#include "phub/job/job_part.h"
#include "phub/job/local_part.h"
#include "phub/job/memory.h"
#include "phub/machine.h"
#include "phub/notes.h"
#include "phub/shard/shard_piece.h"
#include "phub/shard/state_share.h"
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
  // Bytes between this box and its server, which move piece by piece: of a checkpoint, of the state
  // of keys or of a branch.
  struct Move {
    CopyPlace place;  // of the next piece
    bool to_server = false;
    SavedImage image = {};
    std::function<void(const std::optional<Error>& failed)> done = {};
    bool is_busy = false;  // a piece is under way
    bool is_over = false;  // nobody wants the rest
  };
  struct Served {                    // the part of a job that is here
    std::shared_ptr<JobPart> job;    // null: it is being made
    std::optional<LocalPart> local;  // likewise
    bool started = false, ending = false;
    bool refused = false;  // a boundary: who was lost by it is attached still
    uint32_t tasks = 0;    // beside the control thread
    std::vector<Probe> probes;
    bool told_active = false;  // since the last probe
    Boundary boundary;
    std::vector<std::vector<uint64_t>> last_rounds;
    std::vector<ShardReport> committed;
    Manifest restored;  // what the part goes on from, until it has that
    uint32_t cores_snapped = 0;
    std::list<Move> moves;  // one after the other
    // Of rounds that are applied as a whole.
    std::vector<uint32_t> chunks;                     // that are here, ascending
    uint64_t closed_round = 0;                        // whose decision is awaited; 0: none
    std::vector<std::shared_ptr<StateShare>> states;  // of keys, that are read or set
  };

  struct CoreOfPart {
    uint64_t part = 0;  // its number
    uint32_t core = 0;
  };

  void make(uint64_t number, const ShardPart& order);
  std::shared_ptr<JobPart> made(const ShardPart& order, Manifest& restored);
  void make_docks(JobPart& part, const std::vector<uint32_t>& shelves);
  void take(uint64_t number, Served& part, std::shared_ptr<JobPart> job);
  void refuse(uint64_t number, const Error& why);
  void begin_move(Served& part, Move move);
  void end_move(Served& part, std::list<Move>::iterator move, const std::optional<Error>& failed);
  void restore(uint64_t number, Served& part);
  void snapped(uint64_t number, Served& part, uint64_t round);
  void offer(uint64_t number, Served& part, const ShardOrder& order);
  void commit(uint64_t number, Served& part, const ShardBoundary& order);
  void take_boundary(Served& part, const ShardBoundary& order);
  static void decide(Served& part, const ShardDecision& order);
  void handle(CoreOfPart from, const CoreReport& report);
  void committed(Served& part);
  void handle(const TransportEvent& event);
  void begin_end(Served& part);
  void free(uint64_t number, Served& part);
  ShardReport& report(ShardSays what, uint64_t number);
  void report_failed(uint64_t number, std::string why);  // the job can not go on here
  ShardProbe probe_of(const Served& part, uint32_t core) const;

  // shard_server_state.cc
  void make_state(uint64_t number, Served& part, const ShardKeys& order);
  void refuse_state(uint64_t number, uint64_t state, const Error& why);
  void state_is_there(uint64_t number, StateShare& share);
  void drop_state(Served& part, uint64_t state);
  void drop_state(Served& part, const std::shared_ptr<StateShare>& share);
  static StateShare& state_for_boundary(Served& part, uint64_t state, bool is_branch);
  static void place_state(Served& part, uint64_t state);
  void place_branch(Served& part, const ShardBoundary& order);
  void free_dock(Served& part, uint64_t shelf);
  void drop_shelf(JobPart::Shelf shelf);
  void state_copied(CoreOfPart from, Served& part, bool was_set);
  void move_state(uint64_t number, Served& part, const std::shared_ptr<StateShare>& share);

  const ShardServerOptions options_;
  const Clock& clock_;
  Machine machine_;
  CoreMail mail_;
  MemoryBudget budget_;
  Notes notes_;
  std::map<uint64_t, Served> parts_;
  std::unordered_map<const CoreJob*, CoreOfPart> by_core_job_;
  std::vector<ShardReport> reports_;
  std::vector<TransportEvent> events_;
  Background builder_{"phub-builder"};  // last: its thread uses the members above
};

}  // namespace phub
