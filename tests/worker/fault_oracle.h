// Gradients that every process can compute, what a worker saw of a run, and whether that is what
// the membership log says: byte for byte against the scalar reference that adds in rank order, and
// digit for digit (faults.md's oracle: rank r gives 4^r to the first element of every chunk).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/oracle/replay.h"
#include "transport/control/job_spec.h"
#include "transport/control/messages.h"

namespace phub::testing {

// A job with keys of several lengths and a dozen chunks.
JobSpec fault_spec(const std::string& name, uint32_t world_size, const std::string& optimizer);

// Whether a rank sends nothing for a key in a round (it takes part all the same).
bool gives_null(uint32_t rank, uint64_t round, size_t key);
// The key's elements from `begin` on.
void fill_gradient(const JobSpec& spec, uint32_t rank, uint64_t round, size_t key,
                   std::span<float> out, uint64_t begin = 0);
// All keys one after another, as broadcast() takes them.
std::vector<float> initial_parameters(const JobSpec& spec);

// One round's results as one worker saw them: of each chunk a hash of its bytes, and its first
// element.
struct Seen {
  uint64_t round = 0;
  std::vector<uint64_t> hashes;
  std::vector<float> firsts;
};
struct Sight {
  uint32_t rank = 0, incarnation = 0;
  uint64_t first_round = 0;
  std::vector<Seen> rounds;
};
uint64_t hash_of(std::span<const std::byte> bytes);

// A file of them, written as the worker goes: it may end anywhere.
std::string encode_header(const Sight& sight);
std::string encode(const Seen& seen);
Sight read_sight(const std::string& path, size_t chunks);
// A worker that joins again after its server's end begins another file.
std::string notes_of_life(const std::string& notes, int life);

// What is wrong, or "". The last round that a lost incarnation noted is left out: between its
// result and the note it may have been fenced.
std::string check_sights(const JobSpec& spec, const std::vector<LogRecord>& log,
                         std::vector<Sight> sights);

}  // namespace phub::testing
