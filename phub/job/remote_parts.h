// The parts of a job in other boxes: orders to them, and which of them have answered. A remote core
// is one with a longer mailbox: its messages and reports are those of core/messages.h. Control
// thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "phub/core/messages.h"
#include "phub/core/round_gate.h"
#include "phub/job/box_moves.h"
#include "phub/job/part.h"
#include "phub/job/shards.h"
#include "phub/plan/plan.h"
#include "transport/error.h"

namespace phub {

class RemoteParts : public Part {
 public:
  // A box that mails and does not answer is lost. Cores answer in kAnswerMs; memory that is made
  // may take kMakeMs, and longer as there is more of it. Pieces that move begin the time anew.
  static constexpr uint64_t kAnswerMs = 10'000, kMakeMs = 30'000;

  // `plan` of all boxes, whose second and further are `boxes`, and which outlives this. `job`: its
  // number at this server.
  RemoteParts(Shards& shards, uint64_t job, const Plan& plan, std::vector<ShardBox> boxes);

  bool empty() const { return parts_.empty(); }
  bool being_made() const { return static_cast<bool>(making_.done); }
  uint64_t job() const { return job_; }

  // All boxes make their parts of a job like `part`; `done` is called once, when all have answered,
  // or at once: one of them is lost.
  void make(const ShardPart& part, Done done);
  // As Part says of one part, for all of them: `done` is called when the last one has answered.
  void start() override;
  void admit(uint32_t rank, uint32_t incarnation, std::span<const KeyInterest> interest,
             Offer& offer, Done done) override;
  void reconnect(uint32_t rank, uint32_t incarnation, Offer& offer, Done done) override;
  void revoke(uint32_t rank) override { order({.kind = ShardDo::kRevoke, .rank = rank}); }
  void hold() override;
  void commit(const Commit& commit) override;
  void detach(uint32_t rank) override;
  void attach(uint32_t rank, uint32_t incarnation) override;
  void probe(uint64_t begun) override;
  bool wants_probe(uint64_t begun) override { return !empty() && (active_ || begun > begun_); }
  void remove() override;
  bool gone() const override;

  // They make memory for their part of it, and fetch what is set. One of keys at a time and one
  // branch, until it is committed or dropped; `done` is not called for one that was dropped.
  void share_state(const ShardKeys& state, Done done);
  void drop_state(uint64_t number);
  void free_dock(uint32_t shelf);
  // A box has closed a round: its chunks, ascending. Throws Error(kInvalid): not that one.
  std::span<const uint32_t> close_round(uint64_t shard, uint64_t round);
  void decide(const Decision& decision);

  // Of a box: what it says, as one of its cores would say it here, with the core's number in the
  // plan of all. Nothing: it is no core's report. `probe_of(core)`: where its answer to a probe
  // goes; `boundary`: that which is committed. Throws Error(kInvalid): no shard says that, or
  // nobody has asked the core since it said so last.
  using ProbeOf = std::function<Probe&(uint32_t core)>;
  std::optional<CoreReport> take(uint64_t shard, const ShardReport& report, const ProbeOf& probe_of,
                                 Boundary& boundary);
  // A box that has not answered in time, and what it was asked. What waits for rounds is due when
  // the job has completed them. Nothing: there is none. Call it at every tick: a question's time
  // begins with the first tick that sees it.
  struct Late {
    uint64_t shard = 0;
    std::string what;
  };
  std::optional<Late> late(uint64_t now_ms, uint64_t completed_round);
  // A piece came from the box, or went there: what it is asked for may take as long again.
  void moved(uint64_t shard);

  // Nothing: it has no part here.
  struct Lost {
    std::string name;
    uint32_t committing = 0;  // that have not answered the last kCommit
  };
  std::optional<Lost> lose(uint64_t shard);

  // Which box of the plan it is. Throws Error(kNotFound): it has no part here.
  uint32_t box_of(uint64_t shard) const { return part_of_shard(shard).box; }
  BoxMoves& moves() { return moves_; }  // what desks of the job move there, and back

  void forget();  // whoever waits for an answer: the server ends

 private:
  struct Remote {
    uint64_t shard = 0;
    std::string name;
    uint32_t box = 0;
    uint32_t first_core = 0, cores = 0;
    uint32_t first_queue = 0, queues = 0;
    // The reports that its cores owe: what of, about which rank (0 means none), and the core.
    struct Owed {
      uint64_t from_round = 0;  // it is due when the job has completed this; kNever: not yet
      uint64_t since_ms = 0;    // 0: late() has not seen it due
    };
    std::map<std::tuple<CoreReport::Type, uint32_t, uint32_t>, Owed> owed;
    bool told_rounds = false;      // the last rounds of the ranks that the boundary loses
    uint64_t closed_round = 0;     // of a gate
    std::vector<uint32_t> chunks;  // of the box, ascending; empty: not needed yet

    // Each core, once.
    void owes(CoreReport::Type type, uint32_t rank = 0, uint64_t from_round = 0);
    uint32_t owing(CoreReport::Type type) const;  // how many cores
  };
  const Remote& part_of_shard(uint64_t shard) const;
  Remote& part_of_shard(uint64_t shard) {
    return const_cast<Remote&>(std::as_const(*this).part_of_shard(shard));
  }
  struct Asked {                                // all parts, and some have not answered
    std::map<uint64_t, uint64_t> awaited = {};  // shards, and since when; 0: late() has not seen it
    uint64_t limit_ms = kAnswerMs;
    std::optional<Error> failed;
    Offer* offer = nullptr;
    Done done;
  };
  void ask(Asked& asked, Offer* offer, Done done, uint64_t limit_ms = kAnswerMs);
  // For memory of the part's elements, so many times.
  uint64_t make_ms(uint64_t copies) const;
  template <typename Visit>
  void for_each_asked(Visit visit);
  void answered(Asked& asked, const Remote& part, const ShardReport& report);
  void check_last_rounds(Remote& part, std::span<const ShardRounds> all, const Boundary& boundary);
  void take_last_rounds(const Remote& part, std::span<const ShardRounds> all,
                        Boundary& boundary) const;
  void owe(CoreReport::Type type, uint32_t rank = 0, uint64_t from_round = 0);
  void order(ShardOrder order);

  Shards& shards_;
  const uint64_t job_;
  const Plan& plan_;
  std::vector<Remote> parts_;
  bool active_ = false;
  uint64_t begun_ = 0;  // as the boxes were told
  uint64_t decided_ = 0;
  Asked making_;
  std::map<std::pair<uint32_t, uint32_t>, Asked> offers_;  // by rank and incarnation
  struct Shared {                                          // the latest
    ShardKeys what;
    Asked asked;
  };
  Shared keys_, branch_;
  BoxMoves moves_;
};

}  // namespace phub
