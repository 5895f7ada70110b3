// The command line of zerocompute.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernels.h"
#include "phub/plan/models.h"

namespace phub {

struct ZerocomputeOptions {
  std::vector<KeyTable> models;  // those of --model or the sweep, in the order given
  std::vector<uint32_t> workers = {4};
  uint32_t jobs = 1;      // at the same time
  bool one_rank = false;  // run the rank of the launcher's environment; `workers` is its world
  uint32_t rank = 0;      // with one_rank
  std::string job;        // with one_rank: the prefix of the jobs' names on the server
  std::string transport = "shm";
  std::string groups;  // the jobs' order of additions (transport/control/rank_tree.h)
  kernels::Optimizer optimizer = kernels::Optimizer::kNesterov;
  kernels::DType dtype = kernels::DType::kF32;    // the format of the parameters that come back
  kernels::DType format = kernels::DType::kF32;   // the format of the gradients, but for:
  std::string factors, rows;                      // as they were given; the models' keys have them
  kernels::DType results = kernels::DType::kF32;  // sent back: dtype, or coded differences
  std::vector<uint32_t> chunk_elements = {8192};  // one, or a sweep
  bool sum = true;                                // --no-sum: notifications only
  bool optimize = true;                           // --no-optimize: sums come back
  // What each worker has in memory of its own: "results", which it pulls, or "all" for gradients,
  // too, where both are registered; empty: nothing.
  std::string copy;
  uint64_t warmup = 3;
  uint64_t rounds = 0;  // 0: by seconds
  double seconds = 5;
  bool limit = true;   // measure the memory's limit
  std::string budget;  // for each NIC of workers and of its own server; empty: none
  std::string send_order = "priority";
  double link_gbps = 0;                      // a worker's link, for the verdict; 0: not known
  std::string server;                        // empty: start one
  std::vector<std::string> serve_arguments;  // for the one that is started
  std::string json;                          // file; empty: none
  bool quiet = false;                        // no progress lines
};

// Parses the arguments. Returns nullopt if they ask for help, which was printed to stdout. Throws
// Error(kInvalid) with one line that names the argument and the problem.
std::optional<ZerocomputeOptions> parse_zerocompute_options(int argc, const char* const* argv);

// The words of a text as a shell has them: spaces part them, and 'quotes', "quotes" and a backslash
// keep what they hold together. Nothing is expanded. Throws as above: a quote does not end.
std::vector<std::string> shell_words(std::string_view text, std::string_view argument);

// Bytes from "4096", "4K", "1.5M", "1G" (powers of 1024; "KB" and "KiB" mean "K"). Throws as above.
uint64_t parse_size(std::string_view text);

// Sizes from `from` up to and including `to`, each `factor` times the one before.
std::vector<uint64_t> sweep_sizes(uint64_t from, uint64_t to, double factor);

// A model of one key whose gradient is `bytes` long.
KeyTable table_of_size(uint64_t bytes, kernels::DType dtype);

// "97.5 MiB", "4 KiB", "1000 B".
std::string size_text(uint64_t bytes);

}  // namespace phub
