// The two ends of a ring of immediates. Each end is owned by one thread; the other end may be
// another process, which is not trusted: everything that it can write is checked before use.
#pragma once

#include <algorithm>
#include <span>

#include "transport/shm/format.h"
#include "transport/transport.h"

namespace phub {

// REQUIRES (both ends): `ring` and its entries stay mapped; `entries` is a power of two. Positions
// of a new ring begin at zero; `first` is for a ring whose tail and head were set to another one.
class ShmProducer {
 public:
  ShmProducer() = default;
  ShmProducer(ShmRing* ring, uint32_t entries, uint32_t first = 0)
      : ring_(ring),
        entries_(ring->entries()),
        mask_(entries - 1),
        tail_(first),
        published_(first),
        head_(first) {}

  // False: full, or broken. Seen by the consumer after publish().
  bool push(uint32_t imm) {
    if (tail_ - head_ > mask_ && !make_room()) return false;
    entries_[tail_ & mask_].store(imm, std::memory_order_relaxed);
    ++tail_;
    return true;
  }

  // Shows the consumer the pushed entries. True: it sleeps and has now got the entries that it
  // waits for, or says so; its doorbell is to be rung. Only one caller gets a true for each time it
  // went to sleep.
  //
  // The store of the tail, the load of wake_at here and their mirror image in ShmConsumer::arm()
  // are one total order: either this sees wake_at, or the consumer sees the tail. The store is a
  // locked instruction on x86, which also drains non-temporal stores of the payload.
  bool publish() {
    if (tail_ == published_) return false;
    published_ = tail_;
    ring_->tail.store(tail_, std::memory_order_seq_cst);
    uint64_t wake_at = ring_->wake_at.load(std::memory_order_seq_cst);
    if ((wake_at & kShmArmed) == 0) return false;
    if (static_cast<int32_t>(tail_ - static_cast<uint32_t>(wake_at)) < 0) return false;
    // If the consumer has changed it meanwhile, it has also looked at the tail again.
    return ring_->wake_at.compare_exchange_strong(wake_at, 0, std::memory_order_seq_cst);
  }

  bool broken() const { return broken_; }

 private:
  bool make_room() {
    if (broken_) return false;
    const uint32_t head = ring_->head.load(std::memory_order_acquire);
    const uint32_t used = tail_ - head;
    if (used > tail_ - head_) broken_ = true;  // backwards, or beyond the pushed entries
    if (broken_ || used > mask_) return false;
    head_ = head;
    return true;
  }

  ShmRing* ring_ = nullptr;
  std::atomic<uint32_t>* entries_ = nullptr;
  uint32_t mask_ = 0;
  uint32_t tail_ = 0;  // ours; the shared one lags behind until publish()
  uint32_t published_ = 0;
  uint32_t head_ = 0;  // the last one seen
  bool broken_ = false;
};

class ShmConsumer {
 public:
  ShmConsumer() = default;
  ShmConsumer(ShmRing* ring, uint32_t entries, uint32_t first = 0)
      : ring_(ring),
        entries_(ring->entries()),
        mask_(entries - 1),
        position_(first),
        seen_(first) {}

  // Takes up to out.size() entries, as arrivals of `pair`.
  size_t take(QueuePair pair, std::span<Arrival> out) {
    const size_t count = std::min<size_t>(available(std::memory_order_acquire), out.size());
    if (count == 0) return 0;
    for (size_t i = 0; i < count; ++i) {
      out[i] = {.queue = pair.queue,
                .rank = pair.rank,
                .imm = entries_[position_++ & mask_].load(std::memory_order_relaxed)};
    }
    ring_->head.store(position_, std::memory_order_release);
    return count;
  }

  // Asks for the doorbell once `count` more entries than were taken are there (at most the whole
  // ring: the producer cannot go beyond). arm() all rings, then ask satisfied() of each: true means
  // that nobody may ring any more.
  void arm(uint32_t count) {
    wanted_ = std::min(count, mask_ + 1);
    ring_->wake_at.store(wanted_ == 0 ? 0 : kShmArmed | (position_ + wanted_),
                         std::memory_order_seq_cst);
  }
  bool satisfied() {
    return wanted_ != 0 && (available(std::memory_order_seq_cst) >= wanted_ || broken_);
  }
  void disarm() { ring_->wake_at.store(0, std::memory_order_relaxed); }

  // The tail was where no producer puts it. Nothing is taken any more.
  bool broken() const { return broken_; }

 private:
  uint32_t available(std::memory_order order) {
    const uint32_t tail = ring_->tail.load(order);
    const uint32_t fresh = tail - position_;
    // A tail that goes backwards, or is further ahead than the ring is long, is a lie.
    if (fresh > mask_ + 1 || fresh < seen_ - position_) broken_ = true;
    if (broken_) return 0;
    seen_ = tail;
    return fresh;
  }

  ShmRing* ring_ = nullptr;
  std::atomic<uint32_t>* entries_ = nullptr;
  uint32_t mask_ = 0;
  uint32_t position_ = 0;  // entries that were taken; the shared head only tells the producer
  uint32_t seen_ = 0;      // the last tail
  uint32_t wanted_ = 0;
  bool broken_ = false;
};

}  // namespace phub
