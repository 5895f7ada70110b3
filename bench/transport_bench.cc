// The cost of notifications over shared memory: posting and polling, and round trips between two
// threads that spin or sleep.
#include <benchmark/benchmark.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "transport/shm/transport.h"

namespace phub {
namespace {

constexpr uint32_t kQueueChunks = 1600;  // half of ResNet-50's

// A box with one core and `ranks` connected workers.
class Links {
 public:
  explicit Links(uint32_t ranks) {
    std::string name = (std::filesystem::temp_directory_path() / "phub-bench-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    directory_ = name;
    transport_ = make_shm_transport({.socket_dir = directory_});
    LinkLayout layout;
    layout.max_ranks = ranks;
    layout.cores = 1;
    layout.queue_chunks = {kQueueChunks};
    layout.core_node = {0};
    layout.slots_bytes = layout.results_bytes = 4096;
    box_ = transport_->open_job(layout);
    std::vector<TransportEvent> events;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const Offer offer = box_->admit(rank, 1);
      auto link = std::async(std::launch::async, [&] { return connect_shm(offer, layout, 10000); });
      while (link.wait_for(std::chrono::microseconds(100)) != std::future_status::ready) {
        transport_->handle_events(events);
      }
      workers_.push_back(link.get());
      box().attach(rank, 1);
    }
  }
  ~Links() {
    for (uint32_t rank = 0; rank < workers_.size(); ++rank) box().detach(rank);
    workers_.clear();
    box_.reset();
    transport_.reset();
    std::filesystem::remove_all(directory_);
  }
  BoxEndpoint& box() { return box_->endpoint(0); }
  Endpoint& worker(uint32_t rank) { return workers_[rank]->endpoint(); }

 private:
  std::string directory_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<BoxLink> box_;
  std::vector<std::unique_ptr<WorkerLink>> workers_;
};

// One immediate from post to poll, both ends on one core, published in batches.
void immediates(benchmark::State& state) {
  Links links(1);
  const auto batch = static_cast<uint32_t>(state.range(0));
  std::array<Arrival, 64> out;
  for ([[maybe_unused]] const auto _ : state) {
    for (uint32_t i = 0; i < batch; ++i) links.worker(0).post({0}, {0, 0, 0, i});
    links.worker(0).flush();
    for (size_t seen = 0; seen < batch;) seen += links.box().poll(out);
  }
  state.SetItemsProcessed(state.iterations() * batch);
}

// A poll that finds nothing.
void idle_poll(benchmark::State& state) {
  Links links(static_cast<uint32_t>(state.range(0)));
  std::array<Arrival, 64> out;
  for ([[maybe_unused]] const auto _ : state) benchmark::DoNotOptimize(links.box().poll(out));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

// Waits until an arrival is there.
class Waiter {
 public:
  Waiter(Endpoint& endpoint, bool sleeps) : endpoint_(endpoint), sleeps_(sleeps) {
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLET;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, endpoint.wake_fd(), &event);
  }
  ~Waiter() { close(epoll_); }
  uint32_t next() {
    std::array<Arrival, 1> out;
    while (endpoint_.poll(out) == 0) {
      if (!sleeps_ || !endpoint_.arm({})) continue;
      epoll_event event = {};
      epoll_wait(epoll_, &event, 1, 1000);
      endpoint_.disarm();
    }
    return out[0].imm;
  }

 private:
  Endpoint& endpoint_;
  const bool sleeps_;
  const int epoll_ = epoll_create1(EPOLL_CLOEXEC);
};

void send(Endpoint& endpoint, uint32_t imm) {
  endpoint.post({}, {0, 0, 0, imm});
  endpoint.flush();
}

// A round trip between two threads. If they sleep, it includes two wake-ups.
void round_trip(benchmark::State& state, bool sleeps) {
  Links links(1);
  std::thread echo([&] {
    Waiter waiter(links.worker(0), sleeps);
    for (uint32_t imm = 0; imm != 1;) {
      imm = waiter.next();
      send(links.worker(0), imm);
    }
  });
  Waiter waiter(links.box(), sleeps);
  for ([[maybe_unused]] const auto _ : state) {
    send(links.box(), 0);
    waiter.next();
  }
  send(links.box(), 1);
  echo.join();
}

// A stream between two threads that spin.
void stream(benchmark::State& state) {
  Links links(1);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (uint32_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
      links.worker(0).post({0}, {0, 0, 0, i});
      if (i % 16 == 0) links.worker(0).flush();
    }
  });
  std::array<Arrival, 64> out;
  int64_t seen = 0;
  for ([[maybe_unused]] const auto _ : state) {
    for (size_t taken = 0; taken == 0; seen += static_cast<int64_t>(taken)) {
      taken = links.box().poll(out);
    }
  }
  state.SetItemsProcessed(seen);
  stop = true;
  writer.join();
}

BENCHMARK(immediates)->Arg(1)->Arg(16)->Arg(1024);
BENCHMARK(idle_poll)->Arg(1)->Arg(8)->Arg(64);
BENCHMARK(stream)->UseRealTime();
BENCHMARK_CAPTURE(round_trip, spinning, false)->UseRealTime();
BENCHMARK_CAPTURE(round_trip, sleeping, true)->UseRealTime();

}  // namespace
}  // namespace phub

BENCHMARK_MAIN();
