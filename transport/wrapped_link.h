// A worker's link that does what another does, but for its endpoint, whose writes are held back, or
// take another way. It belongs to one thread, as the other does.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "transport/transport.h"

namespace phub {

class WrappedLink : public WorkerLink {
 public:
  explicit WrappedLink(std::unique_ptr<WorkerLink> link) : link_(std::move(link)) {}

  std::span<std::byte> gradients() override { return link_->gradients(); }
  std::span<const std::byte> results() override { return link_->results(); }
  std::span<std::byte> writable_results() override { return link_->writable_results(); }
  void write_gradients(uint64_t offset, std::span<const std::byte> bytes) override {
    link_->write_gradients(offset, bytes);
  }
  InPlace* in_place() override { return link_->in_place(); }
  bool connected() override { return link_->connected(); }
  bool zero_copy() const override { return link_->zero_copy(); }
  // Writes that are held back, or lost, go only while somebody polls.
  bool needs_polling() const override { return true; }
  std::string nic_of(uint32_t queue) const override { return link_->nic_of(queue); }
  void reconnect(const Offer& offer) override { link_->reconnect(offer); }
  bool can_reconnect() const override { return link_->can_reconnect(); }
  void give_up_ports() override { link_->give_up_ports(); }

 protected:
  const std::unique_ptr<WorkerLink> link_;
};

}  // namespace phub
