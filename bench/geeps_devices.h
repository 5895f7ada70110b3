// A training on several devices of this process, whose gradients CPU threads sum while backward
// goes on (003, section 3): weak scaling, with the same images on each device.
#pragma once

#include <cstdint>
#include <functional>

#include "bench/geeps_net.h"

namespace phub::geeps_bench {

struct Devices {
  uint32_t devices = 4;
  uint32_t warmup = 2, iterations = 10;
  // Called in each device's thread before each of its iterations, counted from 0. What it throws
  // ends the training. Empty: nothing is called.
  std::function<void(uint32_t device, uint32_t iteration)> before;
};

struct DevicesResult {
  double seconds = 0;  // per iteration, mean over the devices
  uint64_t bytes_copied_by_caller = 0;
};

// The GPUs of 003's machine (Tesla P100, NVLink) with AlexNet and its 256 images: copies at the
// rate that table 4 has from GPU to CPU, and computing as long as table 3 says of forward and
// backward. Assumed rates of the device say how layers share that time.
Machine p100_machine();

// Everything fits each device's memory. A thread for each device trains; the optimizer's is this
// process's, too (StandaloneExchange). Device i writes i + 1 to both ends of each layer's update in
// each iteration, and after the last one the parameters there are compared with what the optimizer
// makes of the sums. Throws Error: kInternal if they differ; otherwise what the first device threw
// that failed, when all have ended.
DevicesResult train(const Devices& devices, const Net& net, const Machine& machine,
                    const Style& style);

}  // namespace phub::geeps_bench
