#include "transport/error.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace phub {
namespace {

constexpr std::array<std::pair<ErrorCode, std::string_view>, 13> kNames = {{
    {ErrorCode::kInvalid, "invalid"},
    {ErrorCode::kMismatch, "mismatch"},
    {ErrorCode::kTaken, "taken"},
    {ErrorCode::kFull, "full"},
    {ErrorCode::kNotFound, "not_found"},
    {ErrorCode::kUnauthorized, "unauthorized"},
    {ErrorCode::kFenced, "fenced"},
    {ErrorCode::kRankLost, "rank_lost"},
    {ErrorCode::kNonFinite, "non_finite"},
    {ErrorCode::kTimeout, "timeout"},
    {ErrorCode::kUnavailable, "unavailable"},
    {ErrorCode::kRewound, "rewound"},
    {ErrorCode::kInternal, "internal"},
}};

}  // namespace

std::string_view name_of(ErrorCode code) {
  for (const auto& [value, name] : kNames) {
    if (value == code) return name;
  }
  return "internal";
}

ErrorCode parse_error_code(std::string_view name) {
  for (const auto& [value, candidate] : kNames) {
    if (candidate == name) return value;
  }
  return ErrorCode::kInternal;
}

void check_failed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "phub: %s:%d: broken invariant: %s\n", file, line, condition);
  std::abort();
}

}  // namespace phub
