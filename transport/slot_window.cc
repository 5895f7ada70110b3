#include "transport/slot_window.h"

#include <algorithm>
#include <utility>

#include "numa/memory.h"
#include "transport/box_memory.h"
#include "transport/error.h"

namespace phub {

SlotWindow::SlotWindow(Shape shape)
    : slots_(std::move(shape.slots)),
      queue_first_(1, 0),
      os_node_(shape.os_node),
      box_(shape.box),
      ranks_(shape.max_ranks) {
  for (const uint32_t n : shape.queue_chunks) queue_first_.push_back(queue_first_.back() + n);
  PHUB_CHECK(queue_first_.back() == slots_.size());
  uint64_t largest = 1;
  for (const Slot& slot : slots_) largest = std::max(largest, slot.bytes);
  place_bytes_ = place_bytes(largest);
  places_ = shape.places;
  const uint64_t of_block = std::max({places_, shape.block_places, 1u});
  const uint64_t most = std::clamp<uint64_t>(kBlockBytes / place_bytes_, 1, of_block);
  while (uint64_t{2} << block_shift_ <= most) ++block_shift_;
  for (uint32_t rank = shape.first_rank; rank < shape.end_rank; ++rank) {
    ranks_[rank].place.assign(slots_.size(), kNoPlace);
    if (places_ > 0) add_places(ranks_[rank], places_);
    if (box_ != nullptr) box_->bytes += places_ * place_bytes_;
  }
}

// They are taken after those that are free already.
void SlotWindow::add_places(Rank& rank, uint32_t places) {
  while (rank.spare.size() < places) {
    const uint32_t first = static_cast<uint32_t>(rank.blocks.size()) << block_shift_;
    rank.blocks.push_back(allocate(place_bytes_ << block_shift_, os_node_, "a window of slots"));
    for (uint32_t i = 1u << block_shift_; i > 0; --i) rank.spare.push_back(first + i - 1);
  }
  const auto from = rank.spare.end() - places;
  rank.free.insert(rank.free.begin(), from, rank.spare.end());
  rank.spare.erase(from, rank.spare.end());
}

bool SlotWindow::fits(uint32_t queue, uint32_t chunk_of_queue, uint64_t offset,
                      uint64_t bytes) const {
  if (queue + 1 >= queue_first_.size()) return false;
  const uint64_t index = uint64_t{queue_first_[queue]} + chunk_of_queue;
  if (index >= queue_first_[queue + 1]) return false;
  const Slot& slot = slots_[index];
  return bytes <= slot.bytes && offset >= slot.offset && offset - slot.offset <= slot.bytes - bytes;
}

std::byte* SlotWindow::take(uint32_t rank, uint32_t queue, uint32_t chunk_of_queue,
                            uint64_t offset) {
  if (!has_room(rank, queue, chunk_of_queue)) return nullptr;
  const uint32_t index = queue_first_[queue] + chunk_of_queue;
  return place_for(rank, index) + (offset - slots_[index].offset);
}

std::byte* SlotWindow::move_in(uint32_t rank, uint32_t index) {
  if (ranks_[rank].free.empty() && !grow(rank, 1)) return nullptr;
  return place_for(rank, index);
}

std::byte* SlotWindow::place_for(uint32_t rank, uint32_t index) {
  Rank& of = ranks_[rank];
  uint32_t& place = of.place[index];
  if (place == kNoPlace) {
    place = of.free.back();
    of.free.pop_back();
    ++of.in_use;
  }
  return address(rank, place);
}

void SlotWindow::give_back(uint32_t rank, uint32_t index) {
  Rank& of = ranks_[rank];
  const uint32_t place = std::exchange(of.place[index], kNoPlace);
  if (place == kNoPlace) return;
  --of.in_use;
  if (of.in_use + of.free.size() < places_) {
    of.free.push_back(place);
    return forget_shortage(rank);
  }
  of.spare.push_back(place);
  numa::release({address(rank, place), place_bytes_});
  release(1);
}

void SlotWindow::note_shortage(uint32_t rank, bool is_short) {
  if (std::exchange(ranks_[rank].is_short, is_short) == is_short) return;
  short_ += is_short ? 1 : -1;
  if (box_ != nullptr) box_->short_ranks[rank] += is_short ? 1 : -1;
}

bool SlotWindow::grow(uint32_t places) {
  bool all = true;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].is_short) all = grow(rank, places) && all;
  }
  return all;
}

bool SlotWindow::grow(uint32_t rank, uint32_t places) {
  places = reserve(places);
  if (places == 0) return false;
  try {
    add_places(ranks_[rank], places);
  } catch (const Error&) {
    release(places);
    return false;
  }
  forget_shortage(rank);
  ++grown_;
  if (box_ != nullptr) ++box_->growths;
  return true;
}

// Returns for how many places beyond the window the limit has room.
uint32_t SlotWindow::reserve(uint32_t places) {
  if (box_ == nullptr) return places;
  if (box_->limit != nullptr && is_open_) {  // a boundary ends only once all of it is read
    box_->limit->take_beyond(places * place_bytes_);
  } else if (box_->limit != nullptr) {
    places = static_cast<uint32_t>(box_->limit->take(places, place_bytes_));
    box_->refused = places == 0;
  }
  box_->bytes += places * place_bytes_;
  box_->grown_bytes += places * place_bytes_;
  return places;
}

void SlotWindow::release(uint32_t places) {
  if (box_ == nullptr) return;
  box_->bytes -= places * place_bytes_;
  box_->grown_bytes -= places * place_bytes_;
  if (box_->limit != nullptr) box_->limit->release(places * place_bytes_);
}

}  // namespace phub
