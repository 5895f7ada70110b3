// The parts of a running job's checkpoints in which ranks save their own state: pieces that come
// for the snapshot under way, and pieces of the part that a rank goes on from. Below a parent all
// of them pass through, each under the number of its rank in the training; so a checkpoint of the
// root has the files of one box's.
//
// Control thread; the running job owns it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phub/job/job_context.h"
#include "phub/job/rank_parts.h"
#include "phub/job/savers.h"

namespace phub {

class PartDesk {
 public:
  // `savers` outlives this. `changed` is called when a piece is written or could not be.
  PartDesk(const JobContext& context, const Savers& savers, std::function<void()> changed);

  // REQUIRES, for each call: the rank is a member of the job.
  // Throws why the piece may not come: kInvalid, the rank does not save, or a size is wrong; or
  // what RankParts::check throws.
  void check(const Credential& who, const PartPiece& place, uint64_t bytes) const;
  // `charge` counts the memory of the piece until the piece is written.
  void take(const Credential& who, const PartPiece& place, std::string piece,
            std::shared_ptr<void> charge, Reply<Done> reply);
  // Reads a piece of the part of `whose` in the checkpoint that `rank` goes on from: `whose` is the
  // rank, or a rank below it. Throws Error: there is none.
  void read(uint32_t rank, uint32_t whose, uint64_t offset, Reply<PartBytes> reply);

  // The parts that the rank goes on from; none if its first round is not the job's.
  std::vector<RankPart> parts_for(uint32_t rank) const;
  RankParts& of_snapshot() { return parts_; }  // the one under way
  // The snapshot under way will not become a checkpoint: removes the pieces that have come.
  void drop();

 private:
  JobHost& host_;
  Job& job_;
  const Seats& seats_;
  const SavedLife& life_;
  Uplink* const uplink_;
  JobDriver& driver_;
  const Savers& savers_;
  const std::function<void()> changed_;
  RankParts parts_;
};

}  // namespace phub
