#include "worker/geeps/placement.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "transport/error.h"
#include "worker/device/arena.h"
#include "worker/geeps/moves.h"
#include "worker/geeps/packing.h"

namespace phub::geeps {
namespace {

constexpr size_t kManyAccesses = 4000;  // with so many, one plan takes a second
constexpr size_t kEffort = 500'000;     // bounds the accesses visited by lengthen_each()

// Shared by layouts that differ only in the pinned entries.
struct Timing {
  Leads leads;
  Lifetimes lives;  // with these leads
};
using SharedTiming = std::shared_ptr<const Timing>;

// The pinned entries, and the places of the other entries' buffers in the pool.
struct Layout {
  Pins pins;
  SharedTiming timing;
  std::vector<uint64_t> offsets;  // by access; unused without a buffer
  uint64_t pinned = 0;            // bytes of entries, logs and indexes
  uint64_t height = 0;            // of the pool
  uint64_t saved = 0;
  uint32_t lead = 0;  // of all accesses that have room for it

  uint64_t needed() const { return pinned + height; }
};

SharedTiming timing_of(const Demand& demand, Leads leads) {
  Lifetimes lives = lifetimes(demand, leads);
  return std::make_shared<const Timing>(Timing{std::move(leads), std::move(lives)});
}

SharedTiming timing_of(const Demand& demand, uint32_t lead) {
  Leads leads;
  for (const Access& access : demand.accesses) {
    leads.push_back({std::min(lead, longest_lead(access, demand.phases)), std::min(lead, 1U)});
  }
  return timing_of(demand, std::move(leads));
}

uint64_t most_live(const Demand& demand, const Buffers& buffers) {
  const auto live = loads(buffers.spans, demand.phases);
  return *std::max_element(live.begin(), live.end());
}

// Plans with one lead for all accesses.
class Planner {
 public:
  Planner(const Demand& demand, uint32_t lead, bool peak_first)
      : demand_(demand),
        timing_(timing_of(demand, lead)),
        costs_(demand, timing_->lives),
        peak_first_(peak_first),
        moves_(peak_first ? peak_first_order(demand, costs_, timing_->lives)
                          : order_of_moves(demand, costs_, timing_->lives)) {}

  // Of all states on the way from no pinned entry to all, the one that needs the least memory.
  Layout smallest() const {
    std::optional<Layout> best;
    for (Layout& layout : states()) {
      if (best && best->needed() == 0) break;
      if (pack_buffers(layout, best ? best->needed() - 1 : UINT64_MAX)) best = std::move(layout);
    }
    return *best;
  }

  // Of all states that fit, filled, the one that saves most, or with peak_first the last; nothing
  // if none fits.
  std::optional<Layout> best(uint64_t budget) const {
    std::vector<Layout> all = states();
    std::optional<Layout> best;
    for (auto state = all.rbegin(); state != all.rend(); ++state) {
      const uint64_t least = state->pinned + most_live(demand_, buffers(*state));
      if (least > budget) continue;
      if (best && peak_first_) break;
      if (best && state->saved + most_saved(state->pins, budget - least) <= best->saved) continue;
      if (!pack_buffers(*state, budget)) continue;
      fill(*state, budget);
      if (!best || state->saved > best->saved) best = std::move(*state);
    }
    return best;
  }

  // Pins more entries, as long as they fit. The pool stays as it is, so that a larger budget never
  // saves less.
  void fill(Layout& layout, uint64_t budget) const {
    for (const uint32_t entry : peak_first_ ? moves_ : costs_.by_density()) {
      if (layout.pins[entry] || layout.needed() + costs_.pin_bytes(entry) > budget) continue;
      pin(layout, entry);
    }
  }

  // Packs again, without buffers that are no longer needed, unless the result is worse.
  void repack(Layout& layout) const { pack_buffers(layout, layout.needed()); }

  // Gives all accesses longer leads, as long as they fit.
  void lengthen(Layout& layout, uint32_t max_lead, uint64_t budget) const {
    for (uint32_t lead = layout.lead + 1; lead <= max_lead; ++lead) {
      Layout longer = layout;
      longer.timing = timing_of(demand_, lead);
      if (longer.timing->leads == layout.timing->leads) return;
      if (!pack_buffers(longer, budget)) return;
      longer.lead = lead;
      layout = std::move(longer);
    }
  }

  // Gives single buffers longer leads, the largest first, one phase at a time.
  void lengthen_each(Layout& layout, uint32_t max_lead, uint64_t budget) const {
    const Buffers all = buffers(layout);
    std::vector<size_t> order(all.spans.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return all.spans[a].bytes > all.spans[b].bytes; });
    size_t tries = kEffort / std::max<size_t>(1, order.size());
    for (uint32_t lead = 2; lead <= max_lead; ++lead) {
      for (const size_t i : order) {
        const uint32_t access = all.accesses[i];
        for (uint32_t Lead::*side : {&Lead::before, &Lead::after}) {
          Leads leads = layout.timing->leads;
          if (leads[access].*side != lead - 1) continue;
          if (tries-- == 0) return;
          leads[access].*side = lead;
          Layout longer = layout;
          longer.timing = timing_of(demand_, std::move(leads));
          if (buffers(longer).spans == buffers(layout).spans) continue;
          if (pack_buffers(longer, budget)) layout = std::move(longer);
        }
      }
    }
  }

  // Gives a lead of 1 to as many accesses as fit. Buffers that begin in the fullest phases lose
  // theirs first, the largest first; then the accesses that keep their rows.
  void shorten(Layout& layout, uint64_t budget) const {
    layout.timing = timing_of(demand_, 1);
    while (true) {
      const Buffers all = buffers(layout);
      const auto live = loads(all.spans, demand_.phases);
      if (pack_buffers(layout, budget)) return;
      std::optional<size_t> worst;
      const auto weight = [&](size_t i) {
        return std::pair(live[all.spans[i].first_phase], all.spans[i].bytes);
      };
      auto [leads, lives] = *layout.timing;
      std::vector<bool> has_lead(leads.size());
      for (size_t i = 0; i < leads.size(); ++i) {
        if (leads[i] != Lead{}) has_lead[lives[i].owner] = true;
      }
      for (size_t i = 0; i < all.spans.size(); ++i) {
        if (!has_lead[all.accesses[i]]) continue;
        if (!worst || weight(i) > weight(*worst)) worst = i;
      }
      PHUB_CHECK(worst.has_value());  // without any lead it fits
      const uint32_t owner = all.accesses[*worst];
      const bool has_own = std::exchange(leads[owner], Lead{}) != Lead{};
      for (size_t i = 0; i < lives.size() && !has_own; ++i) {
        if (lives[i].owner == owner) leads[i] = {};
      }
      layout.timing = timing_of(demand_, std::move(leads));
    }
  }

  // The access with the largest buffer in the fullest phase.
  const Access* fullest(const Layout& layout) const {
    const Buffers all = buffers(layout);
    const auto live = loads(all.spans, demand_.phases);
    const auto phase =
        static_cast<uint32_t>(std::max_element(live.begin(), live.end()) - live.begin());
    const Access* largest = nullptr;
    uint64_t bytes = 0;
    for (size_t i = 0; i < all.spans.size(); ++i) {
      const Span& span = all.spans[i];
      const bool is_live =
          (phase + demand_.phases - span.first_phase) % demand_.phases < span.length;
      if (!is_live || span.bytes <= bytes) continue;
      bytes = span.bytes;
      largest = &demand_.accesses[all.accesses[i]];
    }
    return largest;
  }

 private:
  Buffers buffers(const Layout& layout) const {
    return buffers_of(demand_, layout.pins, layout.timing->lives);
  }

  void pin(Layout& layout, uint32_t entry) const {
    layout.pins[entry] = true;
    layout.pinned += costs_.pin_bytes(entry);
    layout.saved += costs_.saved_bytes(entry);
  }

  // False, and no change: it would need more than `most` bytes.
  bool pack_buffers(Layout& layout, uint64_t most) const {
    if (layout.pinned > most) return false;
    const Buffers all = buffers(layout);
    const std::optional<Packing> packing = pack(all.spans, demand_.phases, most - layout.pinned);
    if (!packing) return false;
    layout.height = packing->height;
    layout.offsets.assign(demand_.accesses.size(), 0);
    for (size_t i = 0; i < all.accesses.size(); ++i) {
      layout.offsets[all.accesses[i]] = packing->offsets[i];
    }
    const Lifetimes& lives = layout.timing->lives;
    for (size_t i = 0; i < lives.size(); ++i) layout.offsets[i] = layout.offsets[lives[i].owner];
    return true;
  }

  // From no pinned entry to all of them, pinned one by one; not packed.
  std::vector<Layout> states() const {
    std::vector<Layout> states;
    states.push_back({.pins = Pins(demand_.entries.size()), .timing = timing_});
    for (const uint32_t entry : moves_) {
      states.push_back(states.back());
      pin(states.back(), entry);
    }
    return states;
  }

  // An upper bound of what `bytes` can save: entries may be split.
  uint64_t most_saved(const Pins& pins, uint64_t bytes) const {
    uint64_t saved = 0;
    for (const uint32_t entry : costs_.by_density()) {
      if (pins[entry]) continue;
      const uint64_t cost = costs_.pin_bytes(entry);
      if (cost > bytes) {
        return saved + static_cast<uint64_t>(costs_.density(entry) * static_cast<double>(bytes)) +
               1;
      }
      saved += costs_.saved_bytes(entry);
      bytes -= cost;
    }
    return saved;
  }

  const Demand& demand_;
  SharedTiming timing_;  // with the planner's lead
  Costs costs_;
  bool peak_first_;
  std::vector<uint32_t> moves_;  // the order in which entries are pinned
};

// The cost of background copies for the application, in bytes. The later a copy gets its memory,
// the longer the application waits for it: pinning saves copies, a larger pool gives them time. The
// factor was found by measuring.
double cost_of_moves(const Demand& demand, const Layout& layout) {
  const Lifetimes& lives = layout.timing->lives;
  double cost = 0;
  for_moves(demand, lives, [&](uint32_t access, const BatchPart& part, uint64_t bytes) {
    if (layout.pins[part.entry]) return;
    const uint32_t before = lives[access].lead.before;
    const uint32_t lead = before > 0 ? before : layout.lead;
    cost += static_cast<double>(bytes) * (1 + 1.0 / lead);
  });
  return cost;
}

// The cheapest of the best layouts with each lead; nothing if none fits.
std::optional<Layout> cheapest(const Demand& demand, uint32_t max_lead, uint64_t budget,
                               bool peak_first) {
  std::optional<Layout> cheapest;
  double least = 0;
  const uint32_t tried = demand.accesses.size() > kManyAccesses ? 1 : max_lead;
  for (uint32_t lead = 1; lead <= std::max(1U, tried); ++lead) {
    const Planner planner(demand, lead, peak_first);
    std::optional<Layout> layout = planner.best(budget);
    if (!layout) break;
    layout->lead = lead;
    planner.repack(*layout);
    planner.lengthen(*layout, max_lead, budget);
    planner.lengthen_each(*layout, max_lead, budget);
    const double cost = cost_of_moves(demand, *layout);
    if (cheapest && cost >= least) continue;
    least = cost;
    cheapest = std::move(layout);
  }
  return cheapest;
}

const char* name_of(AccessKind kind) {
  switch (kind) {
    case AccessKind::kRead:
      return "Read";
    case AccessKind::kUpdate:
      return "PreUpdate";
    case AccessKind::kLocal:
      return "LocalAccess";
  }
  return "";
}

[[noreturn]] void refuse(const Demand& demand, const Planner& planner, const Layout& smallest,
                         const PlacementOptions& options) {
  const uint64_t needed = smallest.needed() + options.reserved_bytes;
  const Access* access = planner.fullest(smallest);
  if (access == nullptr) {
    fail(ErrorCode::kFull, "a device budget of {} bytes is too small: {} are needed",
         options.budget_bytes, needed);
  }
  fail(
      ErrorCode::kFull,
      "a device budget of {} bytes is too small: at least {} are needed, even with single buffers; "
      "most of them at step {}, {} of '{}' ({} bytes), with the buffers in use at that time. Raise "
      "the budget, or split that layer",
      options.budget_bytes, needed, access->step, name_of(access->kind),
      demand.batches[access->batch].name, buffer_bytes(demand, *access));
}

Placement placement_of(const Demand& demand, const Layout& layout, uint64_t reserved_bytes) {
  Placement placement;
  uint64_t end = 0;
  const auto put = [&](uint64_t bytes) { return std::exchange(end, end + Arena::charge(bytes)); };
  for (size_t i = 0; i < demand.entries.size(); ++i) {
    EntryPlace place{.pinned = layout.pins[i]};
    if (place.pinned) {
      place.offset = put(demand.entries[i].bytes);
      place.log_offset = put(demand.entries[i].log_bytes);
    }
    placement.entries.push_back(place);
  }
  placement.pinned_bytes = end;
  for (uint32_t batch = 0; batch < demand.batches.size(); ++batch) {
    for (const BatchPart& part : demand.batches[batch].parts) {
      const uint64_t bytes = index_bytes(demand.batches[batch], part);
      if (!layout.pins[part.entry] || bytes == 0) continue;
      placement.indexes.push_back({batch, part.entry, put(bytes), bytes});
    }
  }
  placement.index_bytes = end - placement.pinned_bytes;
  placement.pool_offset = end;
  placement.pool_bytes = layout.height;
  placement.reserved_offset = end + layout.height;
  placement.reserved_bytes = reserved_bytes;
  const Lifetimes& lives = layout.timing->lives;
  for (uint32_t i = 0; i < demand.accesses.size(); ++i) {
    const Access& access = demand.accesses[i];
    if (needs_buffer(demand, access, layout.pins)) {
      placement.accesses.push_back({.offset = placement.pool_offset + layout.offsets[i],
                                    .lead = lives[i].lead.before,
                                    .kept = lives[i].owner != i});
    } else {
      const auto& parts = demand.batches[access.batch].parts;
      placement.accesses.push_back(
          {.in_place = true,
           .offset = parts.empty() ? 0 : placement.entries[parts[0].entry].offset});
    }
  }
  placement.moved_bytes = moved_bytes(demand, layout.pins, lives);
  return placement;
}

}  // namespace

Placement place(const Demand& demand, const PlacementOptions& options) {
  check(demand);
  const uint64_t budget = options.budget_bytes / Arena::kAlignment * Arena::kAlignment;
  const uint64_t reserved = Arena::charge(options.reserved_bytes);
  const uint64_t available = budget - std::min(budget, reserved);

  std::optional<Layout> layout;
  Buffering buffering = Buffering::kDouble;
  // A lead longer than the circle has no more effect.
  const uint32_t max_lead = std::min(options.max_lead, demand.phases);
  if (reserved <= budget) layout = cheapest(demand, max_lead, available, options.peak_first);
  if (!layout) {
    const Planner planner(demand, 0, options.peak_first);
    buffering = Buffering::kSingle;
    layout = planner.smallest();
    if (reserved > budget || layout->needed() > available) {
      refuse(demand, planner, *layout, options);
    }
    planner.shorten(*layout, available);
    planner.fill(*layout, available);
    planner.repack(*layout);
  }
  Placement placement = placement_of(demand, *layout, reserved);
  placement.buffering = buffering;
  placement.lead = layout->lead;
  PHUB_CHECK(placement.total_bytes() <= options.budget_bytes);
  return placement;
}

uint64_t least_budget(const Demand& demand) {
  check(demand);
  return std::min(Planner(demand, 0, false).smallest().needed(),
                  Planner(demand, 1, false).smallest().needed());
}

}  // namespace phub::geeps
