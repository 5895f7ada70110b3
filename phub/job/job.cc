#include "phub/job/job.h"

#include <utility>

namespace phub {
namespace {

QueueNumbers numbers_of(const Plan* whole) {
  if (whole == nullptr) return {};
  return {.first = 0, .all = static_cast<uint32_t>(whole->queues.size())};
}

}  // namespace

Job::Split::Split(Plan plan) {
  if (boxes_of(plan) > 1) {
    part = part_of(plan, 0);
    whole = std::make_unique<Plan>(std::move(plan));
  } else {
    part = std::move(plan);
  }
}

Job::Job(const JobSpec& spec, Plan plan, Transport& transport, kernels::Store store, bool snapshots,
         const Manifest* restored, const Rack* rack)
    : Job(spec, Split(std::move(plan)), transport, store, snapshots, restored, rack) {}

Job::Job(const JobSpec& spec, Split plan, Transport& transport, kernels::Store store,
         bool snapshots, const Manifest* restored, const Rack* rack)
    : JobPart(spec, std::move(plan.part), transport, store, snapshots, restored,
              numbers_of(plan.whole.get()), rack),
      whole_(std::move(plan.whole)),
      membership_(spec, all_cores(), static_cast<uint32_t>(whole_plan().chunks.size()), ranks()) {
  if (rack) membership_.begin_life(rack->incarnation);
}

void Job::publish_restored(const Manifest& saved) {
  membership_.restore(saved, saved_clocks());
  JobPart::publish_restored(saved);
}

}  // namespace phub
