// The ranks of a job, by number: whether each one is live, in which incarnation, and the reason why
// it is not. Part of Membership; no threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phub/checkpoint/manifest.h"
#include "phub/core/job_parameters.h"
#include "transport/control/messages.h"

namespace phub {

struct RankRecord {
  enum class Stage { kAbsent, kJoining, kLive, kLost, kLeft };
  Stage stage = Stage::kAbsent;
  uint32_t incarnation = 0;
  uint64_t first_round = 0;
  uint64_t last_round = 0;  // the highest in which a lost incarnation took part; 0: none
  bool expected = false;    // the cores wait for it, live or not
  bool first = false;       // the job begins with it
  bool joining = false;     // its join is pending or under way
  bool losing = false;      // its loss is pending or under way
  std::string reason;       // why it is not live
};

class RankTable {
 public:
  // `served` are the ranks of this box; the others are at other racks. The incarnations of a rack's
  // second `life` at its parent get higher numbers than those of its first, and so on.
  RankTable(const JobSpec& spec, const RankRange& served, uint32_t life);
  // The job goes on from a checkpoint. `latest` is, by rank, the last round that any chunk has of
  // it, where that may be another than the checkpoint's.
  void restore(const Manifest& saved, const std::vector<uint64_t>& latest);
  void save(Manifest& saved) const;

  uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }
  const RankRange& served() const { return served_; }
  RankRecord& operator[](uint32_t rank) { return ranks_[rank]; }
  const RankRecord& operator[](uint32_t rank) const { return ranks_[rank]; }

  // The rank for a join that asks for none: first come ranks that the job waits for; then those
  // that never joined, were lost, have left, and those that the next boundary takes out. -1: there
  // is none.
  int32_t choose() const;

  bool is_current(uint32_t rank, uint32_t incarnation) const;
  // The incarnation is current, and no change of that is under way.
  bool is_secure(uint32_t rank, uint32_t incarnation) const;
  // The reason why an incarnation is no longer current: "lease expired", …
  std::string why_not_current(uint32_t rank, uint32_t incarnation) const;
  // The reason of a lost incarnation; "" for all others.
  std::string why_lost(uint32_t rank, uint32_t incarnation) const;

  std::vector<uint32_t> missing() const;  // expected ranks that are not live
  uint32_t live() const;                  // how many are live, or are being admitted
  uint32_t first() const;                 // how many the job begins with
  // The highest round in which a lost incarnation of any rank took part.
  uint64_t last_round_of_all() const;
  std::vector<RankStatus> statuses() const;  // without times

 private:
  const uint32_t world_size_;
  const RankRange served_;
  std::vector<RankRecord> ranks_;
  std::vector<SavedRank> beyond_;  // the checkpoint's ranks above the job's present ones
};

}  // namespace phub
