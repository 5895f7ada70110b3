// The parts of a job in other boxes: orders to them, and their answers. A remote core is a core
// with a longer mailbox: its messages and reports are those of core/messages.h. Control thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phub/core/messages.h"
#include "phub/core/round_gate.h"
#include "phub/job/box_moves.h"
#include "phub/job/part.h"
#include "phub/job/remote_box.h"
#include "phub/job/shards.h"
#include "phub/plan/plan.h"
#include "transport/error.h"

namespace phub {

class RemoteParts : public Part {
 public:
  // A box that mails and does not answer is lost. Cores answer in kAnswerMs; making memory may take
  // kMakeMs, and longer the more memory there is. Each piece that moves begins the time anew.
  static constexpr uint64_t kAnswerMs = 10'000, kMakeMs = 30'000;

  // `plan` is of all boxes, and outlives this; `boxes` are its second and further ones. `job` is
  // the job's number at this server.
  RemoteParts(Shards& shards, uint64_t job, const Plan& plan, std::vector<ShardBox> boxes);

  bool empty() const { return parts_.empty(); }
  bool being_made() const { return making_.is_open(); }
  uint64_t job() const { return job_; }

  // Makes all boxes make their parts of a job like `part`. Calls `done` once, when all have
  // answered, or at once if one of them is lost.
  void make(const ShardPart& part, Done done);
  // These do for all parts what Part says of one: `done` is called when the last one has answered.
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

  // Makes the boxes make memory for their parts of a state, and fetch their part if it is set. At a
  // time there is one state of keys and one branch, until it is committed or dropped; `done` is not
  // called for a dropped one.
  void share_state(const ShardKeys& state, Done done);
  void drop_state(uint64_t number);
  void free_dock(uint32_t shelf);
  // A box has closed a round: returns its chunks, ascending. Throws Error(kInvalid) if it cannot
  // close that round now.
  std::span<const uint32_t> close_round(uint64_t shard, uint64_t round);
  void decide(const Decision& decision, std::span<const kernels::KeyNorms> norms);

  // Converts a box's report to the report that one of its cores would make here, with the core's
  // number in the plan of all boxes; nullopt if the report is not about a core. An answer to a
  // probe goes to probe_of(core); `boundary` is the one that is committed. Throws Error(kInvalid)
  // if no shard may say that, or the core was not asked since it last said so.
  using ProbeOf = std::function<Probe&(uint32_t core)>;
  std::optional<CoreReport> take(uint64_t shard, const ShardReport& report, const ProbeOf& probe_of,
                                 Boundary& boundary);
  // A box that has not answered in time, and the question; nullopt if there is none. A question
  // that waits for rounds is due when the job has completed them. Call this at every tick: a
  // question's time begins with the first tick that sees it.
  struct Late {
    uint64_t shard = 0;
    std::string what;
  };
  std::optional<Late> late(uint64_t now_ms, uint64_t completed_round);
  // A piece came from the box, or went there: the time for its answers begins anew.
  void moved(uint64_t shard);

  // lose() returns nullopt if the shard has no part here.
  struct Lost {
    std::string name;
    uint32_t committing = 0;  // cores that have not answered the last kCommit
  };
  std::optional<Lost> lose(uint64_t shard);

  // The shard's index among the plan's boxes. Throws Error(kNotFound) if it has no part here.
  uint32_t box_of(uint64_t shard) const { return part_of_shard(shard).box; }
  BoxMoves& moves() { return moves_; }  // the desks' moves to and from the boxes

  void forget();  // drops the callers that wait: the server ends

 private:
  static constexpr std::string_view kServesNoMore = "it serves no more";

  const RemoteBox& part_of_shard(uint64_t shard) const;
  RemoteBox& part_of_shard(uint64_t shard) {
    return const_cast<RemoteBox&>(std::as_const(*this).part_of_shard(shard));
  }
  // A question to all boxes, whose queues the answers add to the offer; null: they have none.
  BoxQuestion ask(Offer* offer, Done done, uint64_t limit_ms = kAnswerMs);
  template <typename Visit>
  void for_each_question(Visit visit);
  void owe(CoreReport::Type type, uint32_t rank = 0, uint64_t from_round = 0);
  void order(ShardOrder order);

  Shards& shards_;
  const uint64_t job_;
  const Plan& plan_;
  std::vector<RemoteBox> parts_;
  bool active_ = false;
  uint64_t begun_ = 0;  // the latest that the boxes were told
  uint64_t decided_ = 0;
  BoxQuestion making_;
  std::map<std::pair<uint32_t, uint32_t>, BoxQuestion> offers_;  // by rank and incarnation
  struct Shared {                                                // the latest that was shared
    ShardKeys what;
    BoxQuestion question;
  };
  Shared keys_, branch_;
  BoxMoves moves_;
};

}  // namespace phub
