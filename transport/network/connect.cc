#include "transport/network/connect.h"

#include <algorithm>
#include <utility>

#include "transport/ofi/transport.h"
#include "transport/verbs/transport.h"

namespace phub {

bool is_network(std::string_view transport) { return transport == "verbs" || transport == "ofi"; }

std::string choose_network(const std::vector<std::string>& served) {
  const bool has_verbs = std::ranges::count(served, "verbs") > 0;
  return has_verbs && has_usable_verbs() ? "verbs" : "tcp";
}

std::unique_ptr<WorkerLink> connect_network(std::string_view transport, const Offer& offer,
                                            const LinkLayout& layout, uint32_t timeout_ms,
                                            std::unique_ptr<LinkArrays> arrays) {
  return transport == "verbs" ? connect_verbs(offer, layout, timeout_ms, std::move(arrays))
                              : connect_ofi(offer, layout, timeout_ms, std::move(arrays));
}

}  // namespace phub
