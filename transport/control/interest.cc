#include "transport/control/interest.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "transport/error.h"
#include "transport/layout.h"
#include "transport/text.h"

namespace phub {
namespace {

std::unordered_map<std::string_view, size_t> keys_by_name(std::span<const KeySpec> keys) {
  std::unordered_map<std::string_view, size_t> by_name;
  for (size_t k = 0; k < keys.size(); ++k) by_name[keys[k].name] = k;
  return by_name;
}

void check_field(std::span<const ElementRange> ranges, std::string_view field, const KeySpec& key) {
  if (ranges.size() > kMaxInterestRanges) {
    fail(ErrorCode::kInvalid, "interest in key '{}': {} has {} ranges, more than {}", key.name,
         field, ranges.size(), kMaxInterestRanges);
  }
  for (const auto& [begin, end] : ranges) {
    if (begin < end && end <= key.elements) continue;
    fail(ErrorCode::kInvalid,
         "interest in key '{}': {} has the range from {} up to, and without, {}; it must not be "
         "empty, and the key has {} elements",
         key.name, field, begin, end, key.elements);
  }
}

// Sets `flag` of the chunks that the ranges have some of. `chunks`: of one key, ascending.
// Each chunk is looked at once, however often the ranges have it.
void mark(std::vector<ElementRange> ranges, std::span<const ChunkLayout> chunks,
          std::span<ChunkInterest> out, bool ChunkInterest::*flag) {
  std::ranges::sort(ranges, {}, &ElementRange::begin);
  size_t next = 0;  // chunks before this one are done
  for (const auto& [begin, end] : ranges) {
    const auto after =
        std::ranges::upper_bound(chunks, begin, {}, &ChunkLayout::key_element) - chunks.begin();
    next = std::max(next, static_cast<size_t>(after) - 1);
    for (; next < chunks.size() && chunks[next].key_element < end; ++next) out[next].*flag = true;
  }
}

}  // namespace

void check_ranges(const KeyInterest& interest, const KeySpec& key) {
  check_field(interest.writes, "writes", key);
  check_field(interest.reads, "reads", key);
}

void check_interest(std::span<const KeyInterest> interest, const JobSpec& spec, Features also) {
  if (interest.empty()) return;
  const auto by_name = keys_by_name(spec.keys);
  std::vector<bool> named(spec.keys.size());
  for (const KeyInterest& of : interest) {
    const auto at = by_name.find(of.key);
    if (at == by_name.end()) {
      fail(ErrorCode::kInvalid, "interest: job '{}' has no key '{}'", spec.name, printable(of.key));
    }
    if (named[at->second]) {
      fail(ErrorCode::kInvalid, "interest: key '{}' is there twice", printable(of.key));
    }
    named[at->second] = true;
    check_ranges(of, spec.keys[at->second]);
  }
  const std::vector<bool> any = interest_in_keys(interest, spec.keys);
  if (std::ranges::find(any, true) == any.end()) {
    fail(ErrorCode::kInvalid, "interest: this rank neither writes nor reads any key of job '{}'",
         spec.name);
  }
  check_rules(spec, also | Feature::kInterest);
}

std::vector<ChunkInterest> interest_in_chunks(std::span<const KeyInterest> interest,
                                              std::span<const KeySpec> keys, const Layout& layout) {
  std::vector<ChunkInterest> chunks;
  if (interest.empty()) return chunks;
  chunks.resize(layout.chunks.size());
  const auto by_name = keys_by_name(keys);
  for (const KeyInterest& of : interest) {
    const auto key = static_cast<uint32_t>(by_name.at(of.key));
    const auto begin = std::ranges::lower_bound(layout.chunks, key, {}, &ChunkLayout::key);
    const auto end = std::ranges::upper_bound(layout.chunks, key, {}, &ChunkLayout::key);
    const auto first = static_cast<size_t>(begin - layout.chunks.begin());
    const std::span of_key(begin, end);
    const std::span out = std::span(chunks).subspan(first, of_key.size());
    std::ranges::fill(out, ChunkInterest{.writes = false, .reads = false});
    mark(of.writes, of_key, out, &ChunkInterest::writes);
    mark(of.reads, of_key, out, &ChunkInterest::reads);
  }
  return chunks;
}

std::vector<bool> interest_in_keys(std::span<const KeyInterest> interest,
                                   std::span<const KeySpec> keys) {
  std::vector<bool> any(keys.size(), true);
  if (interest.empty()) return any;
  const auto by_name = keys_by_name(keys);
  for (const KeyInterest& of : interest) {
    any[by_name.at(of.key)] = !of.writes.empty() || !of.reads.empty();
  }
  return any;
}

}  // namespace phub
