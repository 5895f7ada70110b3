// The exchange of zerocompute with gloo over TCP: every process contributes a gradient and ends up
// with the sum. Same gradients, same check, same clock as peers_mpi; rank 0 prints one line of JSON
// per algorithm.
//
//   RANK=0 WORLD_SIZE=4 peers_gloo STORE HOST ALGORITHMS ELEMENTS WARMUP ROUNDS
//
// one process per rank. STORE is a folder, empty before, in which the ranks find each other; HOST
// the address of this rank that the others reach; ALGORITHMS one or more of the names below with
// commas.
#include <gloo/allreduce.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "bench/peers.h"
#include "bench/zerocompute/checker.h"
#include "bench/zerocompute/gradients.h"
#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/shared.h"

namespace phub {
namespace {

using Context = std::shared_ptr<gloo::Context>;

// Sums `data` of all ranks in place.
using Allreduce = std::function<void()>;

template <typename T>
void collective(const Context& context, gloo::AllreduceOptions::Algorithm algorithm, T* data,
                size_t n, void (*reduce)(void*, const void*, const void*, size_t)) {
  gloo::AllreduceOptions options(context);
  options.setAlgorithm(algorithm);
  options.setOutput(data, n);
  options.setReduceFunction(reduce);
  gloo::allreduce(options);
}

// The older interface: an object that is bound to its memory once.
template <typename Algorithm>
Allreduce bound(const Context& context, float* data, size_t n) {
  auto algorithm =
      std::make_shared<Algorithm>(context, std::vector<float*>{data}, static_cast<int>(n));
  return [algorithm] { algorithm->run(); };
}

// Nothing if there is no algorithm of that name.
Allreduce make_allreduce(const std::string& name, const Context& context, float* data, size_t n) {
  using Options = gloo::AllreduceOptions::Algorithm;
  if (name == "ring") {
    return [=] { collective(context, Options::RING, data, n, &gloo::sum<float>); };
  }
  if (name == "bcube") {
    return [=] { collective(context, Options::BCUBE, data, n, &gloo::sum<float>); };
  }
  if (name == "ring_chunked") {
    return bound<gloo::AllreduceRingChunked<float>>(context, data, n);
  }
  if (name == "halving_doubling") {
    return bound<gloo::AllreduceHalvingDoubling<float>>(context, data, n);
  }
  return nullptr;
}

void barrier(const Context& context) {
  gloo::BarrierOptions options(context);
  gloo::barrier(options);
}

struct Measured {
  std::vector<double> round_us;
  MachineUse machine;
  uint64_t wrong = 0;
};

// The clock is CLOCK_MONOTONIC, which the processes of one machine share.
Measured measure(const Context& context, const std::string& name, uint64_t elements,
                 uint64_t warmup, uint64_t rounds) {
  const auto rank = static_cast<uint32_t>(context->rank);
  const auto ranks = static_cast<uint32_t>(context->size);
  std::vector<float> data(elements);
  const Allreduce allreduce = make_allreduce(name, context, data.data(), elements);
  if (!allreduce) throw std::runtime_error("unknown algorithm '" + name + "'");
  const Checker checker({.ranks = ranks, .elements = elements}, {});
  Measured measured;
  for (uint64_t round = 1; round <= warmup + rounds; ++round) {
    fill_gradients(rank, round, 0, elements, kernels::DType::kF32, data.data());
    spoil_if_asked(rank, data.data());
    barrier(context);
    measured.machine.start();
    int64_t times[2] = {-monotonic_ns(), 0};  // the start negated: one reduction finds both ends
    allreduce();
    times[1] = monotonic_ns();
    if (round > warmup) measured.machine.stop();
    barrier(context);
    collective(context, gloo::AllreduceOptions::Algorithm::RING, times, 2, &gloo::max<int64_t>);
    if (round > warmup) {
      measured.round_us.push_back(static_cast<double>(times[1] + times[0]) / 1e3);
    }
    // As in zerocompute: all elements, each on one process per round.
    const uint64_t part = (rank + round) % ranks;
    const uint64_t first = elements * part / ranks;
    const uint64_t last = elements * (part + 1) / ranks;
    measured.wrong += checker.check(round, first, last - first, data.data() + first).count;
  }
  collective(context, gloo::AllreduceOptions::Algorithm::RING, &measured.wrong, 1,
             &gloo::sum<uint64_t>);
  return measured;
}

int run(uint32_t rank, uint32_t ranks, char** argv, uint64_t elements, uint64_t warmup,
        uint64_t rounds) {
  gloo::transport::tcp::attr attributes;
  attributes.hostname = argv[2];
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
  gloo::rendezvous::FileStore store(argv[1]);
  const auto context =
      std::make_shared<gloo::rendezvous::Context>(static_cast<int>(rank), static_cast<int>(ranks));
  context->connectFullMesh(store, device);
  std::istringstream names(argv[3]);
  for (std::string name; std::getline(names, name, ',');) {
    const Measured measured = measure(context, name, elements, warmup, rounds);
    if (rank != 0) continue;
    print_line({{"algorithm", name},
                {"workers", ranks},
                {"bytes", elements * sizeof(float)},
                {"rounds", rounds},
                {"wrong", measured.wrong},
                {"machine_busy", measured.machine.busy()}},
               measured.round_us);
  }
  barrier(context);  // no process leaves while another still needs it
  return 0;
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  uint64_t elements = 0, warmup = 0, rounds = 0, rank = 0, ranks = 0;
  if (argc != 7 || !phub::parse(argv[4], 1, INT32_MAX, elements) ||
      !phub::parse(argv[5], 0, 1000000, warmup) || !phub::parse(argv[6], 1, 1000000, rounds) ||
      !phub::parse(std::getenv("WORLD_SIZE"), 2, 512, ranks) ||
      !phub::parse(std::getenv("RANK"), 0, ranks - 1, rank)) {
    std::fprintf(stderr,
                 "usage: RANK=0 WORLD_SIZE=4 peers_gloo STORE HOST ALGORITHMS ELEMENTS WARMUP "
                 "ROUNDS\nalgorithms: ring,ring_chunked,halving_doubling,bcube\n");
    return 2;
  }
  try {
    return phub::run(static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks), argv, elements,
                     warmup, rounds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peers_gloo: rank %d: %s\n", static_cast<int>(rank), error.what());
    return 1;
  }
}
