// The sum of a round in the order of a job's `groups`, as a recursive function over its tree, one
// element at a time. It shares no code with the server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/oracle/reference.h"

namespace phub::reference {

// A group, whose parts are added in their order; without parts it is a rank.
struct Group {
  std::vector<Group> parts;
  uint32_t rank = 0;
};

// REQUIRES: it is well-formed. "": all ranks, one after another.
Group parse_groups(std::string_view groups, uint32_t ranks);

// As sum() of reference.h. Slots by rank; null: there is no gradient.
bool sum(const Group& group, std::span<const void* const> slots, DType type, float factor,
         float* out, size_t n);

// The same of factors: the sum of ranks that follow each other in a group begins at zero.
bool sum(const Group& group, std::span<const void* const> slots, const Factors& factors,
         float factor, float* out);

// The same of rows: of ranks that follow each other in a group, each row is the sum of those that
// have it, and zero if none has.
bool sum(const Group& group, std::span<const void* const> slots, const Rows& rows, float factor,
         float* out);

// Any groups of so many ranks. `below(n)` draws a number from 0 to n-1; the parentheses are at most
// so deep.
using Draw = std::function<uint64_t(uint64_t)>;
std::string some_groups(uint32_t ranks, const Draw& below, uint32_t depth = 2);

}  // namespace phub::reference
