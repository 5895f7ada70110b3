// The exchange of zerocompute with ps-lite over TCP: every worker pushes a gradient and gets the
// sum from the servers. Same gradients, same check, same clock as peers_gloo; a worker prints one
// line of JSON.
//
//   DMLC_ROLE=worker … peers_ps_lite STORE ELEMENTS WARMUP ROUNDS
//
// one process per role: a scheduler, servers and workers, as ps-lite's own variables say. STORE is
// a folder, empty before, in which the workers leave their times.
//
// The model is cut into pieces of 1 MiB at most, which are dealt out to the servers. A piece is
// pushed and pulled in one request, which the server answers when it has the sum of all workers:
// fewer messages than with a push and a pull of its own.
#include "bench/peers_ps_lite.h"

#include <ps/ps.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "bench/peers.h"
#include "bench/zerocompute/checker.h"
#include "bench/zerocompute/gradients.h"
#include "bench/zerocompute/measures.h"
#include "bench/zerocompute/shared.h"

namespace phub {
namespace {

constexpr uint64_t kMostElements = 1 << 18;  // of a piece

struct Options {
  std::string store;
  uint64_t elements = 0, warmup = 0, rounds = 0;
};

struct Piece {
  ps::SArray<ps::Key> key;
  ps::SArray<float> gradient, sum;  // parts of the worker's arrays
};

std::vector<Piece> cut(const Options& o, std::vector<float>& gradient, std::vector<float>& sum) {
  const std::vector<ps::Range>& ranges = ps::Postoffice::Get()->GetServerKeyRanges();
  const uint64_t share = (o.elements + ranges.size() - 1) / ranges.size();  // every server has one
  const uint64_t most = std::min(kMostElements, share);
  std::vector<Piece> pieces;
  for (uint64_t first = 0; first < o.elements; first += most) {
    const uint64_t n = std::min(most, o.elements - first);
    const size_t index = pieces.size();
    Piece piece;
    piece.key.push_back(ranges[index % ranges.size()].begin() + index);
    piece.gradient.reset(gradient.data() + first, n, [](float*) {});
    piece.sum.reset(sum.data() + first, n, [](float*) {});
    pieces.push_back(piece);
  }
  return pieces;
}

void barrier() { ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup); }

struct Times {
  int64_t start_ns = 0, end_ns = 0;
};

// CLOCK_MONOTONIC is one for all processes of a machine.
std::vector<Times> exchange(const Options& o, uint32_t rank, uint32_t ranks, uint64_t& wrong) {
  ps::KVWorker<float> worker(0, 0);
  std::vector<float> gradient(o.elements), sum(o.elements);
  std::vector<Piece> pieces = cut(o, gradient, sum);
  const Checker checker({.ranks = ranks, .elements = o.elements}, {});
  std::vector<Times> times;
  for (uint64_t round = 1; round <= o.warmup + o.rounds; ++round) {
    fill_gradients(rank, round, 0, o.elements, kernels::DType::kF32,
                   reinterpret_cast<std::byte*>(gradient.data()));
    spoil_if_asked(rank, gradient.data());
    barrier();
    Times now{.start_ns = monotonic_ns()};
    std::vector<int> requests;
    requests.reserve(pieces.size());
    for (Piece& piece : pieces) {
      requests.push_back(worker.ZPushPull(piece.key, piece.gradient, &piece.sum));
    }
    for (const int request : requests) worker.Wait(request);
    now.end_ns = monotonic_ns();
    barrier();
    if (round > o.warmup) times.push_back(now);
    wrong += checker.check(round, 0, o.elements, reinterpret_cast<std::byte*>(sum.data())).count;
  }
  return times;
}

std::string file_of(const Options& o, uint32_t rank) {
  return o.store + "/" + std::to_string(rank);
}

void work(const Options& o) {
  const auto rank = static_cast<uint32_t>(ps::MyRank());
  const auto ranks = static_cast<uint32_t>(ps::NumWorkers());
  uint64_t wrong = 0;
  const std::vector<Times> times = exchange(o, rank, ranks, wrong);
  std::ofstream file(file_of(o, rank));
  file << wrong << '\n';
  for (const Times& each : times) file << each.start_ns << ' ' << each.end_ns << '\n';
  file.close();
  barrier();
  if (rank != 0) return;
  std::vector<Times> all = times;
  for (uint32_t other = 1; other < ranks; ++other) {
    std::ifstream others(file_of(o, other));
    uint64_t more = 0;
    others >> more;
    wrong += more;
    for (Times& each : all) {
      Times theirs;
      if (!(others >> theirs.start_ns >> theirs.end_ns)) {
        throw std::runtime_error("no times of worker " + std::to_string(other));
      }
      each.start_ns = std::min(each.start_ns, theirs.start_ns);
      each.end_ns = std::max(each.end_ns, theirs.end_ns);
    }
  }
  std::vector<double> round_us;
  for (const Times& each : all) {
    round_us.push_back(static_cast<double>(each.end_ns - each.start_ns) / 1e3);
  }
  print_line({{"workers", ranks},
              {"bytes", o.elements * sizeof(float)},
              {"rounds", o.rounds},
              {"servers", ps::NumServers()},
              {"wrong", wrong}},
             round_us);
}

}  // namespace
}  // namespace phub

int main(int argc, char** argv) {
  phub::Options o;
  if (argc != 5 || std::getenv("DMLC_ROLE") == nullptr ||
      !phub::parse(argv[2], 1, INT32_MAX, o.elements) ||
      !phub::parse(argv[3], 0, 1000000, o.warmup) || !phub::parse(argv[4], 1, 1000000, o.rounds)) {
    std::fprintf(stderr, "usage: DMLC_ROLE=worker … peers_ps_lite STORE ELEMENTS WARMUP ROUNDS\n");
    return 2;
  }
  o.store = argv[1];
  try {
    ps::Start(0, "peers_ps_lite");
    if (ps::IsServer()) phub::serve_sums();
    if (ps::IsWorker()) phub::work(o);
    ps::Finalize(0, true);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peers_ps_lite: %s\n", error.what());
    return 1;
  }
}
