// Memory beside a network (verbs, ofi): in one job, workers on a box's own host exchange with it
// over memory, as over TCP (transport/tcp/README.md, "Near"), and over the network with other
// boxes; workers of other hosts, over the network.
//
// Either side has two links of one job, in one memory: that of the network, and one of tcp's that
// is near only. A queue pair is connected over one of them, which the worker chooses.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "transport/link_arrays.h"
#include "transport/transport.h"

namespace phub {

// The box. Returns `network` alone if it may not listen for workers of this host. Throws
// Error(kInvalid) for a transport that takes no memory of another one's when a job is opened.
std::unique_ptr<Transport> make_beside(std::unique_ptr<Transport> network);

// A worker: near where the offer and this host have that, else by `connect_network`, which connects
// the queues of an offer that have an address, with these arrays (null: of its own). Throws Error
// as that and connect_tcp() do. After a reconnection each queue is where it was before, or it
// throws kUnavailable: join again.
using ConnectNetwork = std::function<std::unique_ptr<WorkerLink>(
    const Offer& offer, const LinkLayout& layout, std::unique_ptr<LinkArrays> arrays)>;
std::unique_ptr<WorkerLink> connect_beside(const Offer& offer, const LinkLayout& layout,
                                           uint32_t timeout_ms,
                                           const ConnectNetwork& connect_network);

}  // namespace phub
