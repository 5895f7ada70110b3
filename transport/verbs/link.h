// The worker's side over RDMA: connecting its queue pairs, and its objects while it is connected.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "transport/link_arrays.h"
#include "transport/verbs/endpoint.h"
#include "transport/verbs/format.h"
#include "transport/verbs/transport.h"

namespace phub {

// Resolves and connects the queue pairs of one offer side by side. Set-up only.
class VerbsDialer {
 public:
  using Clock = std::chrono::steady_clock;
  VerbsDialer(const Offer& offer, uint32_t timeout_ms);

  // Until every address is resolved to a device and a route. Throws Error.
  void resolve();
  size_t queues() const { return calls_.size(); }
  // The offer has an address for it; the members below are for such queues only.
  bool dials(size_t queue) const { return !calls_[queue].address.empty(); }
  ibv_context* context(size_t queue) const { return calls_[queue].id->verbs; }
  rdma_cm_id* id(size_t queue) const { return calls_[queue].id.get(); }
  // Until every queue pair is connected; `hello_of(queue)` is its private data. Throws Error.
  template <typename HelloOf>
  void connect(const HelloOf& hello_of) {
    for (uint32_t q = 0; q < calls_.size(); ++q) {
      if (dials(q)) request(q, hello_of(q));
    }
    wait_for(State::kConnected);
  }
  VerbsEventChannel take_channel() { return std::move(channel_); }
  std::vector<VerbsId> take_ids();  // by queue; null where it does not dial

 private:
  enum class State { kNew, kAddress, kRoute, kConnected };
  struct Call {
    VerbsId id;
    State state = State::kNew;
    std::string address;
  };
  void request(uint32_t queue, const VerbsHello& hello);
  void wait_for(State state);
  void handle(rdma_cm_event& event);

  Clock::time_point deadline_;
  VerbsEventChannel channel_;
  std::vector<Call> calls_;
};

class VerbsWorkerLink final : public WorkerLink {
 public:
  VerbsWorkerLink(const Offer& offer, const LinkLayout& layout, uint32_t timeout_ms,
                  std::unique_ptr<LinkArrays> arrays);
  ~VerbsWorkerLink() override;

  std::span<std::byte> gradients() override { return arrays_->gradients(); }
  std::span<const std::byte> results() override { return arrays_->results(); }
  std::span<std::byte> writable_results() override { return arrays_->writable_results(); }
  void write_gradients(uint64_t offset, std::span<const std::byte> bytes) override {
    arrays_->write_gradients(offset, bytes);
  }
  Endpoint& endpoint() override { return *endpoints_.front(); }
  Endpoint& endpoint_of(uint32_t thread) override { return *endpoints_.at(thread); }
  bool connected() override;
  bool zero_copy() const override { return false; }
  void reconnect(const Offer& offer) override;
  bool can_reconnect() const override { return true; }
  std::string describe() const override;
  std::string nic_of(uint32_t queue) const override;

 private:
  struct Device {
    ibv_context* context = nullptr;
    VerbsPd pd;
    VerbsMr gradients, results;
    std::vector<std::unique_ptr<VerbsLane>> lanes;  // by thread; null: it has no queue here
    uint32_t os_node = 0;
  };
  void check(const Offer& offer) const;
  void make_devices(const VerbsDialer& dialer);
  void make_arrays();
  void disconnect_all();
  VerbsMr register_array(const Device& device, std::span<const std::byte> array, int access);
  std::unique_ptr<VerbsLane> make_lane(const VerbsDialer& dialer, const Device& device,
                                       uint32_t thread) const;
  std::vector<VerbsLane*> lanes_of(uint32_t thread) const;
  uint32_t device_of(ibv_context* context) const;
  VerbsEndpoint& endpoint_of_queue(uint32_t queue) { return *endpoints_[layout_.thread_of(queue)]; }
  void connect(VerbsDialer& dialer, const Offer& offer);

  const LinkLayout layout_;
  const uint32_t timeout_ms_;
  std::unique_ptr<LinkArrays> arrays_;
  std::vector<Device> devices_;
  std::vector<std::unique_ptr<VerbsEndpoint>> endpoints_;  // by thread
  std::vector<std::unique_ptr<VerbsPair>> pairs_;          // by queue

  mutable std::mutex events_mutex_;
  VerbsEventChannel events_;
  std::vector<VerbsId> ids_;  // by queue
  std::atomic<bool> closed_{false};
};

}  // namespace phub
