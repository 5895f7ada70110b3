// What is built in place of the RDMA transport where libibverbs and librdmacm are not installed.
#include "transport/error.h"
#include "transport/verbs/library.h"
#include "transport/verbs/transport.h"

namespace phub {
namespace {

[[noreturn]] void absent() { throw Error(ErrorCode::kUnavailable, verbs_library_problem()); }

}  // namespace

const std::string& verbs_library_problem() {
  static const std::string problem =
      "this build has no RDMA: install libibverbs-dev and librdmacm-dev and build again, or use "
      "the transport tcp";
  return problem;
}

std::vector<VerbsPort> choose_verbs_ports(std::span<const VerbsChoice> choices,
                                          std::span<const std::string>,
                                          std::vector<VerbsFinding>&) {
  if (!choices.empty()) absent();
  return {};
}

std::unique_ptr<Transport> make_verbs_transport(const VerbsOptions&) { absent(); }

std::unique_ptr<WorkerLink> connect_verbs(const Offer&, const LinkLayout&, uint32_t,
                                          std::unique_ptr<LinkArrays>) {
  absent();
}

}  // namespace phub
