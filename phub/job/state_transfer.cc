#include "phub/job/state_transfer.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "phub/job/memory.h"
#include "transport/box_memory.h"
#include "transport/error.h"

namespace phub {

StateTransfer::StateTransfer(const Job& job, const StateRequest& request)
    : sets(request.set),
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

void StateTransfer::check_piece(uint64_t offset, uint64_t size) const {
  if (offset % sizeof(float) == 0 && size % sizeof(float) == 0 && size > 0 && offset < bytes &&
      size <= bytes - offset) {
    return;
  }
  fail(ErrorCode::kInvalid, "{} bytes from byte {} on are no piece of the {} bytes of this state",
       size, offset, bytes);
}

}  // namespace phub
