// Folds, one value at a time. It shares no code with the kernels.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tests/oracle/groups.h"
#include "transport/control/job_spec.h"

namespace phub::reference {

// Arrays of words of 4 bytes, as those of a job.
class Fold {
 public:
  explicit Fold(const KeySpec& key)
      : type_(key.value_type.empty() ? "f32" : key.value_type), operation_(key.operation) {}

  std::vector<float> identity(size_t words) const;
  void add(std::span<const float> from, std::span<float> to) const;  // to = to ⊕ from
  // What the slots of a round come to, in the order of its groups. `rows`: what they hold, or none.
  std::vector<float> all(const Group& group, std::span<const void* const> slots, const Rows& rows,
                         size_t words) const;

 private:
  void add_slot(const void* slot, const Rows& rows, std::span<float> to) const;

  std::string type_, operation_;
};

}  // namespace phub::reference
