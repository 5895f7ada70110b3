// Boxes of one, two and four NUMA nodes, over every transport that a machine without RDMA has: the
// sums that come back are those of a loop over the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

#include "kernels/kernels.h"
#include "tests/worker/box.h"
#include "transport/tcp/transport.h"

namespace phub {
namespace topology_test {

using testing::Box;
using testing::each_rank;

constexpr uint32_t kRanks = 3;
constexpr uint64_t kRounds = 4;

// Small integers: exact in f16, in any order.
float gradient_of(uint32_t rank, uint64_t round, size_t key, size_t element) {
  return static_cast<float>((rank * 7 + round * 5 + key * 3 + element) % 31);
}
float initial_of(size_t key, size_t element) {
  return static_cast<float>((key * 11 + element) % 13);
}

struct Job {
  std::string name, consistency = "bsp", gradient_dtype = "f32", optimizer = "none";
};

JobSpec spec_of(const Job& job) {
  JobSpec spec;
  spec.name = job.name;
  // Whole chunks, odd ends, and keys of less than a chunk, so that every queue has some of each.
  spec.keys = {{.name = "a", .elements = 1},     {.name = "b", .elements = 33},
               {.name = "c", .elements = 5001},  {.name = "d", .elements = 8192},
               {.name = "e", .elements = 20011}, {.name = "f", .elements = 3}};
  spec.chunk_elements = 256;
  spec.world_size = kRanks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.consistency = job.consistency;
  spec.gradient_dtype = job.gradient_dtype;
  spec.optimizer = job.optimizer;
  if (job.optimizer != "none") {
    spec.initial = "broadcast";
    spec.hyper = {{"lr", 1.0}};
  }
  return spec;
}

// Of lock-step, the sum of the last round; of SGD at rate 1, what is left of the initial
// parameters; out of step, the sum of all rounds.
float expected_of(const Job& job, size_t key, size_t element) {
  const bool all = job.optimizer != "none" || job.consistency != "bsp";
  float sum = 0;
  for (uint64_t round = all ? 1 : kRounds; round <= kRounds; ++round) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) sum += gradient_of(rank, round, key, element);
  }
  return job.optimizer == "none" ? sum : initial_of(key, element) - sum;
}

void run(Box& box, const std::string& transport, const Job& job) {
  SCOPED_TRACE(job.name);
  const JobSpec spec = spec_of(job);
  std::vector<float> initial;
  for (size_t k = 0; k < spec.keys.size() && job.optimizer != "none"; ++k) {
    for (size_t e = 0; e < spec.keys[k].elements; ++e) initial.push_back(initial_of(k, e));
  }
  const auto type = *kernels::parse_dtype(job.gradient_dtype);
  each_rank(kRanks, [&](uint32_t rank) {
    WorkerOptions options = box.options(spec);
    options.transport = transport;
    options.rank = static_cast<int32_t>(rank);
    Worker worker(options);
    worker.broadcast(rank == 0 ? initial : std::vector<float>{});
    for (uint64_t round = 1; round <= kRounds; ++round) {
      for (size_t k = 0; k < spec.keys.size(); ++k) {
        const size_t n = spec.keys[k].elements;
        std::vector<float> gradient(n);
        for (size_t e = 0; e < n; ++e) gradient[e] = gradient_of(rank, round, k, e);
        kernels::convert(gradient.data(), kernels::DType::kF32, worker.gradient_bytes(k).data(),
                         type, n);
        worker.push(k);
      }
      for (size_t k = 0; k < spec.keys.size(); ++k) worker.wait(k);
    }
    worker.barrier();  // out of step, others may be behind
    for (size_t k = 0; k < spec.keys.size(); ++k) {
      if (job.consistency != "bsp") {  // one more update, of nothing, brings what all of them did
        worker.push_null(k);
        worker.wait(k);
      }
      const auto bytes = worker.parameter_bytes(k);
      std::vector<float> values(spec.keys[k].elements);
      ASSERT_EQ(bytes.size(), values.size() * sizeof(float));
      std::memcpy(values.data(), bytes.data(), bytes.size());
      for (size_t e = 0; e < values.size(); ++e) {
        ASSERT_EQ(values[e], expected_of(job, k, e)) << "rank " << rank << " key " << k << " " << e;
      }
    }
    worker.leave();
  });
}

class Topologies : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Topologies, EverySumIsRight) {
  const auto& [topology, transport] = GetParam();
  Box box(topology);
  run(box, transport, {.name = "sums"});
  run(box, transport, {.name = "parameters", .gradient_dtype = "f16", .optimizer = "sgd"});
  run(box, transport, {.name = "out-of-step", .consistency = "async"});
}

// A box with more addresses than cores: every worker's bytes are spread over all of them.
TEST(Addresses, EachCarriesItsShare) {
  const std::vector<std::string> addresses = {"127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4",
                                              "127.0.0.5"};
  std::vector<TcpNic> nics;
  for (const std::string& address : addresses) nics.push_back({address});
  Box box("pack:2 core:1 pu:1", uint64_t{1} << 33, [&](std::unique_ptr<Transport> transport) {
    return transport->name() == "tcp" ? make_tcp_transport({.nics = nics}) : std::move(transport);
  });
  run(box, "tcp", {.name = "sums"});
  JobSpec spec = spec_of({.name = "where"});
  spec.world_size = 1;
  WorkerOptions options = box.options(spec);
  options.transport = "tcp";
  Worker worker(options);
  worker.broadcast({});
  for (const std::string& address : addresses) {
    EXPECT_THAT(worker.connection(), ::testing::HasSubstr(" to " + address + ":"));
  }
  for (size_t k = 0; k < spec.keys.size(); ++k) worker.push_pull(k);
  std::vector<uint64_t> bytes;
  for (const NodeStatus& node : box.status().nodes) {
    for (const NicStatus& nic : node.nics) {
      if (nic.transport == "tcp") bytes.push_back(nic.flow.bytes_in);
    }
  }
  ASSERT_EQ(bytes.size(), addresses.size());
  const auto [least, most] = std::ranges::minmax(bytes);
  EXPECT_GT(least, 0u);
  EXPECT_LE(most * 10, least * 11);
  worker.leave();
}

INSTANTIATE_TEST_SUITE_P(
    All, Topologies,
    ::testing::Combine(::testing::Values("pack:1 core:2 pu:1", "pack:2 core:1 pu:1",
                                         "pack:2 core:2 pu:1", "pack:4 core:1 pu:1"),
                       ::testing::Values("shm", "tcp")),
    [](const auto& info) {
      const std::string& topology = std::get<0>(info.param);
      return std::string(topology.substr(5, 1)) + "nodes" + topology.substr(12, 1) + "cores" +
             std::get<1>(info.param);
    });

}  // namespace topology_test
}  // namespace phub
