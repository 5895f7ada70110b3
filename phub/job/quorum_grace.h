// The grace that the box chooses by itself (JobSpec::grace "auto").
//
// It is the time within which nine of ten of the latest ranks came that were not long behind the
// quorum: by at most a quarter of the present round, grace included, and by at most
// JobSpec::grace_ms unless that is 0. So rounds wait for ranks that are only a little slower, and
// not for one that is far behind.
#pragma once

#include <cstdint>
#include <vector>

namespace phub {

// In ms, rounded up; 0: nobody is worth the wait. `late_ns`: of the latest ranks that came after a
// quorum, how long after it; `round_ns`: the time of the latest rounds (core/quorum_times.h), whose
// median counts; both may be empty, and in any order. `most_ms`: 0 means that there is no other
// bound than the rounds'.
uint64_t quorum_grace_ms(std::vector<uint64_t> late_ns, std::vector<uint64_t> round_ns,
                         uint64_t most_ms);

}  // namespace phub
