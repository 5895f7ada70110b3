// Makes a cache's tables: their pieces, their memory, and their keys of the exchange.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/tasks.h"

namespace phub::geeps {

// Throws Error(kInvalid) if tables and exchange do not fit together. REQUIRES: device and exchange
// outlive the tables.
std::vector<Table> make_tables(Device& device, Exchange& exchange, uint32_t partitions,
                               const std::vector<TableSpec>& specs);

}  // namespace phub::geeps
