// Chooses a worker's transport, and connects over it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"
#include "worker/worker.h"

namespace phub {

// The transport of the options for `server`. Resolves "auto" to that of the job if it is there,
// else to shm if the server is on this host and no other box serves under it, else to verbs if the
// server offers it and this host has a usable RDMA device, else to tcp. A token that may not see
// the server's status gets the transport that the job has. Asks the server, for up to
// connect_timeout_ms. Throws Error: kUnavailable, it does not answer; kUnauthorized; kTimeout, the
// lookup of its name takes longer.
std::string choose_transport(const WorkerOptions& options, const std::string& server);

// `server` is the one that made the offer, and `reached` the number of its address, if that is
// known (TcpTrust). With "auto", a link over a network goes over memory to boxes on this host,
// unless gradients are in memory of a device. Throws Error(kInvalid) for a transport that is not in
// this library.
std::unique_ptr<WorkerLink> connect(const WorkerOptions& options, const std::string& server,
                                    const std::string& reached, const Offer& offer,
                                    const LinkLayout& layout);

}  // namespace phub
