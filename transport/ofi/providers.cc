#include "transport/ofi/providers.h"

#include <array>

#include "transport/ofi/resources.h"

namespace phub {
namespace {

// Fabrics with NICs that write by themselves; then TCP. "tcp" has reliable datagrams of its own
// from libfabric 1.18 on, in 1.17 they are called "net"; over ofi_rxm an endpoint costs more.
constexpr std::array kPreferred = {"cxi",           "efa", "opx", "psm2",        "psm3",
                                   "verbs;ofi_rxm", "tcp", "net", "tcp;ofi_rxm", "shm"};

OfiProvider provider_of(const std::string& name, const fi_info& info) {
  return {.name = name,
          .domain = has_ip_addresses(info) ? "" : info.domain_attr->name,
          .this_host = name == "shm"};
}

}  // namespace

std::vector<OfiProvider> find_ofi_providers() {
  std::vector<OfiProvider> found;
  for (const char* name : kPreferred) {
    if (const OfiInfo info = get_ofi_info(name, "")) found.push_back(provider_of(name, *info));
  }
  return found;
}

}  // namespace phub
