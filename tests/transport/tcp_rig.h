// The tcp transport for the suite: box and workers are in one process, connecting in a thread.
#pragma once

#include <memory>
#include <utility>

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
    return meanwhile([&] { return connect_tcp(offer, layout, 10000, trust_, near_); });
  }

 private:
  const std::shared_ptr<void> keeps_;
  const TcpTrust trust_;
  const bool near_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace phub
