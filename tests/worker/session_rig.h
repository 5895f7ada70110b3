// A session over a link without a box: what arrives, and what is posted.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "transport/transport.h"
#include "transport/wire.h"
#include "worker/session/session.h"

namespace phub::testing {

// A link of one queue that remembers what is posted, while there is room.
class Wire final : public WorkerLink, private Endpoint {
 public:
  explicit Wire(size_t gradients = 4096, size_t results = 4096)
      : gradients_(gradients), results_(results) {}

  std::vector<Arrival> arrivals;
  std::vector<uint32_t> posted;  // chunks
  std::vector<Imm> imms;         // with all that travels
  std::vector<uint32_t> wake_after;
  bool room = false;
  uint32_t room_until_flush = ~0u;  // posts
  std::vector<std::string> nics;    // by queue
  std::string full_nic = "none";    // has no room
  uint64_t refused_ns = 0;

  std::span<std::byte> gradients() override { return gradients_; }
  std::span<const std::byte> results() override { return results_; }
  Endpoint& endpoint() override { return *this; }
  bool connected() override { return true; }
  bool zero_copy() const override { return true; }
  std::string nic_of(uint32_t queue) const override {
    return queue < nics.size() ? nics[queue] : "";
  }

 private:
  size_t poll(std::span<Arrival> out) override {
    const size_t count = std::min(out.size(), arrivals.size());
    std::copy_n(arrivals.begin(), count, out.begin());
    arrivals.erase(arrivals.begin(), arrivals.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  bool post(QueuePair to, const Write& write) override {
    if (!room || unflushed_ >= room_until_flush || nic_of(to.queue) == full_nic) return false;
    ++unflushed_;
    posted.push_back(decode(write.imm).chunk), imms.push_back(decode(write.imm));
    return true;
  }
  uint64_t refused_for_ns() const override { return refused_ns; }
  void flush() override { unflushed_ = 0; }
  bool arm(std::span<const uint32_t> after) override {
    wake_after.assign(after.begin(), after.end());
    return true;
  }
  void disarm() override {}
  int wake_fd() const override { return -1; }

  std::vector<std::byte> gradients_, results_;
  uint32_t unflushed_ = 0;
};

// Keys of one chunk each, all in one queue: key k is chunk k.
inline JoinReply reply_of(const std::vector<int32_t>& priorities) {
  JoinReply reply;
  reply.spec.name = "job";
  reply.spec.chunk_elements = 32;
  reply.layout.queue_chunks.emplace_back();
  for (uint32_t k = 0; k < priorities.size(); ++k) {
    reply.spec.keys.push_back(
        {.name = std::to_string(k), .elements = 32, .priority = priorities[k]});
    reply.layout.key_offset.push_back(uint64_t{k} * 32);
    reply.layout.queue_chunks[0].push_back(k);
  }
  reply.layout.total_elements = priorities.size() * 32;
  return reply;
}

}  // namespace phub::testing
