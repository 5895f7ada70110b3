// A box with more addresses than cores (any_job_test: boxes of one, two and four NUMA nodes).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/worker/box.h"
#include "tests/worker/grouped_training.h"
#include "transport/tcp/transport.h"

namespace phub::testing {
namespace topology_test {

// Every worker's bytes are spread over all of them.
TEST(Addresses, EachCarriesItsShare) {
  const std::vector<std::string> addresses = {"127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4",
                                              "127.0.0.5"};
  std::vector<TcpNic> nics;
  for (const std::string& address : addresses) nics.push_back({address});
  Box box("pack:2 core:1 pu:1", uint64_t{1} << 33, [&](std::unique_ptr<Transport> transport) {
    return transport->name() == "tcp" ? make_tcp_transport({.nics = nics}) : std::move(transport);
  });
  const auto over_tcp = [&](const JobSpec& spec) {
    WorkerOptions options = box.options(spec);
    options.transport = "tcp";
    return options;
  };
  GroupedTraining run{.spec = grouped_spec("sums", 3, "")};
  run.spec.keys[1].elements = 30'000;
  expect_as_alone(
      run, [&](uint32_t) { return over_tcp(run.spec); }, [&] { return box.log("sums"); });

  run.spec.name = "where";
  run.spec.world_size = 1;
  Worker worker(over_tcp(run.spec));
  worker.broadcast({});
  for (const std::string& address : addresses) {
    EXPECT_THAT(worker.connection(), ::testing::HasSubstr(" to " + address + ":"));
  }
  for (size_t k = 0; k < run.spec.keys.size(); ++k) worker.push_pull(k);
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

}  // namespace topology_test
}  // namespace phub::testing
