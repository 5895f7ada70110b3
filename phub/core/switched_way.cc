#include "phub/core/switched_way.h"

#include <algorithm>

namespace phub {

// Takes packets once a pass, then one chunk with a sum after another.
template <class Base>
uint32_t Switched<Base>::take_in(uint64_t& bytes) {
  if (!polled_) bytes += intake_->poll() * (kHandling + sizeof(SwitchPacket));
  polled_ = true;
  for (uint32_t index = intake_->next_closed(); index != kNoChunk; index = intake_->next_closed()) {
    if (accept_sum(index)) return index;
  }
  polled_ = false;
  if (intake_->ended()) {
    if (!end_reported_) report_end();
    begin_again();
  }
  return kNoChunk;
}

// Connections that are broken just now do not matter: their ranks' contributions have come.
template <class Base>
bool Switched<Base>::accept_sum(uint32_t index) {
  const CoreChunk& chunk = stages_.table[index];
  if (chunk.arrived > 0 || static_cast<uint32_t>(chunk.round) != intake_->round(index)) {
    intake_->end("a sum is of another round than the job");
    return false;
  }
  summed_.insert(index);
  for (uint32_t rank = 0; rank < intake_->ranks(); ++rank) {
    const ImmKind kind = rank == 0 ? ImmKind::kData : ImmKind::kNull;
    ++stages_.table.rank(rank).arrivals;
    Base::accept(rank, index, {.round = low8(chunk.round), .kind = kind});
  }
  return true;
}

template <class Base>
void Switched<Base>::took_directly(uint32_t rank, uint32_t index) {
  if (intake_->takes(index, stages_.table[index].round)) {
    intake_->end("a rank sends directly", rank);
  }
}

template <class Base>
Way::Closed Switched<Base>::close(uint32_t index) {
  if (!summed_.contains(index)) return Base::close(index);
  const MadeSum sum{intake_->sums(index), intake_->exponent(index)};
  stages_.reducer.take_sum(&sum);
  const Way::Closed closed = Base::close(index);
  stages_.reducer.take_sum(nullptr);
  if (closed == Way::Closed::kNotNow) return closed;
  intake_->begin_next(index);
  summed_.erase(index);
  return closed;
}

template <class Base>
uint64_t Switched<Base>::highest_of_stream() const {
  uint64_t round = 0;
  for (const uint32_t index : intake_->stream())
    round = std::max(round, stages_.table[index].round);
  return round;
}

template <class Base>
CoreReport& Switched<Base>::report_end() {
  end_reported_ = true;
  stages_.outbox.announce(SwitchBeginning());  // ranks need no longer learn of it
  intake_->wait_from(highest_of_stream());
  CoreReport& report = stages_.reports.add(CoreReport::kSwitchEnded, intake_->why_rank());
  report.why = intake_->why();
  return report;
}

template <class Base>
void Switched<Base>::begin_again() {
  if (stages_.table[intake_->stream().front()].round < intake_->waits_until()) return;
  if (!stages_.reports.empty()) return;  // there is room for one end and one beginning
  const uint64_t round = highest_of_stream() + 1;
  intake_->wait_until(round);  // to look again
  if (!may_begin(round)) return;
  intake_->begin_again(round);
  stages_.outbox.announce(SwitchBeginning{intake_->generation(), round});
  end_reported_ = false;
  stages_.reports.add(CoreReport::kSwitchBegun, CoreReport::kNoRank).round = round;
}

// All ranks that the switch adds are there, and no others; every sum of the generation before is
// closed; and no chunk lags, as one of a key that is not pushed in every round: the others would
// wait for it.
template <class Base>
bool Switched<Base>::may_begin(uint64_t round) const {
  const ChunkTable& table = stages_.table;
  for (const uint32_t index : intake_->stream()) {
    const CoreChunk& chunk = table[index];
    if (chunk.round == 0 || summed_.contains(index) || chunk.round + 2 < round) return false;
  }
  for (uint32_t r = 0; r < table.max_ranks(); ++r) {
    const CoreRank& rank = table.rank(r);
    const bool is_there = rank.attached && !rank.broken && rank.unheard == 0 &&
                          rank.first_round <= round && rank.results_from != kNever;
    const bool is_away = !rank.attached && rank.first_round == kNever;
    if (r < intake_->ranks() ? !is_there : !is_away) return false;
  }
  return true;
}

template <class Base>
void Switched<Base>::hold(CoreReport& held) {
  intake_->for_each_begun(
      [&](uint32_t index) { held.started = std::max(held.started, stages_.table[index].round); });
}

// All ranks are there from the beginning of a generation to its end; at that of the first they come
// one after another.
template <class Base>
void Switched<Base>::begin_boundary(const Boundary& boundary) {
  const auto changes = [this](const Boundary::Admitted& admitted) {
    return admitted.rank >= intake_->ranks() || intake_->generation() > 0 ||
           admitted.first_round != intake_->first_round();
  };
  if (boundary.lost.empty() && boundary.forgotten.empty() &&
      std::ranges::none_of(boundary.admitted, changes)) {
    return;
  }
  intake_->end("the job's ranks have changed");
  if (!end_reported_) report_end().said = 1;
}

template <class Base>
void Switched<Base>::probe(Probe& out) {
  out.switch_chunks = intake_->chunks();
  const size_t ranks = std::min<size_t>(out.parts.size(), intake_->ranks());
  for (uint32_t r = 0; r < ranks; ++r) out.parts[r] = intake_->heard(r);
  intake_->for_each_lacking([&](uint32_t index, uint64_t lacking) {
    const CoreChunk& chunk = stages_.table[index];
    out.add(chunk.id, chunk.round, 0, lacking);
  });
}

template class Switched<LockStep>;
template class Switched<Gated>;

}  // namespace phub
