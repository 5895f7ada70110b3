// The transports over which a NIC writes into the memory of the other side ("network" in
// transport/beside), by their names: to connect a worker, or a box below another one, as its offer
// says.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/link_arrays.h"
#include "transport/transport.h"

namespace phub {

bool is_network(std::string_view transport);

// What "auto" takes of the transports that a server has: a network, if this host can use it without
// further options, else "tcp".
std::string choose_network(const std::vector<std::string>& served);

// Connects as the function of that network does (connect_verbs(), connect_ofi()). REQUIRES:
// is_network(transport).
std::unique_ptr<WorkerLink> connect_network(std::string_view transport, const Offer& offer,
                                            const LinkLayout& layout, uint32_t timeout_ms,
                                            std::unique_ptr<LinkArrays> arrays = nullptr);

}  // namespace phub
