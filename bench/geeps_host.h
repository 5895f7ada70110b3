// Parameters without a cache in device memory, as GeePS's applications had them from a parameter
// server of the host (figure 5): the application copies them itself, each time it uses them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/tables.h"

namespace phub::geeps_bench {

// Every call blocks until its copies are done, and all that was computed before. The exchange works
// beside it, as such servers did: a clock pushes a table, and only the next read waits for it.
// Errors are those of the device and of the exchange.
class HostParameters {
 public:
  // The exchange's keys are those of the tables that are not local, in their order. REQUIRES: they
  // and the stream outlive this.
  HostParameters(Device& device, geeps::Exchange& exchange,
                 std::span<const geeps::TableSpec> tables, Stream& compute);

  // Server's memory → staging → device. Returns the place there, the same for all tables.
  const float* read(uint32_t table);
  float* gradient() { return gradient_.floats(); }  // on the device, for the next update()
  // Adds it: device → staging → server's memory. REQUIRES: read() since clock().
  void update(uint32_t table);
  void clock(uint32_t table);  // those read first have priority
  void wait_all();             // for the results of all pushes

  // Device memory for the parameters and the updates of one table.
  static size_t device_bytes(std::span<const geeps::TableSpec> tables);

 private:
  struct Table {
    size_t key = 0;
    uint32_t updates = 0;  // since clock()
  };

  void await(size_t key);

  geeps::Exchange& exchange_;
  Stream& compute_;
  std::vector<Table> tables_;
  std::vector<bool> here_;  // by key
  DeviceMemory parameters_, gradient_;
  HostMemory staging_;
};

}  // namespace phub::geeps_bench
