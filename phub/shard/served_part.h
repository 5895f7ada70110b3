// A part of a job of the server, in a box that serves under it: the server's orders go to its
// cores, and what the cores say goes to the server.
//
// The part carries out what it is ordered, if that fits; its members, calls and boundaries are the
// server's. Control thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "phub/background.h"
#include "phub/core/mail.h"
#include "phub/job/job_part.h"
#include "phub/job/local_part.h"
#include "phub/job/memory.h"
#include "phub/machine.h"
#include "phub/shard/served_states.h"
#include "phub/shard/server_moves.h"
#include "transport/control/shard_messages.h"

namespace phub {

// What the parts of a shard share.
struct ShardHost {
  Machine& machine;
  CoreMail& mail;
  MemoryBudget& budget;
  Background& builder;
  const kernels::Store store;
  std::vector<ShardReport>& reports;  // for the server
};

class ServedPart final : private ServedStates::Reports {
 public:
  // `number`: of the job at the server. The host outlives this.
  ServedPart(uint64_t number, ShardHost& host) : number_(number), host_(host) {}

  // Makes the part; kMade says whether that went well, and is_made() holds until it is gone.
  void make(const ShardPart& order);
  // The builder has made it: its cores may say something.
  bool is_made() const { return local_.has_value(); }
  JobPart& job() { return *job_; }  // REQUIRES: is_made()

  void handle(const ShardOrder& order);
  void handle(uint32_t core, const CoreReport& said);  // `core`: of the part
  void handle(const TransportEvent& event);            // REQUIRES: it is of this part's link
  // Tells the server, once after each probe, that something has happened.
  void tell_if_active();

  // Of a state (a rank waits for it), or of a checkpoint; nullopt: there is none now.
  std::optional<ShardPiece> next_piece(bool of_state);
  void moved(const ShardPiece& piece, const std::optional<Error>& failed) {
    moves_.moved(piece, failed);
  }

  void end();
  bool ending() const { return ending_; }
  // It has ended or could not be made, and nothing uses it any more.
  bool gone() const;
  // Gives back what it has, beside this thread. REQUIRES: gone().
  void free();
  void detach_all();  // the shard ends: in the stead of the cores, whose threads have ended

 private:
  std::shared_ptr<JobPart> make_part(const ShardPart& order);
  void make_docks(JobPart& part, const std::vector<uint32_t>& shelves) const;
  void take();
  void refuse(const Error& why);
  void restore();
  void snapped(uint64_t round);
  void offer(const ShardOrder& order);
  void commit(const ShardBoundary& order);
  void take_boundary(const ShardBoundary& order);
  void decide(const ShardDecision& order);
  void committed();
  ShardProbe probe_of(uint32_t core) const;
  ShardReport& report(ShardSays what) override;
  void report_failed(std::string why) override;

  const uint64_t number_;
  ShardHost& host_;
  std::shared_ptr<JobPart> job_;    // null: it is being made
  std::optional<LocalPart> local_;  // likewise
  ServerMoves moves_;
  std::optional<ServedStates> states_;  // likewise
  Manifest restored_;                   // what the part goes on from, until it has that
  bool ending_ = false;
  bool refused_ = false;  // a boundary: the ranks that were lost by it are attached still
  uint32_t tasks_ = 0;    // beside the control thread
  std::vector<Probe> probes_;
  bool told_active_ = false;  // since the last probe
  Boundary boundary_;
  std::vector<std::vector<uint64_t>> last_rounds_;
  std::vector<ShardReport> committed_;
  uint32_t cores_snapped_ = 0;
  // Of rounds that are applied as a whole.
  std::vector<uint32_t> chunks_;  // that are here, ascending
  uint64_t closed_round_ = 0;     // whose decision is awaited; 0: none
};

}  // namespace phub
