// The exchange of zerocompute with MPI_Allreduce: every process contributes a gradient and ends up
// with the sum. Same gradients, same check, same clock; rank 0 prints one line of JSON.
//
//   mpirun -np 4 peers_mpi ELEMENTS WARMUP ROUNDS
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "bench/peers.h"
#include "bench/zerocompute/checker.h"
#include "bench/zerocompute/gradients.h"
#include "bench/zerocompute/measures.h"

namespace phub {
namespace {

int run(uint64_t elements, uint64_t warmup, uint64_t rounds) {
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  std::vector<float> gradient(elements), sum(elements);
  const Checker checker({.ranks = static_cast<uint32_t>(ranks), .elements = elements}, {});
  std::vector<double> round_us;
  MachineUse machine;
  uint64_t wrong = 0;
  for (uint64_t round = 1; round <= warmup + rounds; ++round) {
    fill_gradients(static_cast<uint32_t>(rank), round, 0, elements, kernels::DType::kF32,
                   gradient.data());
    spoil_if_asked(static_cast<uint32_t>(rank), gradient.data());
    MPI_Barrier(MPI_COMM_WORLD);
    machine.start();
    double times[2] = {-MPI_Wtime(), 0};  // the start negated: one reduction finds both ends
    MPI_Allreduce(gradient.data(), sum.data(), static_cast<int>(elements), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
    times[1] = MPI_Wtime();
    if (round > warmup) machine.stop();
    MPI_Barrier(MPI_COMM_WORLD);
    double latest[2];
    MPI_Allreduce(times, latest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (round > warmup) round_us.push_back((latest[1] + latest[0]) * 1e6);
    // As in zerocompute: all elements, each on one process per round.
    const uint64_t part = (static_cast<uint64_t>(rank) + round) % static_cast<uint64_t>(ranks);
    const uint64_t first = elements * part / static_cast<uint64_t>(ranks);
    const uint64_t last = elements * (part + 1) / static_cast<uint64_t>(ranks);
    wrong += checker.check(round, first, last - first, sum.data() + first).count;
  }
  uint64_t all_wrong = 0;
  MPI_Reduce(&wrong, &all_wrong, 1, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    print_line({{"workers", ranks},
                {"bytes", elements * sizeof(float)},
                {"rounds", rounds},
                {"wrong", all_wrong},
                {"machine_busy", machine.busy()}},
               round_us);
  }
  return 0;
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  uint64_t elements = 0, warmup = 0, rounds = 0;
  if (argc != 4 || !phub::parse(argv[1], 1, INT32_MAX, elements) ||
      !phub::parse(argv[2], 0, 1000000, warmup) || !phub::parse(argv[3], 1, 1000000, rounds)) {
    std::fprintf(stderr, "usage: mpirun -np WORKERS peers_mpi ELEMENTS WARMUP ROUNDS\n");
    return 2;
  }
  MPI_Init(&argc, &argv);
  const int status = phub::run(elements, warmup, rounds);
  MPI_Finalize();
  return status;
}
