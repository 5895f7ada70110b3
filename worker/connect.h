// Which transport a worker uses, and connecting over it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/nic.h"

namespace phub {

// "auto" becomes: shm where the server is on this host; verbs where the server offers it and this
// host has an RDMA device that can be used; tcp otherwise. Other words stay as they are. Asks the
// server, if it has to, for up to `timeout_ms`. Throws Error(kUnavailable) when it is not there,
// Error(kTimeout) when its name takes longer to look up.
std::string choose_transport(const std::string& word, const std::string& server,
                             uint32_t timeout_ms);

// Throws Error(kInvalid) for a transport that is not in this library.
std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout,
                                    uint32_t timeout_ms);

}  // namespace phub
