// The parts of a job's keys that a rank writes and reads. It names them when it joins, in elements;
// whole chunks travel, so a chunk is written if a range that is written has some of it.
//
// Nobody waits for a rank at a chunk that it neither writes nor reads, and no result goes there. In
// all computations it counts as if it had pushed null.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/control/rules.h"

namespace phub {

struct ElementRange {  // [begin, end)
  uint64_t begin = 0;
  uint64_t end = 0;

  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

// A rank's interest in one key. A rank writes and reads all of those that it does not name.
struct KeyInterest {
  std::string key;
  std::vector<ElementRange> writes = {};  // the elements whose gradients may be other than zero
  std::vector<ElementRange> reads = {};   // the elements whose results it gets

  friend bool operator==(const KeyInterest&, const KeyInterest&) = default;
};

inline constexpr size_t kMaxInterestRanges = 1u << 16;  // limit of a key, to write and to read each

// Throws Error(kInvalid) that names the problem and its place: a key that the job does not have, or
// twice, a range that is empty or beyond its elements, nothing at all that the rank writes or
// reads, or a problem of check_rules(). `also` is as there.
void check_interest(std::span<const KeyInterest> interest, const JobSpec& spec, Features also = {});

// The part of it that is about one key.
void check_ranges(const KeyInterest& interest, const KeySpec& key);

// A rank's interest in a chunk.
struct ChunkInterest {
  bool writes = true;
  bool reads = true;

  bool any() const { return writes || reads; }
};
struct Layout;
// The interest in each chunk, by chunk. Empty: everything. REQUIRES: check_interest(); the layout
// is that of the keys.
std::vector<ChunkInterest> interest_in_chunks(std::span<const KeyInterest> interest,
                                              std::span<const KeySpec> keys, const Layout& layout);

// By key: whether the rank writes or reads any of it.
std::vector<bool> interest_in_keys(std::span<const KeyInterest> interest,
                                   std::span<const KeySpec> keys);

}  // namespace phub
