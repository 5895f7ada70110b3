// Demands on device memory to place: networks as in Algorithm 1, and anything that is allowed.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "worker/geeps/placement.h"

namespace phub::geeps {

struct LayerBytes {
  uint64_t parameters;
  uint64_t local;
};

// Forward and backward pass: Read, LocalAccess and PreUpdate of each layer's own entries. The local
// data is written in the forward pass and read in the backward pass. Layer i's forward pass is
// phase i, its backward pass phase 2·layers − 1 − i.
Demand network(const std::vector<LayerBytes>& layers);

// Entries that batches share, accesses over several phases and over the end of the circle, reads
// that are read again.
Demand random_demand(std::mt19937& engine, uint32_t max_entries, uint32_t max_accesses);

// Whether each access has the buffer of the one before (Access::again), if each has this lead where
// it can.
std::vector<bool> kept_with(const Demand& demand, uint32_t lead);

// Bytes that the accesses of an iteration move, with these entries pinned and these buffers kept.
uint64_t moved_bytes(const Demand& demand, const std::vector<bool>& pinned,
                     const std::vector<bool>& kept);

// What pinning these entries takes: rows, logs and indexes, each in multiples of 256.
uint64_t pinned_bytes(const Demand& demand, const std::vector<bool>& pinned);

// The height of the packed buffers with these entries pinned, each with this lead where it can.
uint64_t pool_bytes(const Demand& demand, const std::vector<bool>& pinned, uint32_t lead);

}  // namespace phub::geeps
