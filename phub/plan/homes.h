// A chunk's home: the boxes at the machine of the ranks that exchange it (IterStore, section 3.2.2:
// rows lie at the machine that uses them). There its bytes stay off the network.
//
// A chunk's homes are the boxes of the machine with most of the ranks that exchange it; of several
// machines with as many, those of all. A rank whose machine is unknown or has no box counts for
// none. A chunk without a home goes where the load is least, as all do if no machine is known.
//
// Homes go before balance as far as kMostOfEven: chunks go home, those with the fewest ranks from
// elsewhere first, as long as the box then has at most so many times its even share of the job's
// bytes, or had less than that share before. (Other jobs do not count here: a small one would lie
// at one box alone.) All other chunks go where the load is least.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "transport/control/job_spec.h"
#include "transport/layout.h"

namespace phub {

inline constexpr double kMostOfEven = 1.25;

// The ranks that exchange some of the chunk, as ExchangedRange has them; empty: all of them.
std::vector<uint64_t> ranks_exchanging(const ChunkLayout& chunk, const KeySpec& key);

// The gradients of all ranks in a round, in bytes: where they go.
struct HomeBytes {
  bool known = false;        // the machines of ranks and boxes are; else the rest is 0
  uint64_t stays = 0;        // to a box at the rank's machine
  uint64_t shared = 0;       // to another: ranks of several machines exchange the chunk
  uint64_t for_balance = 0;  // to another: the box at home has its part
  uint64_t without_box = 0;  // to another: no box is known at the rank's machine

  friend bool operator==(const HomeBytes&, const HomeBytes&) = default;
};
// A sentence: "gradients of a round: 5.2 MiB stay at …"; "" if nothing is known.
std::string describe(const HomeBytes& bytes);

class Homes {
 public:
  // `hosts`: the machine of each place where chunks may go; places of one machine may be several.
  Homes(std::span<const uint64_t> hosts, std::span<const uint64_t> rank_hosts, uint32_t ranks);

  struct Home {
    std::vector<uint32_t> places;           // ascending; empty: anywhere
    uint32_t strangers = 0;                 // ranks that exchange it from elsewhere
    std::map<uint64_t, uint32_t> ranks_at;  // by machine with a place
    uint32_t most = 0;                      // the most of these
    uint32_t without_box = 0;               // ranks of no such machine
  };
  // `ranks` as ranks_exchanging() returns them. The reference holds as long as this.
  const Home& home_of(const std::vector<uint64_t>& ranks);
  bool known() const { return known_; }
  // The bytes of a chunk that goes to this place.
  void count(const Home& home, uint32_t place, uint64_t slot_bytes, HomeBytes& bytes) const;

 private:
  const std::vector<uint64_t> hosts_;
  std::vector<uint64_t> rank_hosts_;  // by rank; 0: no place is there
  bool known_ = false;
  std::map<std::vector<uint64_t>, Home> homes_;
};

}  // namespace phub
