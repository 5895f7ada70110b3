#include "transport/sim/net.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/error.h"
#include "transport/greeting.h"
#include "transport/sim/transport.h"

namespace phub {

SimRandom::SimRandom(uint64_t seed) {
  for (uint64_t& word : state_) {
    seed += 0x9e3779b97f4a7c15ull;
    uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    word = z ^ (z >> 31);
  }
}

uint64_t SimRandom::next() {
  auto rotate = [](uint64_t x, int k) { return (x << k) | (x >> (64 - k)); };
  const uint64_t result = rotate(state_[1] * 5, 7) * 9;
  const uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = rotate(state_[3], 45);
  return result;
}

uint64_t SimRandom::below(uint64_t n) { return n == 0 ? 0 : next() % n; }

uint64_t SimRandom::between(uint64_t low, uint64_t high) { return low + below(high - low + 1); }

bool SimRandom::chance(double probability) {
  if (probability <= 0) return false;
  return static_cast<double>(next() >> 11) * 0x1p-53 < probability;
}

SimNet::SimNet(const SimOptions& options)
    : SimTrace(static_cast<const SimTime&>(*this)), options_(options), random_(options.seed) {}

SimNet::~SimNet() = default;

Transport& SimNet::transport(uint32_t box) {
  while (transports_.size() <= box) {
    const auto next = static_cast<uint32_t>(transports_.size());
    transports_.push_back(std::make_unique<SimTransport>(*this, next));
  }
  return *transports_[box];
}

// Of each box that the offer has queues of; they have given the same ticket.
std::vector<SimIncarnation*> SimNet::find(const Offer& offer) const {
  check_offer(offer, "sim", nullptr);
  std::vector<SimIncarnation*> found;
  for (const auto& box : transports_) {
    if (std::ranges::count(offer.queues, box->address(), &QueueOffer::address) == 0) continue;
    found.push_back(&box->find(offer.ticket));
  }
  if (found.empty()) fail(ErrorCode::kUnauthorized, "the offer has no queues");
  return found;
}

std::unique_ptr<WorkerLink> SimNet::connect(const Offer& offer, uint32_t near) {
  return std::make_unique<SimWorkerLink>(*this, find(offer), LinkLayout{}, nullptr, box_at(near));
}

std::unique_ptr<WorkerLink> SimNet::connect(const Offer& offer, const LinkLayout& layout,
                                            uint32_t below, uint32_t near) {
  static_cast<void>(transport(below));
  return std::make_unique<SimWorkerLink>(*this, find(offer), layout, box_at(below), box_at(near));
}

SimTransport* SimNet::box_at(uint32_t box) const {
  return box == kNoBox ? nullptr : transports_.at(box).get();
}

std::vector<WorkerLink*> SimNet::links_from(uint32_t box) const {
  const std::vector<SimWorkerLink*>& links = transports_[box]->links_above();
  return {links.begin(), links.end()};
}

void SimNet::crash(WorkerLink& worker, bool silent) {
  dynamic_cast<SimWorkerLink&>(worker).die(silent);
}

bool SimNet::break_queue_pair(WorkerLink& worker) {
  return dynamic_cast<SimWorkerLink&>(worker).break_one();
}

bool SimNet::fail_device(WorkerLink& worker, uint32_t core, bool said) {
  return dynamic_cast<SimWorkerLink&>(worker).fail_device(core, said);
}

bool SimNet::closed_by_box(WorkerLink& worker) {
  return dynamic_cast<SimWorkerLink&>(worker).closed_by_box();
}

SimMemory SimNet::garbage(uint64_t bytes) {
  auto memory = std::make_shared<std::vector<std::byte>>(bytes);
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t word = random_.next();
    std::memcpy(memory->data() + i, &word, std::min<uint64_t>(sizeof(word), bytes - i));
  }
  return memory;
}

bool SimNet::awake(const Endpoint& endpoint) {
  return dynamic_cast<const SimEndpoint&>(endpoint).awake();
}

bool SimNet::core_awake(uint32_t core, uint32_t box) const {
  return transports_[box]->core_awake(core);
}

bool SimNet::has_events(uint32_t box) const { return !transports_[box]->raised().empty(); }

uint64_t SimNet::some_delay() {
  uint64_t delay = random_.between(options_.min_delay_ns, options_.max_delay_ns);
  // Now and then something is much slower than usual: queues that overtake each other by far.
  if (random_.chance(0.02)) delay *= random_.between(2, 50);
  return delay;
}

uint64_t SimNet::flight_ns() {
  uint64_t flight = some_delay();
  if (options_.shared_memory) return flight;
  for (uint32_t tries = 0; random_.chance(options_.loss); ++tries) {
    ++stats_.lost;
    if (tries == options_.retry_limit) return kLost;
    flight += options_.retransmit_ns;
  }
  return random_.chance(options_.break_chance) ? kLost : flight;
}

}  // namespace phub
