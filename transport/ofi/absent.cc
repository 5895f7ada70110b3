// What is built in place of the ofi transport where libfabric's headers are not installed.
#include "transport/error.h"
#include "transport/ofi/library.h"
#include "transport/ofi/providers.h"
#include "transport/ofi/transport.h"

namespace phub {
namespace {

[[noreturn]] void absent() { throw Error(ErrorCode::kUnavailable, ofi_library_problem()); }

}  // namespace

const std::string& ofi_library_problem() {
  static const std::string problem =
      "this build has no libfabric: install libfabric-dev and build again, or use the transport "
      "tcp";
  return problem;
}

std::vector<OfiProvider> find_ofi_providers() { return {}; }

std::unique_ptr<Transport> make_ofi_transport(const OfiOptions&) { absent(); }

std::unique_ptr<WorkerLink> connect_ofi(const Offer&, const LinkLayout&, uint32_t,
                                        std::unique_ptr<LinkArrays>) {
  absent();
}

}  // namespace phub
