// The points of GeePS's figures that bench/plot_geeps draws, each a row of JSON that is printed
// too. `picture` says of which. Throughput is that of the stated machine: as if nothing was slower.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/geeps_net.h"

namespace phub::geeps_bench {

struct Pictures {
  Machine machine;    // the stated one
  double slower = 8;  // by this factor
  double parts = 8;   // parts of the net, one of which is trained
  uint32_t turns = 5, iterations = 5;
  std::string transport = "shm";
  bool tiny = false;
};
using Points = std::vector<nlohmann::json>;

// Figure 8: AdamLike on 1, 2 and 4 of GeePS's machines, with caches and with parameters in host
// memory. `form` (cache, host), `workers`, `images_per_s` of all, `never_waits` (the images of
// devices that never wait), `stalled` (a fraction). It forks: the process has one thread.
Points forms(const Pictures& pictures);

// Figure 12: AdamLike by the budget, with mini-batches of 200 images, and of fewer, of which a
// clock has several. `images` of a mini-batch, `budget_percent` of the memory that holds everything
// of 200 images, `budget_bytes`, `moved_bytes` of a clock, `images_per_s`. If a mini-batch does not
// fit there is no row. Bytes are those of the whole net.
Points batches(const Pictures& pictures);

// Figure 13: fully connected layers of 373 MB on one budget. `layers`, `model_bytes`, `data_bytes`
// (all tables and the log of updates), `budget_bytes`, `connections_per_s`, `busy` (the fraction in
// which the device computes).
Points sizes(const Pictures& pictures);

// AdamLike with mini-batches of 25 to 200 images, of which a clock has 200, on the least memory
// that holds everything with 50. `images` of a mini-batch, `budget_bytes`, `moved_bytes` of a
// clock, `images_per_s`; the same on a device that just holds everything of this mini-batch:
// `all_bytes`, `all_images_per_s`; and `never_waits`, where nothing is waited for. Bytes are those
// of the whole net.
Points minibatches(const Pictures& pictures);

// The gain of several partitions, which copy the pieces of tables (4.2): AdamLike with 35% of the
// memory that holds everything. `partitions`, `images_per_s`, `never_waits`.
Points partitions(const Pictures& pictures);

// The longest videos (5.3) by the budget, with the network of worker/examples/geeps/video.h.
// Budgets are those that just hold 12, 24, 48, 96 and 192 frames without moves. Each has two rows,
// of the `form` kept (so many frames) and swapped: the longest that fit if everything may be moved,
// up to 192. `budget_bytes`, `frames`, `moved_bytes` and `s_per_iteration` of an iteration,
// `ms_per_frame`, `busy`.
Points frames(const Pictures& pictures);

// The largest mini-batch of AlexNet by the budget: `budget_bytes`, `kept` (images if nothing is
// moved), `swapped` (images if everything may be). Plans alone.
Points largest(const Pictures& pictures);

}  // namespace phub::geeps_bench
