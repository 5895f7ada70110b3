#include "worker/examples/geeps/model.h"

#include "transport/error.h"

namespace phub::examples {

uint32_t Tables::add(const std::string& name, size_t floats, size_t parts, bool local) {
  const size_t rows = (floats + kRowFloats - 1) / kRowFloats;
  specs_.push_back({.name = name,
                    .row_floats = kRowFloats,
                    .keys = geeps::dense(rows * parts),
                    .local = local,
                    .max_staleness = local ? 0 : staleness_.value_or(0),
                    .piece_bytes = piece_bytes_});
  floats_.push_back(floats);
  part_rows_.push_back(rows);
  return static_cast<uint32_t>(specs_.size() - 1);
}

void Tables::clear_padding(Math& math, uint32_t table, float* part) const {
  math.run(1, part_floats(table) - floats_[table], Fill{0, part + floats_[table]});
}

void Model::restore_state(std::span<const float> state) {
  if (!state.empty()) fail(ErrorCode::kInvalid, "a checkpoint with the state of another model");
}

}  // namespace phub::examples
