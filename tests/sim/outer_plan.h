// What learners of a simulated job do that make steps by themselves and exchange now and then
// (DiLoCo): how long they compute, who is slow, and who is cut off from the box.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace phub::sim {

// For a while nothing comes through between these ranks and the box, or on one of the two ways.
struct Partition {
  enum Kind {
    kCut,
    kMute,  // nothing arrives of what they send
    kDeaf,  // nothing arrives that is sent to them
  };
  Kind kind = kCut;
  uint64_t after_pushes = 0;  // of the job
  uint64_t ms = 0;
  bool heals = true;      // else the ranks' hosts die meanwhile
  bool followed = false;  // others ask for the ranks, until they are free
  std::set<uint32_t> ranks;
};

struct OuterPlan {
  uint64_t every = 1;  // steps, in which each fragment is sent once
  uint64_t delay = 0;  // steps from there to the one that needs the result
  uint64_t step_ms = 1;
  uint64_t slowness = 1;  // of the slow ranks: their steps take so many times as long
  std::set<uint32_t> slow;
  uint64_t slow_link_bytes_per_s = 0;
  std::set<uint32_t> slow_links;
  std::vector<Partition> partitions;  // by ascending pushes

  bool is_slow(uint32_t rank) const { return slow.contains(rank); }
  bool has_slow_link(uint32_t rank) const { return slow_links.contains(rank); }
  // Of `every` steps, at the most.
  uint64_t longest_cycle_ms() const { return every * step_ms * slowness * 3 / 2; }
};

// What happened.
struct OuterCounts {
  uint64_t learners = 0, slow_learners = 0, slow_links = 0;
  uint64_t rounds = 0;  // of fragments, that somebody has the result of
  uint64_t sent = 0;    // contributions
  uint64_t late = 0;    // each counts for each round that went on without it
  uint64_t ended = 0;   // processes, by a fault
  uint64_t hung = 0;
  uint64_t partitions = 0, one_sided = 0, cut_off = 0;  // the last: ranks
  uint64_t joined_late = 0, joined_again = 0;           // new ranks; ranks that had been there
  uint64_t waits = 0;            // how often it was looked whether somebody waits for too long
  uint64_t longest_wait_ms = 0;  // with a quorum, for the others

  void add(const OuterCounts& more) {
    learners += more.learners, slow_learners += more.slow_learners, slow_links += more.slow_links;
    rounds += more.rounds, sent += more.sent, late += more.late;
    ended += more.ended, hung += more.hung;
    partitions += more.partitions, one_sided += more.one_sided, cut_off += more.cut_off;
    joined_late += more.joined_late, joined_again += more.joined_again;
    waits += more.waits;
    longest_wait_ms =
        longest_wait_ms > more.longest_wait_ms ? longest_wait_ms : more.longest_wait_ms;
  }
};

}  // namespace phub::sim
