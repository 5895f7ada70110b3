#include "tests/oracle/groups.h"

#include <cmath>
#include <optional>

namespace phub::reference {
namespace {

Group ranks_from(uint32_t first, uint32_t count) {
  Group group;
  for (uint32_t rank = first; rank < first + count; ++rank) group.parts.push_back({{}, rank});
  return group;
}

uint32_t read_number(std::string_view& text) {
  uint32_t number = 0;
  for (; !text.empty() && text.front() >= '0' && text.front() <= '9'; text.remove_prefix(1)) {
    number = 10 * number + static_cast<uint32_t>(text.front() - '0');
  }
  return number;
}

// Up to a closing parenthesis, or the end.
Group read_group(std::string_view& text, uint32_t& next_rank) {
  Group group;
  for (;;) {
    if (text.starts_with('(')) {
      text.remove_prefix(1);
      group.parts.push_back(read_group(text, next_rank));
      text.remove_prefix(1);
    } else {
      const uint32_t count = read_number(text);
      group.parts.push_back(ranks_from(next_rank, count));
      next_rank += count;
    }
    if (!text.starts_with(',')) return group;
    text.remove_prefix(1);
  }
}

// Nothing: no rank of the group has a gradient.
std::optional<float> sum_of(const Group& group, std::span<const void* const> slots, DType type,
                            size_t i) {
  if (group.parts.empty()) {
    const void* slot = slots[group.rank];
    return slot ? std::optional(load(slot, type, i)) : std::nullopt;
  }
  std::optional<float> total;
  for (const Group& part : group.parts) {
    const std::optional<float> value = sum_of(part, slots, type, i);
    if (!value) continue;
    total = total ? *total + *value : *value;
  }
  return total;
}

std::optional<float> sum_of(const Group& group, std::span<const void* const> slots,
                            const Factors& factors, size_t i) {
  std::optional<float> total;
  for (const Group& part : group.parts) {
    if (part.parts.empty()) {  // then all are ranks
      const void* slot = slots[part.rank];
      if (slot) total = add_pairs(factors, slot, i, total.value_or(0.0f));
      continue;
    }
    const std::optional<float> value = sum_of(part, slots, factors, i);
    if (value) total = total ? *total + *value : *value;
  }
  return total;
}

std::optional<float> sum_of(const Group& group, std::span<const void* const> slots,
                            const Rows& rows, size_t i) {
  std::optional<float> total;
  bool any_slot = false;
  for (const Group& part : group.parts) {
    const bool is_rank = part.parts.empty() && slots[part.rank] != nullptr;
    if (is_rank && rows.has_pairs(slots[part.rank])) total = 0.0f;
  }
  for (const Group& part : group.parts) {
    if (!part.parts.empty()) {
      const std::optional<float> value = sum_of(part, slots, rows, i);
      if (value) total = total ? *total + *value : *value;
      continue;
    }
    const void* slot = slots[part.rank];  // then all are ranks
    if (!slot) continue;
    any_slot = true;
    const Factors factors = rows.factors_in(slot);
    const auto* left = static_cast<const float*>(slot) + 1 + i / rows.columns;
    const auto* right = static_cast<const float*>(slot) + 1 + factors.pairs * rows.rows;
    for (size_t pair = 0; pair < factors.pairs; ++pair) {
      total = std::fma(left[pair * rows.rows], right[pair * rows.columns + i % rows.columns],
                       total.value_or(0.0f));
    }
    for (size_t n = 0; n < rows.count(slot); ++n) {
      if (rows.row(slot, n) != i / rows.columns) continue;
      const float value = rows.elements(slot, n)[i % rows.columns];
      total = total ? *total + value : value;
    }
  }
  return !total && any_slot ? 0.0f : total;
}

}  // namespace

Group parse_groups(std::string_view groups, uint32_t ranks) {
  if (groups.empty()) return ranks_from(0, ranks);
  uint32_t next_rank = 0;
  return read_group(groups, next_rank);
}

bool sum(const Group& group, std::span<const void* const> slots, DType type, float factor,
         float* out, size_t n) {
  bool finite = true;
  for (size_t i = 0; i < n; ++i) {
    const float total = sum_of(group, slots, type, i).value_or(0.0f) * factor;
    store(out, DType::kF32, i, total);
    finite = finite && std::isfinite(total);
  }
  return finite;
}

bool sum(const Group& group, std::span<const void* const> slots, const Factors& factors,
         float factor, float* out) {
  bool finite = true;
  for (size_t i = 0; i < factors.rows * factors.columns; ++i) {
    const float total = sum_of(group, slots, factors, i).value_or(0.0f) * factor;
    store(out, DType::kF32, i, total);
    finite = finite && std::isfinite(total);
  }
  return finite;
}

bool sum(const Group& group, std::span<const void* const> slots, const Rows& rows, float factor,
         float* out) {
  bool finite = true;
  for (size_t i = 0; i < rows.rows * rows.columns; ++i) {
    const float total = sum_of(group, slots, rows, i).value_or(0.0f) * factor;
    store(out, DType::kF32, i, total);
    finite = finite && std::isfinite(total);
  }
  return finite;
}

std::string some_groups(uint32_t ranks, const Draw& below, uint32_t depth) {
  std::string text;
  while (ranks > 0) {
    const auto size = static_cast<uint32_t>(1 + below(ranks));
    const bool has_parts = depth > 0 && below(2) == 0;
    if (!text.empty()) text += ',';
    text += has_parts ? "(" + some_groups(size, below, depth - 1) + ")" : std::to_string(size);
    ranks -= size;
  }
  return text;
}

}  // namespace phub::reference
