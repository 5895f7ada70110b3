// Connections that break under living workers are made again, and nothing counts twice.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/seeds.h"
#include "tests/worker/box.h"
#include "tests/worker/data_connections.h"
#include "transport/control/control_client.h"

namespace phub {
namespace reconnect_test {

using testing::Box;
using testing::control_port;
using testing::data_connections;
using testing::each_rank;
using testing::is_data_connection;
using testing::Ports;

constexpr uint32_t kRanks = 3;

// The base-4 oracle: rank r pushes a multiple of 4^r, so that a contribution that counted twice, or
// not at all, shows in its digit. Returns how often workers reconnected.
uint64_t exchange_while_connections_break(JobSpec spec, const Ports& control,
                                          const std::function<Box&(uint32_t rank)>& box_of) {
  const uint64_t rounds = std::max<uint64_t>(100, testing::scaled(400));
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  setenv("PHUB_TRANSPORT", "tcp", 1);
  spec.name = "broken";
  spec.keys = {{.name = "large", .elements = 150'000}, {.name = "small", .elements = 5}};
  spec.world_size = kRanks;
  spec.lease_ms = 30'000;  // nobody is to be lost for being slow
  std::atomic<uint32_t> ranks_done = 0;
  std::atomic<uint64_t> reconnections = 0, broken = 0;
  std::thread breaker([&] {
    std::mt19937_64 random(seed);
    while (ranks_done < kRanks) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 + random() % 60));
      const std::vector<int> fds = data_connections(control);
      if (fds.empty()) continue;
      const int fd = fds[random() % fds.size()];
      if (!is_data_connection(fd, control)) continue;  // closed meanwhile, the number used again
      broken += shutdown(fd, SHUT_RDWR) == 0;
    }
  });
  std::exception_ptr failure;
  try {
    each_rank(kRanks, [&](uint32_t rank) {
      struct Done {
        std::atomic<uint32_t>& count;
        ~Done() { ++count; }
      } done{ranks_done};
      Worker worker(box_of(rank).options(spec, rank));
      worker.wait_all();
      // Every second key lies in memory of its own, where the sum replaces the gradient.
      std::vector<std::vector<float>> own(worker.keys());
      for (size_t key = 1; key < worker.keys(); key += 2) {
        own[key].resize(worker.gradient(key).size());
        worker.register_memory(key, {.gradient = own[key].data(), .parameters = own[key].data()});
      }
      for (uint32_t round = 1; round <= rounds; ++round) {
        const float scale = static_cast<float>(round % 7 + 1);
        for (size_t key = 0; key < worker.keys(); ++key) {
          const auto value = scale * std::pow(4.0f, static_cast<float>(rank));
          std::ranges::fill(own[key].empty() ? worker.gradient(key) : std::span(own[key]), value);
          worker.push(key);
        }
        worker.wait_all();
        for (size_t key = 0; key < worker.keys(); ++key) {
          const auto sums =
              own[key].empty() ? worker.parameters(key) : std::span<const float>(own[key]);
          const auto right = std::ranges::count(sums, scale * (1 + 4 + 16));
          ASSERT_EQ(right, sums.size()) << "round " << round << " rank " << rank;
        }
      }
      reconnections += worker.stats().reconnections;
    });
  } catch (...) {
    failure = std::current_exception();
  }
  breaker.join();
  unsetenv("PHUB_TRANSPORT");
  if (failure) std::rethrow_exception(failure);
  EXPECT_GT(broken, 3u);
  return reconnections;
}

void expect_no_loss(Box& box) {
  for (const LogRecord& record : box.log("broken")) {
    EXPECT_NE(record.kind, LogRecord::Kind::kLost) << record.reason;
  }
}

TEST(Reconnect, BrokenConnectionsAreMadeAgainAndNothingCountsTwice) {
  Box box(2);
  EXPECT_GT(exchange_while_connections_break({}, {control_port(box)},
                                             [&](uint32_t) -> Box& { return box; }),
            3u);
  expect_no_loss(box);
}

// What is sent once more is of the format of its own round, which may be the one before a change.
TEST(Reconnect, WhereTheFormatOfGradientsChanges) {
  Box box(2);
  JobSpec spec;  // whole numbers below 8, times powers of two, are codes of fp8
  spec.gradient_dtype = "f32*13,fp8-e4m3*11,f32*7,fp8-e5m2*17,f32*19,fp8-e4m3*9,f32*12,fp8-e5m2";
  EXPECT_GT(exchange_while_connections_break(spec, {control_port(box)},
                                             [&](uint32_t) -> Box& { return box; }),
            3u);
  expect_no_loss(box);
}

// Those between a rack and its parent, too.
TEST(Reconnect, BelowAParent) {
  Box root(2);
  const auto rack = [&] {
    return std::make_unique<Box>("pack:1 core:2 pu:1", uint64_t{1} << 33, Box::Wrap{},
                                 CheckpointOptions{}, root.address());
  };
  const std::unique_ptr<Box> racks[] = {rack(), rack()};
  JobSpec spec;
  spec.groups = "2,1";
  exchange_while_connections_break(
      spec, {control_port(root), control_port(*racks[0]), control_port(*racks[1])},
      [&](uint32_t rank) -> Box& { return *racks[rank / 2]; });
  for (Box* box : {&root, racks[0].get(), racks[1].get()}) expect_no_loss(*box);
}

// The thread that moves bytes meanwhile meets the failure first; who waits later gets the error.
TEST(Reconnect, AJobThatEndsWhileNobodyWaitsIsAnErrorOfTheNextWait) {
  setenv("PHUB_TRANSPORT", "tcp", 1);
  Box box(1);
  JobSpec spec;
  spec.name = "ended";
  spec.keys = {{.name = "key", .elements = 10'000}};
  spec.world_size = 2;
  spec.lease_ms = 3000;
  std::atomic<uint32_t> started = 0;
  std::atomic<bool> over = false;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    for (++started; started < 2;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (rank == 0) {
      worker.push(0);  // never complete: the other rank sends nothing
      ControlClient(box.address()).remove("ended");
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      over = true;
    }
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_THROW(
        {
          worker.push(0);
          worker.wait(0);
        },
        Error);
  });
  unsetenv("PHUB_TRANSPORT");
}

}  // namespace reconnect_test
}  // namespace phub
