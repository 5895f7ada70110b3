// One worker process of a measurement.
#pragma once

#include "bench/zerocompute_checker.h"
#include "bench/zerocompute_shared.h"
#include "phub/models.h"

namespace phub {

// What is measured: one row of the table.
struct CaseSpec {
  KeyTable table;
  uint32_t workers = 1;
  kernels::DType dtype = kernels::DType::kF32;
  CheckerOptions checker;
  bool copy = false;
  WorkerOptions worker;  // server and job; the rank is set by each process
};

// Runs in the child: joins as `rank` and follows the coordinator's orders. Returns the exit status;
// what went wrong is in the rank's slot.
int run_worker(const CaseSpec& spec, SharedCase& shared, uint32_t rank);

}  // namespace phub
