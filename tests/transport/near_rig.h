// Which queues of a rig's workers go over memory of this host, beside its network.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>

#include "transport/beside/transport.h"
#include "transport/transport.h"

namespace phub {

enum class Near { kNone, kAll, kOdd };

inline std::unique_ptr<WorkerLink> connect_with(Near near, Offer offer, const LinkLayout& layout,
                                                const ConnectNetwork& network) {
  for (size_t q = 0; q < offer.queues.size(); q += 2) {
    if (near == Near::kOdd) offer.queues[q].near = "";
  }
  auto link = connect_beside(offer, layout, 10000, network);
  const auto far = std::ranges::count(offer.queues, "", &QueueOffer::near);
  EXPECT_THAT(link->describe(), ::testing::HasSubstr(fmt::format("{} queue pairs", far)));
  return link;
}

}  // namespace phub
