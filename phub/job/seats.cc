#include "phub/job/seats.h"

#include <utility>

namespace phub {
namespace {

uint64_t bytes_of_interest(const Seat& seat) {
  uint64_t bytes = 0;
  for (const KeyInterest& of : seat.interest) {
    bytes += sizeof of + (of.writes.size() + of.reads.size()) * sizeof(ElementRange);
  }
  return bytes;
}

}  // namespace

void Seats::take(uint32_t rank, Seat seat) {
  interest_bytes_ += bytes_of_interest(seat) - bytes_of_interest(seats_[rank]);
  if (seat.saves) {
    saving_.insert(rank);
  } else {
    saving_.erase(rank);
  }
  seats_[rank] = std::move(seat);
}

void Seats::take_saves(uint32_t rank) {
  seats_[rank].saves = true;
  saving_.insert(rank);
}

}  // namespace phub
