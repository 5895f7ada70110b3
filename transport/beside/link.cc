// The worker's side: a link near, a link of the network, or both in the near one's memory.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/beside/endpoint.h"
#include "transport/beside/transport.h"
#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/tcp/near.h"
#include "transport/tcp/transport.h"

namespace phub {
namespace {

class BesideWorkerLink final : public WorkerLink {
 public:
  // `is_near`: by queue; some are, and some may not be.
  BesideWorkerLink(const Offer& offer, const LinkLayout& layout, uint32_t timeout_ms,
                   std::vector<bool> is_near, const ConnectNetwork& connect_network)
      : is_near_(std::move(is_near)),
        near_(connect_tcp(near_part(offer), layout, timeout_ms, {}, true)) {
    if (std::ranges::count(is_near_, false) == 0) return;
    network_ = connect_network(
        network_part(offer), layout,
        std::make_unique<LinkArrays>(near_->gradients(), near_->writable_results()));
    for (uint32_t thread = 0; thread < layout.threads; ++thread) {
      endpoints_.push_back(std::make_unique<BesideEndpoint>(near_->endpoint_of(thread),
                                                            network_->endpoint_of(thread)));
    }
  }
  ~BesideWorkerLink() override { endpoints_.clear(); }
  BesideWorkerLink(const BesideWorkerLink&) = delete;
  BesideWorkerLink& operator=(const BesideWorkerLink&) = delete;

  std::span<std::byte> gradients() override { return near_->gradients(); }
  std::span<const std::byte> results() override { return near_->results(); }
  std::span<std::byte> writable_results() override { return near_->writable_results(); }
  Endpoint& endpoint() override { return endpoint_of(0); }
  Endpoint& endpoint_of(uint32_t thread) override {
    if (network_ == nullptr) return near_->endpoint_of(thread);
    return *endpoints_.at(thread);
  }
  bool connected() override {
    return near_->connected() && (network_ == nullptr || network_->connected());
  }
  bool zero_copy() const override { return false; }
  bool needs_polling() const override { return true; }
  std::string describe() const override {
    const auto near = std::ranges::count(is_near_, true);
    return fmt::format("{} over memory of this host; {}", near,
                       network_ == nullptr ? "0 queue pairs" : network_->describe());
  }
  std::string nic_of(uint32_t queue) const override {
    return is_near_[queue] ? "" : network_->nic_of(queue);
  }
  void reconnect(const Offer& offer) override {
    if (offer.queues.size() != is_near_.size()) {
      fail(ErrorCode::kMismatch, "{} queues are offered, the plan has {}", offer.queues.size(),
           is_near_.size());
    }
    near_->reconnect(near_part(offer));
    if (network_ != nullptr) network_->reconnect(network_part(offer));
  }
  bool can_reconnect() const override { return true; }

 private:
  Offer near_part(Offer offer) const {
    offer.transport = "tcp";
    for (size_t q = 0; q < offer.queues.size(); ++q) {
      offer.queues[q] = {.address = "", .near = is_near_[q] ? offer.queues[q].near : ""};
    }
    return offer;
  }
  Offer network_part(Offer offer) const {
    check_addresses(offer);
    for (size_t q = 0; q < offer.queues.size(); ++q) {
      if (is_near_[q]) offer.queues[q].address.clear();
    }
    return offer;
  }

  const std::vector<bool> is_near_;
  const std::unique_ptr<WorkerLink> near_;
  std::unique_ptr<WorkerLink> network_;                     // null: all queues are near
  std::vector<std::unique_ptr<BesideEndpoint>> endpoints_;  // by thread
};

}  // namespace

std::unique_ptr<WorkerLink> connect_beside(const Offer& offer, const LinkLayout& layout,
                                           uint32_t timeout_ms,
                                           const ConnectNetwork& connect_network) {
  std::map<std::string, bool> on_this_host;  // by name: a box has one for all of its queues
  std::vector<bool> is_near;
  for (const QueueOffer& queue : offer.queues) {
    const auto [at, is_new] = on_this_host.try_emplace(queue.near);
    if (is_new) at->second = static_cast<bool>(connect_near(queue.near));
    is_near.push_back(at->second);
  }
  if (std::ranges::count(is_near, true) == 0) return connect_network(offer, layout, nullptr);
  return std::make_unique<BesideWorkerLink>(offer, layout, timeout_ms, std::move(is_near),
                                            connect_network);
}

}  // namespace phub
