// libfabric: whatever network has a provider with reliable datagrams and remote writes (EFA,
// Slingshot, Omni-Path, RDMA, TCP). A worker writes its gradients into its slots on the box with
// fi_writedata(), and the box its results into the worker's memory. Each queue has a TCP
// connection, over which the two tell each other addresses and keys, and whose end tells that a
// peer is gone. README.md has its messages, and describes the providers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/link_arrays.h"
#include "transport/transport.h"

namespace phub {

struct OfiOptions {
  std::vector<std::string> addresses = {"127.0.0.1"};  // numbers: tcp_data_addresses()
  uint16_t port = 0;                                   // on each address; 0: any that is free
  std::string provider;           // libfabric's name; "": the first of find_ofi_providers()
  uint32_t half_open_ms = 5000;   // a connection that has not said its hello by then is closed
  uint32_t max_half_open = 1024;  // at most; the oldest makes room for the newest
};

// Listens on every address. Throws Error: kUnavailable without libfabric or the provider, else as
// make_tcp_transport(). Must outlive its links.
std::unique_ptr<Transport> make_ofi_transport(const OfiOptions& options = {});

// Connects the worker that `offer` was made for, at the queues that it has an address for, over the
// provider that it names. Throws Error: kUnavailable (no server there; this host has no libfabric,
// or not that provider), kTimeout, kUnauthorized (the ticket), kFull (endpoints, memory that may be
// registered), or the box's answer. Blocks up to `timeout_ms`. `arrays`: the worker's gradients and
// results (kInvalid: they are a device's, and the provider cannot reach that); null: memory of the
// link's own.
std::unique_ptr<WorkerLink> connect_ofi(const Offer& offer, const LinkLayout& layout,
                                        uint32_t timeout_ms,
                                        std::unique_ptr<LinkArrays> arrays = nullptr);

}  // namespace phub
