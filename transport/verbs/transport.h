// RDMA: InfiniBand and RoCE v2, over libibverbs and librdmacm. A worker writes its gradients
// straight into its slots on the box, with 32 bits of immediate data; the box writes results
// straight into the worker's memory. No processor copies anything. README.md has the private data
// of a connection, the behaviour to expect of hardware, and how to tune it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/link_arrays.h"
#include "transport/transport.h"
#include "transport/verbs/devices.h"

namespace phub {

struct VerbsOptions {
  std::vector<VerbsPort> ports;  // not empty
  uint16_t port = 0;             // in librdmacm's port space, on each; 0: any
  uint32_t most_cqe = 0;         // entries of a completion queue at most; 0: as the devices say
};

// Listens on every port. Throws Error that names the device and the reason. Must outlive its links.
std::unique_ptr<Transport> make_verbs_transport(const VerbsOptions& options);

// Connects every queue pair of the worker that `offer` was made for and has an address for. The
// routes to the box's addresses decide the device of each; memory lies on the node of the first.
// Throws Error: kUnavailable (no RDMA device has a route there, nobody listens), kTimeout,
// kUnauthorized (the ticket), kFull (memory that may be locked, queue pairs). Blocks up to
// `timeout_ms`. `arrays`: the worker's gradients and results (kInvalid: they are a device's, and
// the NIC or its driver cannot reach that); null: memory of the link's own.
std::unique_ptr<WorkerLink> connect_verbs(const Offer& offer, const LinkLayout& layout,
                                          uint32_t timeout_ms,
                                          std::unique_ptr<LinkArrays> arrays = nullptr);

}  // namespace phub
