// The simulated transport for the suite: time passes where the test pumps.
#pragma once

#include <memory>

#include "tests/transport/transport_suite.h"
#include "transport/sim/net.h"

namespace phub {

class SimRig final : public TransportRig {
 public:
  // `near`: workers are on the box's host.
  explicit SimRig(const SimOptions& options, bool near = false)
      : net_(options), near_(near ? 0 : SimNet::kNoBox) {}
  Transport& transport() override { return net_.transport(); }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout&) override {
    std::unique_ptr<WorkerLink> link = net_.connect(offer, near_);
    net_.advance(20 * net_.options().max_delay_ns);
    transport().handle_events(events());
    return link;
  }
  void pump() override { net_.advance(net_.options().max_delay_ns); }
  void kill(std::unique_ptr<WorkerLink> worker) override {
    net_.crash(*worker, /*silent=*/false);
    worker.reset();
  }

 private:
  SimNet net_;
  const uint32_t near_;
};

}  // namespace phub
