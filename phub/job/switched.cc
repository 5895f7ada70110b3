#include "phub/job/switched.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "phub/core/index_set.h"
#include "phub/core/notice.h"
#include "transport/control/rules.h"
#include "transport/error.h"
#include "transport/switch/socket.h"
#include "transport/switch/stream.h"

namespace phub {
namespace {

constexpr uint32_t kMostParts = std::numeric_limits<uint16_t>::max();  // SwitchHeader::part

uint32_t core_of(const Plan& plan, const SwitchStream& stream) {
  return plan.queues[stream.queues.front()].core;
}

std::vector<uint32_t> elements_of(const Plan& plan, const SwitchStream& stream) {
  std::vector<uint32_t> elements;
  for (const uint32_t id : switch_chunks(plan, stream.queues)) {
    elements.push_back(plan.chunks[id].elements);
  }
  return elements;
}

uint32_t chunks_of(const Plan& plan, const SwitchStream& stream) {
  uint32_t chunks = 0;
  for (const uint32_t queue : plan.cores[core_of(plan, stream)].queues) {
    chunks += static_cast<uint32_t>(plan.queue_chunks[queue].size());
  }
  return chunks;
}

// The address with its port raised by `by`.
sockaddr_in further(sockaddr_in address, uint32_t by) {
  const uint32_t port = ntohs(address.sin_port) + by;
  if (port > std::numeric_limits<uint16_t>::max()) {
    fail(ErrorCode::kInvalid, "the switch: each core needs a UDP port, and {} is none: begin lower",
         port);
  }
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

std::string text_of(const sockaddr_in& address) {
  char text[INET_ADDRSTRLEN] = "";
  inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
  return fmt::format("{}:{}", text, ntohs(address.sin_port));
}

}  // namespace

bool may_switch(const JobSpec& spec) {
  return std::ranges::any_of(
      spec.keys, [&spec](const KeySpec& key) { return gradient_format(spec, key) == kInt32; });
}

void check_switched(const JobSpec& spec, std::string_view transport, uint32_t boxes) {
  const auto refuse = [&spec](const std::string& what) {
    fail(ErrorCode::kInvalid,
         "job '{}' has keys in int32, which this server takes from a switch that adds (--switch): "
         "{}; or use another format, or a server without a switch",
         spec.name, what);
  };
  check_rules(spec, Feature::kSwitch);
  if (spec.world_size > kSwitchWorkers) {
    refuse(fmt::format("a switch adds what at most {} ranks send, and the job has {}",
                       uint32_t{kSwitchWorkers}, spec.world_size));
  }
  if (transport == "shm" || transport == "ofi") {
    refuse(fmt::format("what does not come from it needs tcp or verbs, and the job runs over {}",
                       transport));
  }
  if (boxes > 1) refuse(fmt::format("its sums go to one box, and the job is on {}", boxes));
}

SwitchOffer make_switch_offer(const Plan& plan, const JobSpec& spec, const SwitchOptions& options,
                              uint64_t generation) {
  SwitchOffer offer{
      .generation = generation, .workers = spec.world_size, .port = options.worker_port};
  const std::string& address =
      options.workers_send_to.empty() ? options.address : options.workers_send_to;
  const sockaddr_in first = switch_address(address);
  for (const CorePlan& core : plan.cores) {
    const std::vector<uint32_t> chunks = switch_chunks(plan, core.queues);
    if (chunks.empty()) continue;
    for (const uint32_t id : chunks) {
      if (switch_parts(plan.chunks[id].elements) <= kMostParts) continue;
      fail(ErrorCode::kInvalid,
           "chunk_elements: a chunk that goes through a switch has at most {} elements",
           kMostParts * kSwitchElements);
    }
    const auto number = static_cast<uint32_t>(offer.streams.size());
    offer.streams.push_back({.address = text_of(further(first, number)), .queues = core.queues});
  }
  const auto streams = static_cast<uint32_t>(offer.streams.size());
  const uint32_t slots = std::min<uint32_t>(options.slots, kMostSwitchSlots) / streams;
  if (slots == 0) {
    fail(ErrorCode::kInvalid,
         "the switch has {} slots, and {} cores take sums, which need one each: give it more "
         "(--switch-slots), or serve with fewer --cores",
         options.slots, streams);
  }
  for (uint32_t i = 0; i < streams; ++i) {
    offer.streams[i].first_slot = i * slots;
    offer.streams[i].slots = slots;
  }
  return offer;
}

std::unique_ptr<SwitchIntake> make_switch_intake(const Plan& plan, uint32_t core,
                                                 const SwitchOffer& offer,
                                                 const SwitchOptions& options,
                                                 uint64_t first_round) {
  const auto stream = std::ranges::find_if(
      offer.streams, [&](const SwitchStream& each) { return core_of(plan, each) == core; });
  if (stream == offer.streams.end()) return nullptr;
  const auto number = static_cast<uint32_t>(stream - offer.streams.begin());
  const sockaddr_in own = further(switch_address(options.address), number);
  std::vector<uint32_t> places(plan.chunks.size());
  uint32_t place = 0;
  for (const uint32_t queue : stream->queues) {
    for (const uint32_t id : plan.queue_chunks[queue]) places[id] = place++;
  }
  SwitchIntake::Options intake{.ranks = offer.workers,
                               .generation = offer.generation,
                               .first_slot = static_cast<uint16_t>(stream->first_slot),
                               .slots = static_cast<uint16_t>(stream->slots),
                               .first_round = std::max<uint64_t>(first_round, 1),
                               .rounds_between = options.rounds_between,
                               .elements = elements_of(plan, *stream),
                               .all_chunks = place};
  for (const uint32_t id : switch_chunks(plan, stream->queues)) {
    intake.chunks.push_back(places[id]);
  }
  intake.to_all = options.answers_go_to.empty()
                      ? broadcast_of(own, static_cast<uint16_t>(offer.port))
                      : further(switch_address(options.answers_go_to), number);
  return std::make_unique<SwitchIntake>(
      intake, options.open ? options.open(own) : std::make_unique<SwitchSocket>(own));
}

uint64_t switch_bytes(const Plan& plan, const SwitchOffer& offer) {
  uint64_t bytes = 0;
  for (const SwitchStream& stream : offer.streams) {
    bytes += SwitchIntake::bytes(elements_of(plan, stream), stream.slots, chunks_of(plan, stream));
    bytes += IndexSet::bytes(chunks_of(plan, stream));  // Switched's
    bytes += Notice::bytes(stream.queues.size(), offer.workers);
  }
  return bytes;
}

}  // namespace phub
