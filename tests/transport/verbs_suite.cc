// The suite over RDMA, by verbs and by libfabric. A program of its own: it runs where there is a
// device (scripts/rdma-vm).
#include "tests/transport/ofi_rig.h"
#include "tests/transport/transport_suite.h"
#include "tests/transport/verbs_rig.h"

namespace phub {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Every, TransportSuite,
    testing::Values(TransportFactory{"ofi_rxm_verbs", [] { return OfiRig::over("verbs;ofi_rxm"); }},
                    TransportFactory{"verbs", [] { return std::make_unique<VerbsRig>(); }},
                    TransportFactory{"verbs_tiny_cq",
                                     [] { return std::make_unique<VerbsRig>(/*most_cqe=*/128); }}),
    [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace phub
