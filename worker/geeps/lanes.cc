#include "worker/geeps/lanes.h"

#include <fmt/format.h>

#include <string>

namespace phub::geeps {

Lanes::Lanes(Device& device, uint32_t partitions) : partitions_(partitions) {
  const auto add_lane = [&](Lane::Kind kind, uint32_t partition, const std::string& name) {
    Lane& lane =
        lanes_.emplace_back(Lane{.kind = kind, .stream = {}, .rows = {}, .partition = partition});
    if (name.empty()) return;
    lane.stream = device.make_stream(name);
    lane.rows = std::make_unique<HostRows>(device, *lane.stream);
    if (kind == Lane::Kind::kPull) return;
    for (auto& event : lane.enqueued) event = device.make_event();
  };
  for (uint32_t i = 0; i < partitions; ++i) {
    add_lane(Lane::Kind::kFetch, i, fmt::format("geeps fetch {}", i));
    add_lane(Lane::Kind::kStore, i, fmt::format("geeps store {}", i));
    add_lane(Lane::Kind::kPush, i, "");
  }
  add_lane(Lane::Kind::kPull, 0, "geeps pull");
}

}  // namespace phub::geeps
