// TCP between two ends that have budgets, for the suite: far more than it sends, so that nothing
// waits for long.
#pragma once

#include <memory>
#include <utility>

#include "tests/transport/tcp_rig.h"
#include "transport/paced/transport.h"

namespace phub {

class PacedRig final : public TransportRig {
 public:
  PacedRig() : transport_(make_paced(make_tcp_transport(), {.bytes_per_s = kBytesPerSecond})) {}
  Transport& transport() override { return *transport_; }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override {
    auto link =
        std::async(std::launch::async, [&] { return connect_tcp(offer, layout, 10000, {}); });
    while (link.wait_for(std::chrono::microseconds(100)) != std::future_status::ready) {
      transport_->handle_events(events());
    }
    return make_paced(link.get(), static_cast<uint32_t>(offer.queues.size()),
                      {.bytes_per_s = kBytesPerSecond});
  }
  void pump() override { std::this_thread::sleep_for(std::chrono::microseconds(100)); }
  void kill(std::unique_ptr<WorkerLink> worker) override { worker.reset(); }

 private:
  static constexpr uint64_t kBytesPerSecond = 50'000'000;
  std::unique_ptr<Transport> transport_;
};

}  // namespace phub
