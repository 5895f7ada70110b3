#include "phub/core/key_states.h"

#include <cstring>

namespace phub {

KeyStates::KeyStates(const Places& places, ChunkTable& table, const CoreTrace& trace)
    : get(table), set(table), places_(places), table_(table), trace_(trace) {
  for (const Places::Array array : Places::kArrays) {
    if (places.has(array)) bytes_per_element_ += 2 * sizeof(float);
  }
}

void KeyStates::copy_out(uint32_t index) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("get state", chunk);
  KeyStateMemory::Place& to = to_->places[chunk.id];
  const bool was_set = set.is_due(index);
  to.steps = was_set ? from_->places[chunk.id].steps + get.round() - set.round()
                     : chunk.steps_before(get.round());
  uint64_t nth = 0;
  for (const Places::Array array : Places::kArrays) {
    if (!places_.has(array)) continue;
    const float* from = places_.running(array, chunk);
    if (was_set) {
      const KeyStateMemory::Place& place = from_->places[chunk.id];
      from = from_->floats + place.first + nth * place.stride;
    }
    std::memcpy(to_->floats + to.first + nth * to.stride, from, chunk.elements * sizeof(float));
    ++nth;
  }
  get.done(index);
}

void KeyStates::copy_in(uint32_t index) {
  CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("set state", chunk);
  const KeyStateMemory::Place& place = from_->places[chunk.id];
  uint64_t nth = 0;
  for (const Places::Array array : Places::kArrays) {
    if (!places_.has(array)) continue;
    std::memcpy(places_.running(array, chunk), from_->floats + place.first + nth * place.stride,
                chunk.elements * sizeof(float));
    ++nth;
  }
  chunk.set_steps_before(set.round(), place.steps);
  set.done(index);
}

}  // namespace phub
