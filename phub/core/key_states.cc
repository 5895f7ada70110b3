#include "phub/core/key_states.h"

#include <cstring>

namespace phub {
namespace {

void begin_with(DueChunks& chunks, const KeyStateMemory& memory, uint64_t round) {
  chunks.begin(round, [&memory](const CoreChunk& chunk) {
    return memory.places[chunk.id].first != KeyStateMemory::kNowhere;
  });
}

// Calls visit(array, nth) for each array that keys have. Returns the bytes that a chunk's copies
// read and write.
template <typename Visit>
uint64_t for_each_array(const Places& places, const CoreChunk& chunk, const Visit& visit) {
  uint64_t nth = 0;
  for (const Places::Array array : Places::kArrays) {
    if (places.has(array)) visit(array, nth++);
  }
  return nth * chunk.elements * 2 * sizeof(float);
}

}  // namespace

void SetKeyStates::begin(const KeyStateMemory& from, uint64_t round) {
  from_ = &from;
  begin_with(chunks, from, round);
}

uint64_t SetKeyStates::make(uint32_t index, const Way& /*way*/) {
  CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("set state", chunk);
  const uint64_t bytes = for_each_array(places_, chunk, [&](Places::Array array, uint64_t nth) {
    places_.set(array, chunk, state_of(chunk, nth));
  });
  chunk.set_steps_before(chunks.round(), place_of(chunk).steps);
  chunks.done(index);
  return bytes;
}

void GetKeyStates::begin(KeyStateMemory& to, uint64_t round) {
  to_ = &to;
  begin_with(chunks, to, round);
}

uint64_t GetKeyStates::make(uint32_t index, const Way& /*way*/) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("get state", chunk);
  KeyStateMemory::Place& to = to_->places[chunk.id];
  const bool is_set = set_.chunks.is_due(index);
  to.steps = is_set ? set_.place_of(chunk).steps + chunks.round() - set_.chunks.round()
                    : chunk.steps_before(chunks.round());
  const uint64_t bytes = for_each_array(places_, chunk, [&](Places::Array array, uint64_t nth) {
    float* const into = to_->floats + to.first + nth * to.stride;
    if (!is_set) return places_.get(array, chunk, into);
    std::memcpy(into, set_.state_of(chunk, nth), chunk.elements * sizeof(float));
    places_.round(array, chunk, into);
  });
  chunks.done(index);
  return bytes;
}

}  // namespace phub
