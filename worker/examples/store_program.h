// The common part of programs with a store (../iterstore/store.h): their options and threads.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "worker/examples/processes.h"
#include "worker/iterstore/store.h"

namespace phub::examples {

struct StoreProgram {
  iterstore::StoreOptions store;
  uint32_t iterations = 1;
  std::string gather = "virtual";  // so the store learns the accesses: "real", "never"
  bool names_server = false;       // --server or PHUB_SERVER
};

// --server, --job, --world, --rank, --threads, --iterations, --gather, --consistency, --slack.
// Options that are not given come from the environment and from `program`. A rank that is lost ends
// all.
void add_store_options(CLI::App& app, StoreProgram& program);

// The box of a process that is alone and that no server was named for: started beside it, and
// written into `program`. nullptr: it is not alone, or has a server. REQUIRES: the process has one
// thread; the box lives longer than the store. Throws Error(kUnavailable): there is no program for
// it, or it does not start.
std::unique_ptr<OwnServer> own_box(StoreProgram& program);

// That all ranks run this program, with these options and these settings of its own: "seed 5".
// Waits for all. Throws Error(kMismatch) that names the difference; else as a worker does.
void agree(const StoreProgram& program, const std::string& name, std::vector<std::string> settings);

// Runs `run` on each thread of this process, with the number of its part of the data: of rank and
// thread, from 0. Rethrows the exception of the first of them.
void run_threads(iterstore::Store& store, const StoreProgram& program,
                 const std::function<void(iterstore::StoreThread&, uint32_t part)>& run);
uint32_t parts_of(const StoreProgram& program);

// Runs all iterations of one thread, and, as `gather` says, the work before the first or after the
// last.
void run_iterations(iterstore::StoreThread& mine, const StoreProgram& program,
                    const std::function<void(uint32_t iteration)>& iterate);

}  // namespace phub::examples
