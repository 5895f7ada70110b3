#include "worker/geeps/moves.h"

#include <algorithm>
#include <limits>

#include "transport/error.h"
#include "worker/device/arena.h"

namespace phub::geeps {

namespace {

bool is_fetched(const Access& access) {
  return access.kind == AccessKind::kLocal ? access.fetch : access.kind == AccessKind::kRead;
}
bool is_saved(const Access& access) {
  return access.kind == AccessKind::kLocal ? access.save : access.kind == AccessKind::kUpdate;
}

}  // namespace

Lifetimes lifetimes(const Demand& demand, const Leads& leads) {
  Lifetimes lives;
  lives.reserve(demand.accesses.size());
  for (uint32_t i = 0; i < demand.accesses.size(); ++i) {
    const Access& access = demand.accesses[i];
    const uint32_t length = live_phases(access, demand.phases);
    lives.push_back({i, {}, {access.first_phase, length, buffer_bytes(demand, access)}});
    if (!access.again) continue;
    if (access.first_phase - demand.accesses[*access.again].last_phase > leads[i].before + 1)
      continue;
    const uint32_t owner = lives[*access.again].owner;
    lives[i].owner = owner;
    lives[owner].span.length = access.last_phase - demand.accesses[owner].first_phase + 1;
  }
  for (uint32_t i = 0; i < lives.size(); ++i) {
    Lifetime& life = lives[i];
    if (life.owner != i) continue;
    const Access& access = demand.accesses[i];
    const uint32_t room = demand.phases - life.span.length;
    life.lead.before = is_fetched(access) ? std::min(leads[i].before, room) : 0;
    life.lead.after = is_saved(access) ? std::min(leads[i].after, room - life.lead.before) : 0;
    life.span.first_phase = (access.first_phase + demand.phases - life.lead.before) % demand.phases;
    life.span.length += life.lead.before + life.lead.after;
  }
  return lives;
}

uint32_t moves_of(const Access& access) {
  return (is_fetched(access) ? 1 : 0) + (is_saved(access) ? 1 : 0);
}

uint64_t buffer_bytes(const Demand& demand, const Access& access) {
  uint64_t bytes = 0;
  for (const BatchPart& part : demand.batches[access.batch].parts) bytes += part.bytes;
  return Arena::charge(bytes);
}

uint64_t moved_bytes(const Demand& demand, const Pins& pins, const Lifetimes& lives) {
  uint64_t moved = 0;
  for_moves(demand, lives, [&](uint32_t, const BatchPart& part, uint64_t bytes) {
    if (!pins[part.entry]) moved += bytes;
  });
  return moved;
}

Costs::Costs(const Demand& demand, const Lifetimes& lives)
    : pin_bytes_(demand.entries.size()), saved_bytes_(demand.entries.size()) {
  for (size_t i = 0; i < demand.entries.size(); ++i) {
    const Entry& entry = demand.entries[i];
    pin_bytes_[i] = Arena::charge(entry.bytes) + Arena::charge(entry.log_bytes);
  }
  for (const Batch& batch : demand.batches) {
    for (const BatchPart& part : batch.parts) {
      pin_bytes_[part.entry] += Arena::charge(index_bytes(batch, part));
    }
  }
  for_moves(demand, lives, [&](uint32_t, const BatchPart& part, uint64_t bytes) {
    saved_bytes_[part.entry] += bytes;
  });
  for (uint32_t entry = 0; entry < demand.entries.size(); ++entry) {
    if (saved_bytes_[entry] > 0) by_density_.push_back(entry);
  }
  std::stable_sort(by_density_.begin(), by_density_.end(),
                   [&](uint32_t a, uint32_t b) { return density(a) > density(b); });
}

double Costs::density(uint32_t entry) const {
  return static_cast<double>(saved_bytes_[entry]) / static_cast<double>(pin_bytes_[entry]);
}

uint64_t index_bytes(const Batch& batch, const BatchPart& part) {
  if (batch.in_place) return 0;
  // Rows of the entry and, unless they are all of the batch, their positions.
  return part.rows * sizeof(uint32_t) * (batch.parts.size() > 1 ? 2 : 1);
}

uint32_t live_phases(const Access& access, uint32_t phases) {
  return (access.last_phase + phases - access.first_phase) % phases + 1;
}

uint32_t longest_lead(const Access& access, uint32_t phases) {
  return phases - live_phases(access, phases);
}

bool needs_buffer(const Demand& demand, const Access& access, const Pins& pins) {
  const Batch& batch = demand.batches[access.batch];
  return !batch.parts.empty() && !(batch.in_place && pins[batch.parts[0].entry]);
}

namespace {

bool covers(const Span& span, uint32_t phase, uint32_t phases) {
  return (phase + phases - span.first_phase) % phases < span.length;
}

// Finds the order of pinning, with the bytes of the buffers that are live in each phase.
class Chain {
 public:
  Chain(const Demand& demand, const Costs& costs, const Lifetimes& lives)
      : demand_(demand), costs_(costs), pins_(demand.entries.size()), own_(demand.entries.size()) {
    const Buffers buffers = buffers_of(demand, pins_, lives);
    live_ = loads(buffers.spans, demand.phases);
    for (size_t i = 0; i < buffers.spans.size(); ++i) {
      const Batch& batch = demand.batches[demand.accesses[buffers.accesses[i]].batch];
      if (batch.in_place) own_[batch.parts[0].entry].push_back(buffers.spans[i]);
    }
  }

  std::vector<uint32_t> peak_first() {
    std::vector<uint32_t> moves;
    const auto move = [&](uint32_t entry) {
      moves.push_back(entry);
      pins_[entry] = true;
      subtract(entry, live_);
    };
    const auto count = static_cast<uint32_t>(own_.size());
    const auto at_peak = [&] {
      const auto peak = std::max_element(live_.begin(), live_.end());
      const auto phase = static_cast<uint32_t>(peak - live_.begin());
      uint32_t entry = 0;
      while (entry < count && (pins_[entry] || !is_at(entry, phase))) ++entry;
      return entry;
    };
    for (uint32_t entry = at_peak(); entry < count; entry = at_peak()) move(entry);
    for (const bool local : {true, false}) {
      for (uint32_t entry = 0; entry < count; ++entry) {
        if (!pins_[entry] && demand_.entries[entry].local == local) move(entry);
      }
    }
    return moves;
  }

  std::vector<uint32_t> run() {
    std::vector<uint32_t> moves;
    while (true) {
      const Move move = best();
      if (move.entry == kNone) return moves;
      moves.push_back(move.entry);
      pins_[move.entry] = true;
      subtract(move.entry, live_);
    }
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Move {
    uint32_t entry = kNone;
    double worth = 0;  // bytes saved per byte of memory; infinite if it frees memory
  };

  Move best() {
    Move best;
    const auto peak = std::max_element(live_.begin(), live_.end());
    const auto phase = static_cast<uint32_t>(peak - live_.begin());
    for (uint32_t entry = 0; entry < own_.size(); ++entry) {
      if (pins_[entry] || !is_at(entry, phase)) continue;
      const double worth = worth_at_peak(entry, *peak);
      if (worth > best.worth) best = {entry, worth};
    }
    while (next_ < costs_.by_density().size() && pins_[costs_.by_density()[next_]]) ++next_;
    if (next_ < costs_.by_density().size()) {
      const uint32_t entry = costs_.by_density()[next_];
      if (costs_.density(entry) > best.worth) best = {entry, costs_.density(entry)};
    }
    return best;
  }

  bool is_at(uint32_t entry, uint32_t phase) const {
    return std::any_of(own_[entry].begin(), own_[entry].end(),
                       [&](const Span& span) { return covers(span, phase, demand_.phases); });
  }

  double worth_at_peak(uint32_t entry, uint64_t peak) const {
    std::vector<uint64_t> without = live_;
    subtract(entry, without);
    const uint64_t freed = peak - *std::max_element(without.begin(), without.end());
    const uint64_t cost = costs_.pin_bytes(entry);
    if (freed >= cost) return std::numeric_limits<double>::infinity();
    return static_cast<double>(costs_.saved_bytes(entry)) / static_cast<double>(cost - freed);
  }

  void subtract(uint32_t entry, std::vector<uint64_t>& live) const {
    const std::vector<uint64_t> own = loads(own_[entry], demand_.phases);
    for (size_t phase = 0; phase < live.size(); ++phase) live[phase] -= own[phase];
  }

  const Demand& demand_;
  const Costs& costs_;
  Pins pins_;
  std::vector<std::vector<Span>> own_;  // by entry: the buffers that its pinning removes
  std::vector<uint64_t> live_;
  size_t next_ = 0;  // in by_density()
};

}  // namespace

Buffers buffers_of(const Demand& demand, const Pins& pins, const Lifetimes& lives) {
  Buffers buffers;
  for (uint32_t i = 0; i < lives.size(); ++i) {
    if (lives[i].owner != i || lives[i].span.bytes == 0) continue;
    if (!needs_buffer(demand, demand.accesses[i], pins)) continue;
    buffers.accesses.push_back(i);
    buffers.spans.push_back(lives[i].span);
  }
  return buffers;
}

std::vector<uint32_t> order_of_moves(const Demand& demand, const Costs& costs,
                                     const Lifetimes& lives) {
  return Chain(demand, costs, lives).run();
}

std::vector<uint32_t> peak_first_order(const Demand& demand, const Costs& costs,
                                       const Lifetimes& lives) {
  return Chain(demand, costs, lives).peak_first();
}

void check(const Demand& demand) {
  const auto require = [](bool holds, const char* what, size_t number) {
    if (!holds) fail(ErrorCode::kInvalid, "demand on device memory: {} {}", what, number);
  };
  require(demand.phases > 0, "phases:", demand.phases);
  for (size_t i = 0; i < demand.batches.size(); ++i) {
    const Batch& batch = demand.batches[i];
    for (const BatchPart& part : batch.parts) {
      require(part.entry < demand.entries.size(), "an unknown entry in batch", i);
      require(part.bytes == demand.entries[part.entry].bytes, "part of an entry in batch", i);
    }
    if (!batch.in_place) continue;
    require(batch.parts.size() == 1 && demand.entries[batch.parts[0].entry].local,
            "in place, but not one entry of local data: batch", i);
  }
  std::vector<bool> named(demand.accesses.size());
  for (size_t i = 0; i < demand.accesses.size(); ++i) {
    const Access& access = demand.accesses[i];
    require(access.batch < demand.batches.size(), "an unknown batch in access", i);
    require(access.first_phase < demand.phases && access.last_phase < demand.phases,
            "an unknown phase in access", i);
    if (access.again) {
      const bool is_free = *access.again < i && !named[*access.again];
      require(is_free, "`again` names a later access, or one that is named twice, in access", i);
      named[*access.again] = true;
      const Access& before = demand.accesses[*access.again];
      const bool is_same = access.kind == AccessKind::kRead && before.kind == AccessKind::kRead &&
                           before.batch == access.batch;
      require(is_same, "`again` names another call or batch in access", i);
      const bool in_order = before.first_phase <= before.last_phase &&
                            before.last_phase < access.first_phase &&
                            access.first_phase <= access.last_phase;
      require(in_order, "`again` names a read that is not released before access", i);
    }
    for (const BatchPart& part : demand.batches[access.batch].parts) {
      require(demand.entries[part.entry].local == (access.kind == AccessKind::kLocal),
              "parameters and local data are confused in access", i);
    }
  }
}

}  // namespace phub::geeps
