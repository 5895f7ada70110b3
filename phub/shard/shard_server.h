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
#include "phub/job/job_part.h"
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
  struct Part {
    std::shared_ptr<JobPart> job;  // null: it is being made
    std::vector<uint32_t> cores;   // of the machine
    uint32_t cores_left = 0;       // that have it
    bool started = false, ending = false;
    bool refused = false;  // a boundary: who was lost by it is attached still
    uint32_t tasks = 0;    // beside the control thread
    std::vector<Probe> probes;
    uint64_t activity = 0;  // of its cores, when the server was told last
    bool told_active = false;
    Boundary boundary;
    std::vector<std::vector<uint64_t>> last_rounds;
    std::vector<ShardReport> committed;
    struct Seat {
      uint32_t incarnation = 0;
      std::vector<ChunkInterest> chunks;  // what it writes and reads; empty: everything
    };
    std::map<uint32_t, Seat> seats;  // of the ranks that the link has
    Manifest restored;               // what the part goes on from, until it has that
    // What moves of a checkpoint: to the server when all cores have copied, or from it.
    enum class Moving : uint8_t { kNothing, kUp, kDown } moving = Moving::kNothing;
    bool piece_under_way = false;
    SavedImage image;
    uint64_t image_round = 0, image_offset = 0;
    uint32_t cores_snapped = 0;
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
  void take(uint64_t number, Part& part, std::shared_ptr<JobPart> job);
  void refuse(uint64_t number, const Error& why);
  void begin_move(uint64_t number, Part& part, Part::Moving moving, uint64_t round);
  void all_moved(uint64_t number, Part& part);
  void offer(uint64_t number, Part& part, const ShardOrder& order);
  void commit(uint64_t number, Part& part, const ShardBoundary& order);
  void take_boundary(Part& part, const ShardBoundary& order);
  static void decide(Part& part, const ShardDecision& order);
  void broadcast(Part& part, CoreMessage message);
  void handle(CoreOfPart from, const CoreReport& report);
  void committed(Part& part);
  void handle(const TransportEvent& event);
  void begin_end(Part& part);
  void free(uint64_t number, Part& part);
  ShardReport& report(ShardSays what, uint64_t number);
  void report_failed(uint64_t number, std::string why);  // the job can not go on here
  ShardProbe probe_of(const Part& part, uint32_t core) const;
  void revoke(Part& part, uint32_t rank);

  // shard_server_state.cc
  void make_state(uint64_t number, Part& part, const ShardKeys& order);
  void refuse_state(uint64_t number, uint64_t state, const Error& why);
  void state_is_there(uint64_t number, StateShare& share);
  void drop_state(Part& part, uint64_t state);
  void drop_state(Part& part, const std::shared_ptr<StateShare>& share);
  static StateShare& state_for_boundary(Part& part, uint64_t state, bool is_branch);
  static void place_state(Part& part, uint64_t state);
  void place_branch(Part& part, const ShardBoundary& order);
  void free_dock(Part& part, uint64_t shelf);
  void drop_shelf(JobPart::Shelf shelf);
  void state_copied(CoreOfPart from, Part& part, bool was_set);
  void state_has_moved(uint64_t number, Part& part, const std::shared_ptr<StateShare>& share);
  static std::optional<ShardPiece> next_piece_of_state(uint64_t number, Part& part);
  void moved_of_state(const ShardPiece& piece, Part& part, const std::optional<Error>& failed);

  const ShardServerOptions options_;
  const Clock& clock_;
  Machine machine_;
  CoreMail mail_;
  MemoryBudget budget_;
  Notes notes_;
  std::map<uint64_t, Part> parts_;
  std::unordered_map<const CoreJob*, CoreOfPart> by_core_job_;
  std::vector<ShardReport> reports_;
  std::vector<TransportEvent> events_;
  Background builder_{"phub-builder"};  // last: its thread uses the members above
};

}  // namespace phub
