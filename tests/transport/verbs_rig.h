// RDMA between two ends of this machine's first usable device.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tests/transport/near_rig.h"
#include "tests/transport/transport_suite.h"
#include "transport/error.h"
#include "transport/verbs/transport.h"

namespace phub {

inline std::vector<VerbsPort> verbs_ports() {
  std::vector<VerbsFinding> passed_over;
  std::vector<VerbsPort> ports = choose_verbs_ports({}, {}, passed_over);
  if (ports.empty()) throw std::runtime_error("no usable RDMA device on this machine");
  return ports;
}

class VerbsRig final : public TransportRig {
 public:
  // `device`: in whose memory the arrays of workers lie; null: in the host's.
  explicit VerbsRig(uint32_t most_cqe = 0, std::unique_ptr<MemoryDevice> device = nullptr,
                    Near near = Near::kNone)
      : device_(std::move(device)),
        near_(near),
        transport_(make_verbs_transport({.ports = verbs_ports(), .most_cqe = most_cqe})) {
    if (near_ != Near::kNone) transport_ = make_beside(std::move(transport_));
  }

  Transport& transport() override { return *transport_; }
  bool is_fifo() const override { return true; }

  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override {
    std::unique_ptr<WorkerLink> connected = meanwhile([&] {
      const auto network = [&](const Offer& part, const LinkLayout& of,
                               std::unique_ptr<LinkArrays> arrays) {
        if (arrays == nullptr) arrays = arrays_on(device_.get(), of);
        return connect_verbs(part, of, /*timeout_ms=*/5000, std::move(arrays));
      };
      return near_ == Near::kNone ? network(offer, layout, nullptr)
                                  : connect_with(near_, offer, layout, network);
    });
    // The box hears of it after the worker does.
    for (int i = 0; i < 50; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      transport_->handle_events(events());
    }
    return connected;
  }

 private:
  const std::unique_ptr<MemoryDevice> device_;
  const Near near_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace phub
