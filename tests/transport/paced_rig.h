// TCP between two ends that have budgets, for the suite: far more than it sends, so that nothing
// waits for long.
#pragma once

#include <memory>
#include <utility>

#include "tests/transport/transport_suite.h"
#include "transport/paced/transport.h"
#include "transport/tcp/transport.h"

namespace phub {

class PacedRig final : public TransportRig {
 public:
  PacedRig() : transport_(make_paced(make_tcp_transport(), {.bytes_per_s = kBytesPerSecond})) {}
  Transport& transport() override { return *transport_; }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override {
    return make_paced(meanwhile([&] { return connect_tcp(offer, layout, 10000, {}); }),
                      static_cast<uint32_t>(offer.queues.size()), {.bytes_per_s = kBytesPerSecond});
  }

 private:
  static constexpr uint64_t kBytesPerSecond = 50'000'000;
  std::unique_ptr<Transport> transport_;
};

}  // namespace phub
