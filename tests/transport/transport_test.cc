// The suite over every transport: one line per transport.
#include "tests/transport/shm_rig.h"
#include "tests/transport/transport_suite.h"

namespace phub {
namespace {

INSTANTIATE_TEST_SUITE_P(Every, TransportSuite,
                         testing::Values(TransportFactory{
                             "shm", [] { return std::make_unique<ShmRig>(); }}),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace phub
