#include "phub/core/snapshot.h"

#include <cstring>

namespace phub {

Snapshot::Snapshot(const JobArrays& arrays, const ChunkTable& table, const CoreTrace& trace)
    : chunks(table), arrays_(arrays), table_(table), trace_(trace) {
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

void Snapshot::copy(uint32_t index, const Way& way) {
  const CoreChunk& chunk = table_[index];
  const TraceSpan span = trace_.span("snapshot", chunk);
  const auto copy = [&chunk](const float* from, float* to) {
    if (to) std::memcpy(to + chunk.offset, from + chunk.offset, chunk.elements * sizeof(float));
  };
  copy(arrays_.parameters, arrays_.copy.parameters);
  copy(arrays_.state0, arrays_.copy.state0);
  copy(arrays_.state1, arrays_.copy.state1);
  copy(arrays_.view, arrays_.copy.view);
  const ShelfArrays &shelves = arrays_.shelves, &copies = arrays_.copy.shelves;
  for (size_t i = 0; i < copies.arrays.size(); ++i) copy(shelves.arrays[i], copies.arrays[i]);
  for (size_t i = 0; i < copies.steps.size(); ++i) {
    copies.steps[i][chunk.id] = shelves.steps[i][chunk.id];
  }
  if (arrays_.copy.clocks.steps) way.save(index, chunks.round(), arrays_.copy.clocks);
  chunks.done(index);
}

}  // namespace phub
