// The ranks' parts of the snapshot under way: those that are here, those that are missing, and
// whether the snapshot can still become a checkpoint. Plain data, without files: control thread
// only.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

class RankParts {
 public:
  // A snapshot of `round`, which has not been closed anywhere; 0: none is under way.
  void begin(uint64_t round) { *this = RankParts(), round_ = round; }
  void end() { *this = RankParts(); }
  uint64_t round() const { return round_; }

  // Throws Error unless this piece of a rank's part may come: kNotFound, another snapshot or none
  // is under way, or the snapshot is void; kTaken, the piece came already; kInvalid, it is not the
  // next piece, or the part has another size.
  void check(const PartPiece& place) const;
  // The piece comes and is being written; pieces are written in the order in which they come.
  void coming(const PartPiece& place, uint64_t bytes);
  void written(uint32_t rank, uint64_t bytes) { parts_.at(rank).written += bytes; }
  // The first reason counts.
  void make_void(const std::string& why);

  // `savers` are ranks that save. The snapshot needs the parts of those that took part in the
  // round, and is void if one of them was lost before it sent its part. `is_all` means that the
  // round is complete, and these are all.
  void judge(const std::vector<SaverStay>& savers, bool is_all);
  bool needs_any() const { return !needed_.empty(); }
  // Ranks whose parts are needed and have not come.
  std::vector<uint32_t> awaited() const;
  // Whether there is no snapshot, or all needed parts are here and all parts that came are written.
  bool complete() const;
  const std::string& why_void() const { return why_void_; }  // "": it is not
  bool any() const { return !parts_.empty(); }

 private:
  bool has(uint32_t rank) const;  // its part has come whole
  struct Part {                   // bytes
    uint64_t all = 0, come = 0, written = 0;
  };
  uint64_t round_ = 0;
  std::map<uint32_t, Part> parts_;
  std::set<uint32_t> needed_;
  bool is_judged_ = false;  // is_all was true
  std::string why_void_;
};

}  // namespace phub
