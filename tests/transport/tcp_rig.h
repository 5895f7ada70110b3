// The tcp transport for the suite: box and workers are in one process, connecting in a thread.
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "tests/transport/transport_suite.h"
#include "transport/tcp/transport.h"

namespace phub {

class TcpRig final : public TransportRig {
 public:
  // `keeps`: what the options refer to. `near`: workers exchange over memory.
  explicit TcpRig(const TcpOptions& options = {}, TcpTrust trust = {},
                  std::shared_ptr<void> keeps = nullptr, bool near = false)
      : keeps_(std::move(keeps)),
        trust_(std::move(trust)),
        near_(near),
        transport_(make_tcp_transport(options)) {}
  Transport& transport() override { return *transport_; }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override {
    return connect(offer, layout, trust_);
  }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout,
                                      const TcpTrust& trust) {
    auto link = std::async(std::launch::async,
                           [&] { return connect_tcp(offer, layout, 10000, trust, near_); });
    while (link.wait_for(std::chrono::microseconds(100)) != std::future_status::ready) {
      transport_->handle_events(events());
    }
    return link.get();
  }
  void reconnect(WorkerLink& worker, const Offer& offer) {
    auto done = std::async(std::launch::async, [&] { worker.reconnect(offer); });
    while (done.wait_for(std::chrono::microseconds(100)) != std::future_status::ready) {
      transport_->handle_events(events());
    }
    done.get();
  }
  void pump() override { std::this_thread::sleep_for(std::chrono::microseconds(100)); }
  // The kernel closes what a process had; so does the link's end.
  void kill(std::unique_ptr<WorkerLink> worker) override { worker.reset(); }

 private:
  const std::shared_ptr<void> keeps_;
  const TcpTrust trust_;
  const bool near_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace phub
