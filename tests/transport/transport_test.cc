// The suite over every transport: one line per transport.
#include "tests/transport/ofi_rig.h"
#include "tests/transport/paced_rig.h"
#include "tests/transport/shm_rig.h"
#include "tests/transport/sim_rig.h"
#include "tests/transport/tcp_rig.h"
#include "tests/transport/tcp_tls_rig.h"
#include "tests/transport/test_memory_device.h"
#include "tests/transport/transport_suite.h"

namespace phub {
namespace transport_test {

INSTANTIATE_TEST_SUITE_P(
    Every, TransportSuite,
    ::testing::Values(
        TransportFactory{"ofi_net", [] { return OfiRig::over("net"); }},
        TransportFactory{"ofi_net_device",
                         [] { return OfiRig::over("net", std::make_unique<TestMemoryDevice>()); }},
        TransportFactory{"ofi_near", [] { return OfiRig::over("net", nullptr, Near::kAll); }},
        TransportFactory{"ofi_half_near", [] { return OfiRig::over("net", nullptr, Near::kOdd); }},
        TransportFactory{"ofi_rxm_tcp", [] { return OfiRig::over("tcp;ofi_rxm"); }},
        TransportFactory{"ofi_shm", [] { return OfiRig::over("shm"); }},
        TransportFactory{"paced_tcp", [] { return std::make_unique<PacedRig>(); }},
        TransportFactory{"shm", [] { return std::make_unique<ShmRig>(); }},
        TransportFactory{"sim", [] { return std::make_unique<SimRig>(SimOptions{.seed = 3}); }},
        TransportFactory{"sim_near",
                         [] {
                           return std::make_unique<SimRig>(
                               SimOptions{.seed = 7, .loss = 0.5, .overtake = 0.5}, true);
                         }},
        TransportFactory{"sim_lossy",
                         [] {
                           return std::make_unique<SimRig>(
                               SimOptions{.seed = 4, .loss = 0.1, .duplicate = 0.1});
                         }},
        TransportFactory{
            "sim_unordered",
            [] { return std::make_unique<SimRig>(SimOptions{.seed = 6, .overtake = 0.5}); }},
        TransportFactory{
            "sim_shared",
            [] { return std::make_unique<SimRig>(SimOptions{.seed = 5, .shared_memory = true}); }},
        TransportFactory{"tcp", [] { return std::make_unique<TcpRig>(); }},
        TransportFactory{
            "tcp_near",
            [] { return std::make_unique<TcpRig>(TcpOptions(), TcpTrust(), nullptr, true); }},
        TransportFactory{"tcp_tls", [] { return make_tcp_tls_rig(); }},
        TransportFactory{
            "tcp_two_addresses",
            [] {
              return std::make_unique<TcpRig>(TcpOptions{.nics = {{"127.0.0.1"}, {"127.0.0.2"}}});
            }}),
    [](const auto& instance) { return instance.param.name; });

}  // namespace transport_test
}  // namespace phub
