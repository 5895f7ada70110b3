// page_job SERVER: jobs for tests/scripts/page_test to look at, of real workers in one process.
// "hung": three ranks whose last one stops before a key with a hostile name. "half": one of its two
// ranks never comes. Says "ready" when both are so, and stays until it is killed.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "worker/worker.h"

namespace {

constexpr uint32_t kRanks = 3;
constexpr int kRounds = 200;

// Exits: the others would wait for ever.
[[noreturn]] void give_up(const std::exception& error) {
  std::fprintf(stderr, "page_job: %s\n", error.what());
  std::_Exit(1);
}

phub::WorkerOptions options_of(const char* server, const char* job, uint32_t ranks) {
  phub::WorkerOptions options;
  options.server = server;
  options.spec.name = job;
  options.spec.world_size = ranks;
  options.spec.optimizer = "sgd";
  options.spec.keys = {{.name = "layer1.weight", .elements = 300000},
                       {.name = "<img src=x onerror=\"document.title='owned'\">", .elements = 9000},
                       {.name = "layer2.weight", .elements = 100000}};
  return options;
}

void hang(const char* server, uint32_t rank, std::latch& hung) {
  phub::WorkerOptions options = options_of(server, "hung", kRanks);
  options.rank = static_cast<int32_t>(rank);
  phub::Worker worker(options);
  for (int round = 0; round < kRounds; ++round) {
    if (rank == 0) worker.report_loss(0.5, 0, "validation");
    for (uint32_t key = 0; key < 3; ++key) worker.push(key);
    for (uint32_t key = 0; key < 3; ++key) worker.wait(key);
  }
  worker.push(0);
  if (rank != kRanks - 1) {
    worker.push(1);
    worker.push(2);
  }
  hung.arrive_and_wait();
  for (;;) pause();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: page_job HOST:PORT\n", stderr);
    return 2;
  }
  const char* server = argv[1];
  std::latch hung(kRanks + 1);
  std::vector<std::jthread> threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        hang(server, rank, hung);
      } catch (const std::exception& error) {
        give_up(error);
      }
    });
  }
  threads.emplace_back([server] {
    try {
      phub::WorkerOptions options = options_of(server, "half", 2);
      options.await_ranks = false;
      const phub::Worker worker(options);
      for (;;) pause();
    } catch (const std::exception& error) {
      give_up(error);
    }
  });
  hung.arrive_and_wait();
  std::puts("ready");
  std::fflush(stdout);
  for (;;) pause();
}
