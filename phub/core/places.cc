#include "phub/core/places.h"

#include <algorithm>
#include <cstring>

namespace phub {

Places::Places(const JobArrays& arrays, const ChunkTable& table)
    : table_(table),
      running_{arrays.parameters, arrays.state0, arrays.state1},
      state8_(arrays.state8),
      pieces_(arrays.state_pieces),
      shelves_(arrays.shelves),
      each_(arrays.shelves.each),
      places_(arrays.shelves.steps.size() + 1),
      parameters_are_results_(static_cast<void*>(arrays.parameters) == arrays.results),
      homes_(places_ > 1 && each_ > 0 ? table.size() * places_ : 0) {
  for (size_t i = 0; i < homes_.size(); ++i) homes_[i] = static_cast<uint16_t>(i % places_);
}

void Places::get(Array array, const CoreChunk& chunk, float* to) const {
  if (has_8_bits(array)) return kernels::decode_state(state8(array, chunk), chunk.elements, to);
  const uint32_t elements = elements_of(array, chunk);
  if (elements > 0) std::memcpy(to, running(array, chunk), elements * sizeof(float));
  std::fill(to + elements, to + chunk.elements, 0.0f);
}

void Places::set(Array array, const CoreChunk& chunk, const float* from) const {
  if (has_8_bits(array)) return kernels::encode_state(from, chunk.elements, state8(array, chunk));
  const uint32_t elements = elements_of(array, chunk);
  if (elements > 0) std::memcpy(running(array, chunk), from, elements * sizeof(float));
}

uint64_t Places::exchange(uint32_t place, const CoreChunk& chunk) {
  if (each_ == 0) return 0;
  uint16_t* const homes = homes_.data() + first_home(chunk);
  std::swap(homes[0], homes[place]);
  if (!parameters_are_results_) return 0;
  float* const running = at(0, kParameters, chunk);
  std::swap_ranges(running, running + chunk.elements, at(place, kParameters, chunk));
  return uint64_t{chunk.elements} * 4 * sizeof(float);
}

}  // namespace phub
