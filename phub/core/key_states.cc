#include "phub/core/key_states.h"

#include <cstring>

namespace phub {

KeyStates::KeyStates(const JobArrays& arrays, ChunkTable& table, const CoreTrace& trace)
    : get(table), set(table), arrays_(arrays), table_(table), trace_(trace) {
  for (const float* array : {arrays.parameters, arrays.state0, arrays.state1}) {
    if (array) bytes_per_element_ += 2 * sizeof(float);
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
  for (const float* array : {arrays_.parameters, arrays_.state0, arrays_.state1}) {
    if (!array) continue;
    const float* from = array + chunk.offset;
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
  for (float* array : {arrays_.parameters, arrays_.state0, arrays_.state1}) {
    if (!array) continue;
    std::memcpy(array + chunk.offset, from_->floats + place.first + nth * place.stride,
                chunk.elements * sizeof(float));
    ++nth;
  }
  chunk.set_steps_before(set.round(), place.steps);
  set.done(index);
}

}  // namespace phub
