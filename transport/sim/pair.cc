// What happens to a write between post() and poll(), and to all of them when a queue pair breaks.
#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/sim/transport.h"

namespace phub {
namespace {

SimSide other(SimSide side) { return side == kSimBox ? kSimWorker : kSimBox; }

bool fits(uint64_t offset, uint64_t bytes, uint64_t size) {
  return offset <= size && bytes <= size - offset;
}

}  // namespace

void SimPair::establish() {
  if (dead_ || established_) return;
  established_ = true;
  net_.trace("established", id_);
  for (SimSide side : {kSimBox, kSimWorker}) {
    if (ends_[side].endpoint != nullptr) ends_[side].endpoint->wake_if_armed(*this, true);
    make_room(side);
  }
}

bool SimPair::post(SimSide side, const Write& write) {
  End& end = ends_[side];
  PHUB_CHECK(fits(write.local_offset, write.bytes, end.source->size()));
  if (!established_) end.refused = true;
  if (!established_ || end.noticed) return false;
  if (end.unacknowledged == net_.options().send_depth) {
    end.refused = true;
    ++net_.stats().refused;
    return false;
  }
  ++end.unacknowledged;
  ++net_.stats().writes;
  // A sender learns that the other end is gone when its packets go unanswered.
  if (!dead_) {
    end.posted.push_back(write);
  } else if (near_) {
    notice(side, net_.some_delay());
  } else if (!net_.options().shared_memory) {
    notice(side, net_.options().retransmit_ns * net_.options().retry_limit);
  }
  return true;
}

void SimPair::flush(SimSide side) {
  End& end = ends_[side];
  while (!end.posted.empty()) {
    launch(side, end.posted.front());
    end.posted.pop_front();
  }
}

void SimPair::launch(SimSide side, const Write& write) {
  End& end = ends_[side];
  const uint64_t now = net_.now_ns();
  const bool in_order = near_ || !net_.random().chance(net_.options().overtake);
  const uint64_t previous = in_order ? std::max(end.last_arrival, now) : now;
  const uint64_t flight = near_ ? net_.some_delay() : net_.flight_ns();
  const uint64_t number = end.launched++;
  auto self = shared_from_this();
  end.in_flight.push_back({write, number});
  if (flight == SimNet::kLost) {
    // Packets behind a lost one that keep their order are not taken before the break.
    const uint64_t lost = previous + net_.options().retransmit_ns * net_.options().retry_limit;
    if (in_order) end.last_arrival = lost;
    net_.after(lost - now, [self] { self->break_now(); });
    return;
  }
  const uint64_t arrival = std::max(previous + 1, now + flight);
  if (in_order) end.last_arrival = arrival;
  if (near_ && side == kSimBox) land_part(write, side, write.bytes);  // before it is announced
  if (!near_ && write.bytes > 0 && net_.random().chance(net_.options().early)) {
    const uint64_t early = net_.random().between(previous, arrival);
    const size_t bytes = net_.random().between(1, write.bytes);
    if (early > previous && early < arrival) {
      net_.after(early - now, [self, write, side, bytes] {
        if (!self->dead_) self->land_part(write, side, bytes);
      });
    }
  }
  net_.after(arrival - now, [self, side, number] { self->land(side, number); });
}

bool SimPair::lands_inside(const Write& write, SimSide from) const {
  const SimMemory& target = ends_[other(from)].target;
  return target == nullptr || fits(write.remote_offset, write.bytes, target->size());
}

void SimPair::land_part(const Write& write, SimSide from, size_t bytes) {
  const End& end = ends_[from];
  const SimMemory& target = ends_[other(from)].target;
  if (target == nullptr || !lands_inside(write, from) || ends_[other(from)].windowed) return;
  std::memcpy(target->data() + write.remote_offset, end.source->data() + write.local_offset, bytes);
}

void SimPair::land(SimSide from, uint64_t number) {
  if (dead_) return;
  End& end = ends_[from];
  const auto at = std::ranges::find(end.in_flight, number, &Flying::number);
  const auto overtaken = static_cast<uint64_t>(at - end.in_flight.begin());
  const Write write = *at;
  end.in_flight.erase(at);
  if (overtaken > 0) {
    ++net_.stats().overtakes;
    net_.trace("overtakes", id_, overtaken, write.imm);
  }
  if (!lands_inside(write, from)) {
    break_now();  // remote access error
    return;
  }
  arrive(from, write);
  auto self = shared_from_this();
  if (!near_ && net_.random().chance(net_.options().duplicate)) {
    ++net_.stats().duplicates;
    net_.after(net_.some_delay(), [self] { self->net_.trace("duplicate filtered", self->id_); });
  }
  if (!net_.options().shared_memory && !near_) {
    net_.after(net_.some_delay(), [self, from] { self->acknowledge(from); });
  }
}

void SimPair::arrive(SimSide from, const Write& write) {
  if (!near_) land_part(write, from, write.bytes);
  ++net_.stats().delivered;
  net_.stats().near_writes += near_;
  const bool taken = from == kSimBox && decode(write.imm).kind == ImmKind::kInitial;
  net_.stats().taken += taken && net_.options().shared_slots;
  net_.trace(from == kSimWorker ? "to box" : "to worker", id_, write.imm, write.bytes);
  net_.trace_bytes(std::span(*ends_[from].source).subspan(write.local_offset, write.bytes));
  End& receiver = ends_[other(from)];
  Arrival arrival{.queue = receiver.name.queue, .rank = receiver.name.rank, .imm = write.imm};
  if (receiver.target != nullptr) {
    arrival.bytes = write.bytes;
    arrival.offset = write.remote_offset;
  }
  receiver.inbox.push_back({arrival, write.local_offset, {}});
  if (receiver.windowed && !near_) {
    const auto payload = ends_[from].source->begin() + static_cast<ptrdiff_t>(write.local_offset);
    receiver.inbox.back().payload.assign(payload, payload + write.bytes);
  }
  if (receiver.endpoint != nullptr) receiver.endpoint->wake_if_armed(*this, false);
}

void SimPair::acknowledge(SimSide side) {
  End& end = ends_[side];
  if (end.unacknowledged > 0) --end.unacknowledged;
  make_room(side);
}

// Whoever is about to sleep is told, too.
void SimPair::make_room(SimSide side) {
  End& end = ends_[side];
  if (!std::exchange(end.refused, false)) return;
  end.has_room = true;
  if (end.endpoint != nullptr) end.endpoint->wake_if_armed(*this, true);
}

void SimPair::taken(SimSide side, const Arrived& arrived) {
  const Arrival& arrival = arrived.arrival;
  if (!arrival.ok) {
    ends_[side].noticed = true;
    return;
  }
  if (near_ && side == kSimBox) {  // which copies it now
    land_part({.local_offset = arrived.source,
               .remote_offset = arrival.offset,
               .bytes = static_cast<uint32_t>(arrival.bytes)},
              kSimWorker, arrival.bytes);
  }
  // Room in a ring, or a socket of one host, is made by its reader.
  if (net_.options().shared_memory || near_) acknowledge(other(side));
}

// Decides what becomes of everything in flight: some arrives, some only lands, the rest is gone.
void SimPair::settle(SimSide from, bool immediates) {
  End& end = ends_[from];
  SimRandom& random = net_.random();
  const size_t n = end.in_flight.size();
  for (size_t i = n; net_.options().overtake > 0 && !near_ && i > 1; --i) {
    std::swap(end.in_flight[i - 1], end.in_flight[random.below(i)]);
  }
  const size_t arriving = immediates ? random.below(n + 1) : 0;
  const size_t landing = arriving + random.below(n - arriving + 1);
  for (size_t i = 0; i < landing; ++i) {
    const Write& write = end.in_flight[i];
    if (!lands_inside(write, from)) break;
    if (i < arriving) {
      arrive(from, write);
    } else if (!near_) {
      const bool last = i + 1 == landing;
      land_part(write, from, last ? random.below(write.bytes + 1) : write.bytes);
    }
  }
  net_.trace("settled", id_, arriving, landing);
  end.in_flight.clear();
  end.posted.clear();
}

void SimPair::break_now() {
  if (!whole() || net_.options().shared_memory) return;
  ++net_.stats().breaks;
  settle(kSimBox, true);
  settle(kSimWorker, true);
  dead_ = true;
  net_.trace("broken", id_);
  notice(kSimBox, net_.some_delay());
  notice(kSimWorker, net_.some_delay());
}

void SimPair::close(SimSide side) {
  End& end = ends_[side];
  if (!dead_) {
    settle(other(side), false);
    settle(side, true);
    dead_ = true;
    net_.trace("closed", id_, side);
    if (!net_.options().shared_memory) notice(other(side), net_.some_delay());
  }
  end.closed = true;
  end.endpoint = nullptr;
  end.inbox.clear();
}

void SimPair::crash(bool silent) {
  if (!dead_) {
    settle(kSimWorker, true);
    ends_[kSimBox].in_flight.clear();
    ends_[kSimBox].posted.clear();
    dead_ = true;
    net_.trace("crashed", id_, silent);
    // Without a packet of its own to miss an answer to, the box may never notice, unless it is on
    // the worker's host.
    const bool noticed =
        near_ || (!silent && !net_.options().shared_memory && net_.random().chance(0.5));
    if (noticed) notice(kSimBox, net_.some_delay());
  }
  ends_[kSimWorker].closed = true;
  ends_[kSimWorker].endpoint = nullptr;
  ends_[kSimWorker].inbox.clear();
}

void SimPair::notice(SimSide side, uint64_t delay_ns) {
  if (ends_[side].noticing) return;
  ends_[side].noticing = true;
  net_.after(delay_ns, [self = shared_from_this(), side] {
    End& end = self->ends_[side];
    if (end.closed) return;
    self->net_.trace("noticed", self->id_, side);
    end.inbox.push_back({{.queue = end.name.queue, .rank = end.name.rank, .ok = false}});
    if (end.endpoint != nullptr) end.endpoint->wake_if_armed(*self, true);
  });
}

}  // namespace phub
