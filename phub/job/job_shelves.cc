// A box's part of a job: the memory of branches that do not run.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phub/job/job_part.h"
#include "transport/box_memory.h"

namespace phub {

uint64_t JobPart::Shelf::bytes() const {
  uint64_t bytes = steps.size() * sizeof(uint64_t);
  for (const numa::Memory& array_memory : arrays) bytes += array_memory.bytes().size();
  return bytes;
}

SavedImage JobPart::Shelf::image() {
  std::vector<std::span<std::byte>> memory;
  for (const numa::Memory& array_memory : arrays) memory.push_back(array_memory.bytes());
  memory.push_back(std::as_writable_bytes(std::span(steps)));
  return SavedImage(std::move(memory));
}

uint64_t JobPart::shelf_bytes() const {
  return optimized_arrays_of(*spec_) * plan_.box_elements * sizeof(float) +
         plan_.chunks.size() * sizeof(uint64_t);
}

JobPart::Shelf JobPart::make_shelf() const {
  Shelf shelf;
  for (size_t array = 0; array < optimized_arrays_of(*spec_); ++array) {
    numa::Memory& memory = shelf.arrays.emplace_back(
        allocate(plan_.box_elements * sizeof(float), plan_.cores.front().os_node,
                 fmt::format("branches of job '{}'", spec_->name)));
    place(memory.bytes(), sizeof(float), node_runs(plan_));
    numa::populate(memory.bytes());  // else the first fork does it, while the ranks wait
  }
  shelf.steps.resize(plan_.chunks.size());
  return shelf;
}

ShelfArrays JobPart::make_shelves(ShelfMemory& made, bool with_docks) const {
  const size_t each = optimized_arrays_of(*spec_);
  for (uint32_t i = 0; i < spec_->branches; ++i) {
    Shelf& shelf = made.shelves.emplace_back(make_shelf());
    for (size_t array = 0; array < each; ++array) made.arrays.push_back(shelf.array(array));
    made.steps.push_back(shelf.steps.data());
  }
  if (with_docks) {
    made.arrays.resize(2 * made.arrays.size());
    made.steps.resize(2 * made.steps.size());
  }
  return {.arrays = made.arrays, .steps = made.steps, .each = each};
}

// Makes docks for the branches that are still to be copied from them.
void JobPart::make_docks(const SavedBranches& saved) {
  for (const SavedShelf& shelf : saved.shelves) {
    if (shelf.place > spec_->branches) exchange_dock(shelf.place - spec_->branches, make_shelf());
  }
}

JobPart::Shelf JobPart::exchange_dock(uint32_t shelf, Shelf with) {
  std::swap(docks_[shelf - 1], with);
  Shelf& dock = docks_[shelf - 1];
  const size_t at = spec_->branches + shelf - 1, each = arrays_.shelves.each;
  for (size_t array = 0; array < each; ++array) {
    shelves_.arrays[at * each + array] = dock.arrays.empty() ? nullptr : dock.array(array);
  }
  shelves_.steps[at] = dock.arrays.empty() ? nullptr : dock.steps.data();
  return with;
}

uint64_t JobPart::docked_bytes() const {
  uint64_t bytes = 0;
  for (const Shelf& dock : docks_) bytes += dock.bytes();
  return bytes;
}

}  // namespace phub
