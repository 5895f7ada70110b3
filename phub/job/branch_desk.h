// The branches of a running job (branches.h): the calls about them, killed and revived branches,
// and the losses that ranks report.
//
// The writer's thread reads the files of a branch that is revived, into memory of their own. Other
// boxes that have parts of the job make memory for theirs, and fetch their part of the branch. Then
// the boundary chooses a shelf, in whose dock that memory waits for every chunk, in each box. The
// budget counts the memory until it is freed.
//
// Control thread; the running job owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "phub/job/hyper_desk.h"
#include "phub/job/job_context.h"
#include "phub/job/losses.h"
#include "phub/task.h"

namespace phub {

class BranchDesk {
 public:
  // `hyper` outlives this.
  BranchDesk(const JobContext& context, const HyperDesk& hyper);

  // These throw Error: the job has no branches, or the change is impossible; or as Losses::add().
  void change(const BranchChange& change, Reply<BranchReply> reply);
  void report_loss(const LossRequest& report);
  LossPage losses(uint64_t from) const;
  std::vector<RoundLoss> latest_losses() const { return losses_.latest(); }

  // Frees docks that no chunk needs any more.
  void tick();
  // Puts a revived branch into the dock from which an order of the boundary copies. Returns the
  // number by which other boxes know that branch; 0: no order copies from a dock.
  uint64_t at_boundary(std::span<const BranchOrder> orders);
  void refuse(ErrorCode code, const std::string& why);  // the job has ended
  uint64_t bytes() const;                               // in the budget

  // Frees the memory on the builder's thread.
  void free_beside(std::vector<Job::Shelf> shelves);

 private:
  struct Revived {
    BranchChange change;
    uint64_t number;  // by which other boxes know the branch
    uint64_t bytes;   // memory
    Job::Branch files = {};
    bool is_shared = false;              // other boxes may have it; no boundary has it yet
    Reply<BranchReply> reply = nullptr;  // null once it is decided
  };
  BranchReply list() const;
  void check_may_kill() const;
  void decide(const BranchChange& change, uint32_t child, Reply<BranchReply> reply);
  void revive(const BranchChange& change, Reply<BranchReply> reply);
  Story bring_back(std::shared_ptr<Revived> revived);
  void refuse_revival(ErrorCode code, const std::string& why);
  void drop_revived();
  void drop_shelf(Job::Shelf shelf);

  JobHost& host_;
  Job& job_;
  Membership& membership_;
  Branches& branches_;
  RemoteParts& remote_;
  const SavedLife& life_;
  Requests& requests_;
  JobDriver& driver_;
  const HyperDesk& hyper_;
  // The branch that waits for its files, for other boxes or for its boundary; null: none.
  std::shared_ptr<Revived> revived_;
  Losses losses_;
};

}  // namespace phub
