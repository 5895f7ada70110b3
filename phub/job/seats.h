// The seats of a running job's ranks: the offer that the present incarnation of each rank got when
// it joined, and its state since then. Plain data: control thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "transport/control/messages.h"

namespace phub {

struct Seat {
  uint32_t incarnation = 0;
  Offer offer;
  // Connections that its process has closed, and not opened again. If both are closed, it has
  // ended.
  bool data_ended = false;
  bool control_ended = false;
  std::string id;      // its join's
  Caller caller;       // the caller of the join
  bool noted = false;  // its loss is in the server's log
  uint64_t first_round = 0;
  bool send_initial = false;
  bool saves = false;  // its part belongs to checkpoints
  std::vector<KeyInterest> interest = {};
  RackNews rack = {};  // the latest, where the rank is a rack
};

class Seats {
 public:
  explicit Seats(uint32_t ranks) : seats_(ranks) {}
  size_t size() const { return seats_.size(); }
  Seat& operator[](uint32_t rank) { return seats_[rank]; }
  const Seat& operator[](uint32_t rank) const { return seats_[rank]; }
  auto begin() const { return seats_.begin(); }
  auto end() const { return seats_.end(); }

  void take(uint32_t rank, Seat seat);
  void take_saves(uint32_t rank);  // the rank is a rack, in which a rank saves
  // Ranks whose seat says that they save. The rank itself may be lost.
  const std::set<uint32_t>& saving() const { return saving_; }
  uint64_t interest_bytes() const { return interest_bytes_; }  // memory of all seats

 private:
  std::vector<Seat> seats_;
  std::set<uint32_t> saving_;
  uint64_t interest_bytes_ = 0;
};

}  // namespace phub
