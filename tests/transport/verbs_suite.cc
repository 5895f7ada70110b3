// The suite over RDMA, by verbs and by libfabric. A program of its own: it runs where there is a
// device (scripts/rdma-vm).
#include <gmock/gmock.h>

#include "tests/transport/ofi_rig.h"
#include "tests/transport/test_memory_device.h"
#include "tests/transport/transport_suite.h"
#include "tests/transport/verbs_rig.h"

namespace phub {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Every, TransportSuite,
    ::testing::Values(
        TransportFactory{"ofi_rxm_verbs", [] { return OfiRig::over("verbs;ofi_rxm"); }},
        TransportFactory{"verbs", [] { return std::make_unique<VerbsRig>(); }},
        TransportFactory{
            "verbs_device",
            [] { return std::make_unique<VerbsRig>(0, std::make_unique<TestMemoryDevice>()); }},
        TransportFactory{"verbs_near",
                         [] { return std::make_unique<VerbsRig>(0, nullptr, Near::kAll); }},
        TransportFactory{"verbs_half_near",
                         [] { return std::make_unique<VerbsRig>(0, nullptr, Near::kOdd); }},
        TransportFactory{"verbs_tiny_cq",
                         [] { return std::make_unique<VerbsRig>(/*most_cqe=*/128); }}),
    [](const auto& instance) { return instance.param.name; });

// Soft-RoCE takes no DMA buffers, nor does libfabric over it: both say so, and nothing is left.
TEST(GpuMemory, IsRefusedWhereTheNicCannot) {
  const std::vector<VerbsPort> ports = verbs_ports();
  EXPECT_THAT(ports.front().no_dma_buf, ::testing::HasSubstr("takes no DMA buffers"));
  LinkLayout layout;
  layout.max_ranks = layout.cores = 1;
  layout.queue_chunks = {8};
  layout.core_node = {0};
  layout.slots_bytes = layout.results_bytes = 8 * 4096;
  const auto refusal = [&](TransportRig& rig) -> std::string {
    const auto box = rig.transport().open_job(layout);
    const Offer offer = box->admit(0, 1);
    box->endpoint(0).attach(0, 1);
    std::string said = "none";
    try {
      rig.connect(offer, layout);
    } catch (const Error& error) {
      said = std::string(name_of(error.code())) + ": " + error.what();
    }
    box->endpoint(0).detach(0);
    box->revoke(0);
    return said;
  };
  VerbsRig verbs(0, std::make_unique<TestMemoryDevice>(/*cuda_ordinal=*/0));
  EXPECT_THAT(refusal(verbs),
              ::testing::AllOf(::testing::StartsWith("invalid: ibv_reg_dmabuf_mr of 0.0 MiB on "),
                               ::testing::HasSubstr("soft-RoCE does not")));
  const auto ofi = OfiRig::over("verbs;ofi_rxm", std::make_unique<TestMemoryDevice>(0));
  if (ofi != nullptr) {
    EXPECT_THAT(refusal(*ofi), ::testing::AllOf(::testing::StartsWith("invalid: "),
                                                ::testing::HasSubstr("memory_device")));
  }
}

}  // namespace
}  // namespace phub
