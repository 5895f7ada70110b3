// A worker's link whose NICs have budgets.
#include <fmt/format.h>

#include <map>
#include <utility>

#include "transport/error.h"
#include "transport/paced/endpoint.h"
#include "transport/paced/transport.h"

namespace phub {
namespace {

class PacedWorkerLink final : public WorkerLink {
 public:
  PacedWorkerLink(std::unique_ptr<WorkerLink> link, uint32_t queues, NicBudget budget)
      : link_(std::move(link)),
        queues_(queues),
        budget_(std::move(budget)),
        endpoint_(link_->endpoint(), budget_.clock) {
    find_nics();
  }

  std::span<std::byte> gradients() override { return link_->gradients(); }
  std::span<const std::byte> results() override { return link_->results(); }
  std::span<std::byte> writable_results() override { return link_->writable_results(); }
  void write_gradients(uint64_t offset, std::span<const std::byte> bytes) override {
    link_->write_gradients(offset, bytes);
  }
  InPlace* in_place() override { return link_->in_place(); }
  Endpoint& endpoint() override { return endpoint_; }
  bool connected() override { return link_->connected(); }
  bool zero_copy() const override { return link_->zero_copy(); }
  // What is held back goes only while somebody polls.
  bool needs_polling() const override { return true; }
  std::string nic_of(uint32_t queue) const override { return link_->nic_of(queue); }
  std::string describe() const override {
    return fmt::format("{}; at most {} from each NIC", link_->describe(),
                       describe_rate(budget_.bytes_per_s));
  }
  void reconnect(const Offer& offer) override {
    link_->reconnect(offer);
    find_nics();
  }
  bool can_reconnect() const override { return link_->can_reconnect(); }

 private:
  // A NIC keeps its bucket when connections are made anew.
  void find_nics() {
    std::vector<TokenBucket*> of_queue;
    for (uint32_t queue = 0; queue < queues_; ++queue) {
      const uint64_t rate = budget_.bytes_per_s;
      const auto [at, is_new] =
          buckets_.try_emplace(link_->nic_of(queue), rate, budget_.burst(rate));
      of_queue.push_back(&at->second);
    }
    endpoint_.use(std::move(of_queue));
  }

  const std::unique_ptr<WorkerLink> link_;
  const uint32_t queues_;
  const NicBudget budget_;
  PacedEndpoint endpoint_;
  std::map<std::string, TokenBucket> buckets_;  // by NIC
};

}  // namespace

std::unique_ptr<WorkerLink> make_paced(std::unique_ptr<WorkerLink> link, uint32_t queues,
                                       NicBudget budget) {
  if (link->zero_copy()) {
    fail(ErrorCode::kInvalid,
         "a budget of a NIC needs a transport over a NIC: over shared memory nothing is sent");
  }
  return std::make_unique<PacedWorkerLink>(std::move(link), queues, std::move(budget));
}

}  // namespace phub
