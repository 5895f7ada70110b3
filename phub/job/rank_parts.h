// The parts of ranks that belong to the snapshot under way: which are there, which are missing, and
// whether the snapshot can still become a checkpoint. Plain data, without files: control thread
// only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

class RankParts {
 public:
  // A snapshot of `round`, which has not been closed anywhere; 0: none is under way.
  void begin(uint64_t round) { *this = RankParts(), round_ = round; }
  void end() { *this = RankParts(); }
  uint64_t round() const { return round_; }

  // Throws Error unless this piece of the rank's part may come: kNotFound, another snapshot or none
  // is under way, or it is void; kTaken, it came already; kInvalid, it is not the next, or of a
  // part of another size.
  void check(uint32_t rank, const PartPiece& place) const;
  // It comes, and is being written; pieces are written in the order in which they come.
  void coming(uint32_t rank, const PartPiece& place, uint64_t bytes);
  void written(uint32_t rank, uint64_t bytes) { parts_.at(rank).written += bytes; }
  // The first reason counts.
  void make_void(const std::string& why);

  // Round `round()` is complete: parts of these ranks are needed.
  void need(std::vector<uint32_t> ranks) { needed_ = std::move(ranks); }
  // Ranks whose parts are needed and have not come.
  std::vector<uint32_t> awaited() const;
  // Whether all that are needed are there, and all that came are written.
  bool complete() const;
  bool has(uint32_t rank) const;  // all of it has come
  bool has_some(uint32_t rank) const { return parts_.contains(rank); }
  const std::string& why_void() const { return why_void_; }  // "": it is not
  bool any() const { return !parts_.empty(); }

 private:
  struct Part {  // bytes
    uint64_t all = 0, come = 0, written = 0;
  };
  uint64_t round_ = 0;
  std::map<uint32_t, Part> parts_;
  std::vector<uint32_t> needed_;
  std::string why_void_;
};

}  // namespace phub
