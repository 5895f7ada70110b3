// The application's side of the training loop (training.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "worker/examples/geeps/device_math.h"
#include "worker/geeps/cache.h"

namespace phub::examples {

// A worker's part of the training: of all mini-batches, the rank-th of `world` at a time.
struct Share {
  uint32_t rank = 0, world = 1;
  uint32_t samples = 32;      // samples in a mini-batch of this worker
  uint32_t mini_batches = 1;  // per clock
  uint64_t seed = 1;
  uint64_t piece_bytes = geeps::kPieceBytes;  // of tables
  std::optional<uint32_t> staleness;          // of reads; nullopt: what the job's consistency has

  // A sample's gradient is multiplied with this: parameters move by the mean of a clock.
  float scale() const {
    return 1.0f / (static_cast<float>(samples) * static_cast<float>(mini_batches) *
                   static_cast<float>(world));
  }
};

// Tables of rows of 128 floats. A table has one or more parts of equal size, each of whole rows.
class Tables {
 public:
  static constexpr uint32_t kRowFloats = 128;

  explicit Tables(const Share& share)
      : piece_bytes_(share.piece_bytes), staleness_(share.staleness) {}

  uint32_t add_parameters(const std::string& name, size_t floats) {
    return add(name, floats, 1, false);
  }
  uint32_t add_local(const std::string& name, size_t floats, size_t parts = 1) {
    return add(name, floats, parts, true);
  }

  const std::vector<geeps::TableSpec>& specs() const { return specs_; }
  // The keys of a part.
  std::span<const uint64_t> rows(uint32_t table, size_t part = 0) const {
    return std::span(specs_[table].keys).subspan(part * part_rows_[table], part_rows_[table]);
  }
  // Reads a table of parameters.
  geeps::ReadBuffer read(geeps::Cache& cache, uint32_t table) const {
    return {cache, table, rows(table), staleness_};
  }
  size_t part_floats(uint32_t table) const { return part_rows_[table] * kRowFloats; }
  // Zeroes the padding of a part behind its floats.
  void clear_padding(Math& math, uint32_t table, float* part) const;

 private:
  uint32_t add(const std::string& name, size_t floats, size_t parts, bool local);

  uint64_t piece_bytes_;
  std::optional<uint32_t> staleness_;
  std::vector<geeps::TableSpec> specs_;
  std::vector<size_t> floats_, part_rows_;  // those of a part
};

// Parameters, by table.
using Parameters = std::vector<std::span<const float>>;

// Used by one thread.
class Model {
 public:
  virtual ~Model() = default;

  virtual const Tables& tables() const = 0;  // parameters first
  // All tables of parameters one after another, as they are in memory.
  virtual std::vector<float> initial() const = 0;
  // The mini-batches of a clock (from 0 on): their mean loss. Without `math` it is virtual.
  virtual double train(geeps::Cache& cache, Math* math, uint64_t clock) = 0;
  // Describes the quality of the parameters on held-out data, for people.
  virtual std::string evaluate(const Parameters& parameters) const = 0;
  // The state that the next clock begins with, besides parameters and its number.
  virtual std::vector<float> state() const { return {}; }
  virtual void restore_state(std::span<const float> state);
};

}  // namespace phub::examples
