#include "phub/shard/state_share.h"

#include <fmt/format.h>

#include <cstring>

#include "phub/job/memory.h"
#include "transport/box_memory.h"
#include "transport/error.h"

namespace phub {

StateShare::StateShare(const JobPart& job, const ShardKeys& order) : what(order) {
  const JobSpec& spec = job.spec();
  if (is_branch()) {
    if (spec.branches == 0 || !what.set) {
      fail(ErrorCode::kInvalid, "job '{}' has no branches that come from files", spec.name);
    }
    bytes = job.shelf_bytes();
    return;
  }
  std::vector<bool> wanted(spec.keys.size());
  for (const uint32_t key : order.keys) {
    if (key >= wanted.size()) {
      fail(ErrorCode::kInvalid, "key {} is out of range: job '{}' has {} keys", key, spec.name,
           wanted.size());
    }
    wanted[key] = true;
  }
  const std::vector<ChunkLayout>& all = job.plan().chunks;
  where.places.resize(all.size());
  for (uint32_t id = 0; id < all.size(); ++id) {
    if (all[id].queue == kElsewhere || !wanted[all[id].key]) continue;
    where.places[id] = {.first = floats, .stride = all[id].elements};
    floats += all[id].elements * optimized_arrays_of(spec);
    chunks.push_back(id);
  }
  bytes = floats * sizeof(float) + chunks.size() * sizeof(uint64_t);
}

void StateShare::allocate(const JobPart& job) {
  if (is_branch()) {
    branch = job.make_shelf();
    image = branch.image();
    return;
  }
  if (bytes == 0) return;
  memory = phub::allocate(bytes, job.plan().cores.front().os_node,
                          fmt::format("the state of keys of job '{}'", job.spec().name));
  numa::populate(memory.bytes());
  where.floats = reinterpret_cast<float*>(memory.bytes().data());
  image = SavedImage({memory.bytes()});
}

void StateShare::send_steps() const {
  std::byte* to = memory.bytes().data() + floats * sizeof(float);
  for (const uint32_t chunk : chunks) {
    std::memcpy(to, &where.places[chunk].steps, sizeof(uint64_t));
    to += sizeof(uint64_t);
  }
}

void StateShare::take_steps() {
  const std::byte* from = memory.bytes().data() + floats * sizeof(float);
  for (const uint32_t chunk : chunks) {
    std::memcpy(&where.places[chunk].steps, from, sizeof(uint64_t));
    from += sizeof(uint64_t);
  }
}

}  // namespace phub
