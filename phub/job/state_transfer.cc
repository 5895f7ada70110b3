#include "phub/job/state_transfer.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "phub/job/memory.h"
#include "transport/box_memory.h"
#include "transport/error.h"

namespace phub {

StateTransfer::StateTransfer(const Job& job, uint64_t n, const StateRequest& request)
    : number(n),
      sets(request.set),
      rank(request.rank),
      incarnation(request.incarnation),
      keys(request.keys),
      steps(request.steps) {
  const std::vector<KeySpec>& all = job.spec().keys;
  if (keys.empty()) {
    keys.resize(all.size());
    std::iota(keys.begin(), keys.end(), 0);
  }
  std::vector<bool> seen(all.size());
  uint64_t elements = 0;
  for (const uint32_t key : keys) {
    if (key >= all.size()) {
      fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key,
           job.spec().name, all.size());
    }
    if (seen[key]) fail(ErrorCode::kInvalid, "key '{}' is named twice", all[key].name);
    seen[key] = true;
    elements += all[key].elements;
  }
  if (steps.size() != (sets ? keys.size() : 0)) {
    fail(ErrorCode::kInvalid, "there are {} steps for {} keys that are {}", steps.size(),
         keys.size(), sets ? "set" : "only read");
  }
  for (const uint64_t step : steps) {
    if (step > kMaxRound) fail(ErrorCode::kInvalid, "{} steps are more than {}", step, kMaxRound);
  }
  bytes = elements * optimized_arrays_of(job.spec()) * sizeof(float);
}

void StateTransfer::allocate(const Job& job) {
  memory = phub::allocate(bytes, job.plan().cores.front().os_node,
                          fmt::format("the state of keys of job '{}'", job.spec().name));
  numa::populate(memory.bytes());
  where.floats = reinterpret_cast<float*>(memory.bytes().data());
  where.places.resize(job.plan().chunks.size());
  std::vector<uint64_t> first(job.spec().keys.size(), KeyStateMemory::kNowhere);
  std::vector<uint64_t> steps_of(first.size());
  uint64_t at = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    first[keys[i]] = at;
    if (sets) steps_of[keys[i]] = steps[i];
    at += job.spec().keys[keys[i]].elements * optimized_arrays_of(job.spec());
  }
  for (size_t i = 0; i < where.places.size(); ++i) {
    const ChunkLayout& chunk = job.plan().chunks[i];
    if (first[chunk.key] == KeyStateMemory::kNowhere) continue;
    where.places[i] = {.first = first[chunk.key] + chunk.key_element,
                       .stride = job.spec().keys[chunk.key].elements,
                       .steps = steps_of[chunk.key]};
  }
  share(job);
}

// In the order in which other boxes have it.
void StateTransfer::share(const Job& job) {
  if (job.boxes() == 1) return;
  const size_t arrays = optimized_arrays_of(job.spec());
  std::vector<std::vector<std::span<std::byte>>> memory_of(job.boxes()), steps_of(job.boxes());
  for (size_t i = 0; i < where.places.size(); ++i) {
    KeyStateMemory::Place& place = where.places[i];
    if (place.first == KeyStateMemory::kNowhere) continue;
    const ChunkLayout& chunk = job.whole_plan().chunks[i];
    const uint32_t box = job.box_of(chunk);
    if (box == 0) continue;
    for (size_t array = 0; array < arrays; ++array) {
      const std::span floats(where.floats + place.first + array * place.stride, chunk.elements);
      memory_of[box].push_back(std::as_writable_bytes(floats));
    }
    steps_of[box].push_back(std::as_writable_bytes(std::span(&place.steps, 1)));
  }
  shares.resize(job.boxes());
  for (uint32_t box = 1; box < job.boxes(); ++box) {
    std::ranges::copy(steps_of[box], std::back_inserter(memory_of[box]));
    shares[box] = SavedImage(std::move(memory_of[box]), true);
  }
}

uint64_t StateTransfer::bookkeeping(const Job& job) {
  const uint64_t parts = job.boxes() > 1 ? optimized_arrays_of(job.spec()) + 1 : 0;
  return job.plan().chunks.size() *
         (sizeof(KeyStateMemory::Place) + parts * sizeof(std::span<std::byte>));
}

std::vector<uint64_t> StateTransfer::steps_of_keys(const Job& job) const {
  std::vector<uint64_t> most(job.spec().keys.size());
  for (size_t i = 0; i < where.places.size(); ++i) {
    uint64_t& of_key = most[job.plan().chunks[i].key];
    of_key = std::max(of_key, where.places[i].steps);
  }
  std::vector<uint64_t> result;
  for (const uint32_t key : keys) result.push_back(most[key]);
  return result;
}

void StateTransfer::refuse(ErrorCode code, const std::string& why) {
  if (begun) std::exchange(begun, nullptr)({code, why});
  if (decided) std::exchange(decided, nullptr)({code, why});
}

void fail_not_open(const std::string& job, uint32_t rank, bool sets) {
  fail(ErrorCode::kNotFound, "rank {} of job '{}' does not {} the state of keys now", rank, job,
       sets ? "set" : "read");
}

void check_piece_of_state(uint64_t offset, uint64_t size, uint64_t bytes) {
  if (offset % sizeof(float) == 0 && size % sizeof(float) == 0 && size > 0 && offset < bytes &&
      size <= bytes - offset) {
    return;
  }
  fail(ErrorCode::kInvalid, "{} bytes from byte {} on are no piece of the {} bytes of this state",
       size, offset, bytes);
}

}  // namespace phub
