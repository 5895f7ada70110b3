#include "phub/control/connected_rank.h"

#include <algorithm>
#include <utility>

namespace phub {

ConnectedRank::ConnectedRank(HttpShared& shared, const HttpPeer& peer)
    : shared_(shared), peer_(peer) {
  shared_.ranks.insert(this);
}

ConnectedRank::~ConnectedRank() { shared_.ranks.erase(this); }

void ConnectedRank::asked(Routed routed) {
  if (routed.beats) beats_ = std::move(routed.beats);
  waits_ = std::move(routed.waits);
}

void ConnectedRank::closed() {
  if (!beats_ || shared_.handler == nullptr) return;
  if (peer_.broken && peer_.broken->load()) return;
  const Credential who = *std::exchange(beats_, {});
  const auto beats_too = [&](const ConnectedRank* other) {
    return other->beats_ && other->beats_->job == who.job && other->beats_->rank == who.rank &&
           other->beats_->incarnation == who.incarnation && other->beats_->ticket == who.ticket;
  };
  if (std::ranges::none_of(shared_.ranks, beats_too)) shared_.handler->connection_ended(who);
}

void ConnectedRank::waits_no_more() {
  const std::optional<Credential> who = std::exchange(waits_, {});
  if (who && shared_.handler != nullptr) shared_.handler->leave_barrier(*who);
}

}  // namespace phub
