#include "worker/session/waiting_sends.h"

#include <bit>
#include <string>

namespace phub {

void WaitingSends::begin(const WorkerLink& link, std::span<const size_t> chunks) {
  std::vector<std::string> nics;
  std::vector<size_t> most;  // messages, by NIC
  nic_of_.resize(chunks.size());
  for (uint32_t q = 0; q < chunks.size(); ++q) {
    const auto at = std::ranges::find(nics, link.nic_of(q));
    nic_of_[q] = static_cast<uint32_t>(at - nics.begin());
    if (at == nics.end()) nics.push_back(link.nic_of(q)), most.push_back(0);
    most[nic_of_[q]] += chunks[q];
  }
  of_nic_.resize(nics.size());
  for (size_t nic = 0; nic < nics.size(); ++nic) {
    of_nic_[nic].clear();
    of_nic_[nic].reserve(most[nic]);
  }
  size_ = 0;
}

int64_t WaitingSends::place_of(uint32_t chunk, const Weight& weight) const {
  switch (order_) {
    case SendOrder::kPriority:
      return weight.priority;
    case SendOrder::kFifo:
      return 0;
    case SendOrder::kRandom:
      return static_cast<int64_t>(shuffled(seed_ ^ shuffled(weight.round << 32 | chunk)) >> 1);
    case SendOrder::kMagnitude:
      return std::bit_cast<int32_t>(weight.magnitude);  // ascends with numbers not below 0
  }
  return 0;
}

void WaitingSends::add(uint32_t queue, uint32_t chunk, const Weight& weight, ImmKind kind) {
  add_again(queue, {place_of(chunk, weight), sequence_++, weight.round, chunk, kind});
}

void WaitingSends::add_again(uint32_t queue, const WaitingSend& send) {
  std::vector<WaitingSend>& waiting = of_nic_[nic_of_[queue]];
  waiting.push_back(send);
  std::push_heap(waiting.begin(), waiting.end());
  ++size_;
}

}  // namespace phub
