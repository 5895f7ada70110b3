// The TCP connections under ofi_rxm. Up to libfabric 1.17 at least it cannot close an endpoint that
// has received half of a write: the provider under it then reports a write of nobody's, and ofi_rxm
// follows a null pointer. Once its connection has ended, it can.
#pragma once

#include <rdma/fi_eq.h>

#include "transport/ofi/format.h"
#include "transport/ofi/resources.h"

namespace phub {

// Before an endpoint is closed: ends the connections between the two, and lets the provider see
// it. Does nothing for any other provider. Takes what /proc/self/fd takes.
void end_sockets_below(const OfiDomain& domain, fid_cq& completions, const OfiTarget& here,
                       const OfiTarget& there) noexcept;

}  // namespace phub
