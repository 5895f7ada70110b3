#include "phub/core/snapshot.h"

#include <cstring>

#include "phub/core/way.h"

namespace phub {

Snapshot::Snapshot(const JobArrays& arrays, const Places& places, const ChunkTable& table,
                   const CoreTrace& trace)
    : Move(table, CoreReport::kSnapped, true),
      arrays_(arrays),
      places_(places),
      table_(table),
      trace_(trace) {
  for (const float* copy :
       {arrays.copy.parameters, arrays.copy.state0, arrays.copy.state1, arrays.copy.view}) {
    if (copy) bytes_per_element_ += 2 * sizeof(float);
  }
  const SavedClocks& clocks = arrays.copy.clocks;
  if (clocks.steps) bytes_per_chunk_ = 2 * SavedClocks::bytes(1, clocks.ranks);
  const ShelfArrays& shelves = arrays.copy.shelves;
  bytes_per_element_ += shelves.arrays.size() * 2 * sizeof(float);
  bytes_per_chunk_ += shelves.steps.size() * 2 * sizeof(uint64_t);
}

uint64_t Snapshot::make(uint32_t index, const Way& way) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("snapshot", chunk);
  const auto copy = [&chunk](const float* from, float* to) {
    if (to) std::memcpy(to + chunk.offset, from, chunk.elements * sizeof(float));
  };
  float* const copies_of[] = {arrays_.copy.parameters, arrays_.copy.state0, arrays_.copy.state1};
  for (const Places::Array array : Places::kArrays) {
    if (copies_of[array]) places_.get(array, chunk, copies_of[array] + chunk.offset);
  }
  if (arrays_.view) copy(arrays_.view + chunk.offset, arrays_.copy.view);
  const ShelfArrays& copies = arrays_.copy.shelves;
  for (uint32_t shelf = 0; shelf < copies.steps.size(); ++shelf) {
    for (size_t array = 0; array < copies.each; ++array) {
      copy(places_.at(shelf + 1, Places::kArrays[array], chunk),
           copies.arrays[shelf * copies.each + array]);
    }
    copies.steps[shelf][chunk.id] = arrays_.shelves.steps[shelf][chunk.id];
  }
  if (arrays_.copy.clocks.steps) way.save(index, chunks.round(), arrays_.copy.clocks);
  chunks.done(index);
  return chunk.elements * bytes_per_element_ + bytes_per_chunk_;
}

}  // namespace phub
