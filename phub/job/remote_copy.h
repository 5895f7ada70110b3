// A copy here of another box's part of a job's checkpoint: of its part of the snapshot, which it
// sends before the checkpoint is written, or of the state that the job goes on from, until the box
// has fetched it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "numa/memory.h"
#include "phub/core/job_parameters.h"
#include "phub/job/saved_image.h"
#include "phub/plan/plan.h"

namespace phub {

class RemoteCopy {
 public:
  // The sizes of the part.
  struct Size {
    uint64_t elements = 0;  // in each array
    size_t arrays = 0;
    uint64_t chunks = 0;  // the job's
    uint32_t clock_ranks = 0;
    uint32_t shelves = 0;
    size_t arrays_of_shelf = 0;

    size_t all_arrays() const { return arrays + shelves * arrays_of_shelf; }
    uint64_t bytes_of_shelf() const {
      return elements * arrays_of_shelf * sizeof(float) + chunks * sizeof(uint64_t);
    }
    uint64_t bytes() const {
      return elements * all_arrays() * sizeof(float) + SavedClocks::bytes(chunks, clock_ranks) +
             shelves * chunks * sizeof(uint64_t);
    }
  };
  // The size for `box` in the plan of all boxes. `saved_ranks` are those of the checkpoint that the
  // job goes on from.
  static Size size_of(const Plan& plan, uint32_t box, const JobSpec& spec, uint64_t saved_ranks);

  // Throws Error(kFull) that names `what`.
  RemoteCopy(const Size& size, uint32_t os_node, std::string_view what);

  // Counts shelves and arrays as JobPart::own_array().
  float* array(uint32_t shelf, size_t array) const {
    const size_t at =
        shelf == 0 ? array : size_.arrays + (shelf - 1) * size_.arrays_of_shelf + array;
    return reinterpret_cast<float*>(memory_.bytes().data()) + at * size_.elements;
  }
  SavedClocks clocks() const;
  uint64_t* steps_of_shelf(uint32_t shelf) const;  // by chunk of the job
  SavedImage image() const;                        // in the form of its part's image

 private:
  Size size_;
  numa::Memory memory_;
};

}  // namespace phub
