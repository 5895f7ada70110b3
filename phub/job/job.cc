#include "phub/job/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/box_memory.h"

namespace phub {
namespace {

QueueNumbers numbers_of(const Plan* whole) {
  if (whole == nullptr) return {};
  return {.first = 0,
          .all = static_cast<uint32_t>(whole->queues.size()),
          .other_boxes = boxes_of(*whole) - 1};
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

Job::Job(std::shared_ptr<const JobSpec> spec, Plan plan, Transport& transport, kernels::Store store,
         bool snapshots, const Manifest* restored, const Rack* rack, const SwitchedJob* switched,
         const Standby* standby)
    : Job(std::move(spec), Split(std::move(plan)), transport, store, snapshots, restored, rack,
          switched, standby) {}

Job::Job(std::shared_ptr<const JobSpec> shared, Split plan, Transport& transport,
         kernels::Store store, bool snapshots, const Manifest* restored, const Rack* rack,
         const SwitchedJob* switched, const Standby* standby)
    : JobPart(std::move(shared), std::move(plan.part), transport, store, snapshots, restored,
              numbers_of(plan.whole.get()), rack, switched, standby),
      whole_(std::move(plan.whole)),
      membership_(spec(), all_cores(), static_cast<uint32_t>(whole_plan().chunks.size()), ranks(),
                  rack ? rack->incarnation : 1) {
  if (!snapshots || saved_arrays() == 0) return;
  for (uint32_t box = 1; box < boxes(); ++box) {
    copies_.emplace_back(
        RemoteCopy::size_of(whole_plan(), box, spec(), restored ? restored->ranks.size() : 0),
        whole_plan().cores.front().os_node,
        fmt::format("what another box has of job '{}'", spec().name));
  }
  if (restored) make_docks_of_others(restored->branches);
}

NodeMemory Job::memory_for(const Plan& plan, const JobSpec& spec, bool snapshots,
                           uint64_t saved_ranks, const Rack* rack, const SwitchedJob* switched,
                           const Standby* standby) {
  const uint32_t boxes = boxes_of(plan);
  if (boxes == 1) {
    NodeMemory memory = total_memory(plan, spec, snapshots, saved_ranks, rack,
                                     standby ? &standby->layout : nullptr);
    if (switched) memory.sums += switch_bytes(plan, switched->offer);
    return memory;
  }
  NodeMemory memory = total_memory(part_of(plan, 0), spec, snapshots, saved_ranks);
  for (uint32_t box = 1; box < boxes && snapshots && box_has_state(spec); ++box) {
    memory.snapshot += RemoteCopy::size_of(plan, box, spec, saved_ranks).bytes();
  }
  return memory;
}

NodeMemory Job::memory() const {
  NodeMemory memory = JobPart::memory();
  for (const RemoteCopy& copy : copies_) memory.snapshot += copy.image().bytes();
  return memory;
}

uint32_t Job::box_of(const ChunkLayout& chunk) const {
  const Plan& plan = whole_plan();
  return plan.cores[plan.queues[chunk.queue].core].box;
}

// The chunks of a key lie one after another in the plan. array_of(box): as that box has it.
template <typename ArrayOf>
void Job::visit_parts(size_t key, const ArrayOf& array_of, const VisitPart& visit) const {
  const std::vector<ChunkLayout>& chunks = whole_plan().chunks;
  auto chunk = std::lower_bound(chunks.begin(), chunks.end(), key,
                                [](const ChunkLayout& c, size_t k) { return c.key < k; });
  for (; chunk != chunks.end() && chunk->key == key; ++chunk) {
    visit({array_of(box_of(*chunk)) + chunk->box_offset, chunk->elements});
  }
}

void Job::for_each_part_of_copy(uint32_t shelf, size_t array, size_t key,
                                const VisitPart& visit) const {
  const auto array_of = [&](uint32_t box) {
    return box == 0 ? copied_array(shelf, array) : copies_[box - 1].array(shelf, array);
  };
  visit_parts(key, array_of, visit);
}

void Job::for_each_part(uint32_t shelf, size_t array, size_t key, const VisitPart& visit) {
  const auto array_of = [&](uint32_t box) {
    if (box == 0) return own_array(shelf, array);
    const uint32_t shelves = spec().branches;
    return shelf > shelves ? docks_of_others_[box - 1].at(shelf - shelves).array(array)
                           : copies_[box - 1].array(shelf, array);
  };
  visit_parts(key, array_of, visit);
}

void Job::for_each_part(const Branch& branch, size_t array, size_t key,
                        const VisitPart& visit) const {
  visit_parts(
      key, [&](uint32_t box) { return branch[box].array(array); }, visit);
}

void Job::publish_restored(const Manifest& saved) {
  membership_.restore(saved, saved_clocks());
  JobPart::publish_restored(saved);
  const SavedClocks& all = saved_clocks();
  const size_t numbers = whole_plan().chunks.size() * (size_t{all.ranks} + 1);
  for (Docks& docks : docks_of_others_) {
    for (auto& [shelf, dock] : docks) {
      std::copy_n(own_steps(spec().branches + shelf), dock.steps.size(), dock.steps.begin());
    }
  }
  for (const RemoteCopy& copy : copies_) {
    std::copy_n(all.steps, numbers, copy.clocks().steps);
    for (uint32_t shelf = 1; shelf <= spec().branches; ++shelf) {
      std::copy_n(own_steps(shelf), whole_plan().chunks.size(), copy.steps_of_shelf(shelf));
    }
  }
}

// Laid out as that box does it.
JobPart::Shelf Job::make_shelf_of(uint32_t box) const {
  if (box == 0) return make_shelf();
  const RemoteCopy::Size size = RemoteCopy::size_of(whole_plan(), box, spec(), 0);
  Shelf shelf;
  for (size_t array = 0; array < size.arrays_of_shelf; ++array) {
    shelf.arrays.push_back(
        allocate(size.elements * sizeof(float), whole_plan().cores.front().os_node,
                 fmt::format("what another box has of a branch of job '{}'", spec().name)));
  }
  shelf.steps.resize(size.chunks);
  return shelf;
}

Job::Branch Job::make_branch() const {
  Branch branch;
  for (uint32_t box = 0; box < boxes(); ++box) branch.push_back(make_shelf_of(box));
  return branch;
}

uint64_t Job::branch_bytes(const Plan& whole, const JobSpec& spec) {
  uint64_t bytes = 0;
  for (uint32_t box = 0; box < boxes_of(whole); ++box) {
    bytes += RemoteCopy::size_of(whole, box, spec, 0).bytes_of_shelf();
  }
  return bytes;
}

uint64_t Job::docked_bytes_for(const Plan& plan, const JobSpec& spec, const SavedBranches& saved) {
  const auto docked = std::ranges::count_if(
      saved.shelves, [&spec](const SavedShelf& shelf) { return shelf.place > spec.branches; });
  return static_cast<uint64_t>(docked) * branch_bytes(plan, spec);
}

void Job::make_docks_of_others(const SavedBranches& saved) {
  docks_of_others_.resize(copies_.size());
  for (const SavedShelf& shelf : saved.shelves) {
    if (shelf.place <= spec().branches) continue;
    for (uint32_t box = 1; box <= copies_.size(); ++box) {
      docks_of_others_[box - 1][shelf.place - spec().branches] = make_shelf_of(box);
    }
  }
}

SavedImage Job::image_of(uint32_t box) const {
  return copies_.empty() ? SavedImage() : copies_[box - 1].image();
}

SavedImage Job::restored_image_of(uint32_t box) {
  SavedImage image = image_of(box);
  if (docks_of_others_.empty()) return image;
  for (auto& [shelf, dock] : docks_of_others_[box - 1]) image.append(dock.image());
  return image;
}

std::vector<JobPart::Shelf> Job::take_docks_of_others() {
  std::vector<Shelf> all;
  for (Docks& docks : std::exchange(docks_of_others_, {})) {
    for (auto& [shelf, dock] : docks) all.push_back(std::move(dock));
  }
  return all;
}

void Job::take_clocks_of_others() {
  if (copies_.empty()) return;
  const SavedClocks& all = saved_clocks();
  const std::vector<ChunkLayout>& chunks = whole_plan().chunks;
  for (uint32_t id = 0; id < chunks.size(); ++id) {
    const uint32_t box = box_of(chunks[id]);
    if (box == 0) continue;
    const RemoteCopy& copy = copies_[box - 1];
    const SavedClocks from = copy.clocks();
    all.steps[id] = from.steps[id];
    for (uint32_t shelf = 1; shelf <= spec().branches; ++shelf) {
      copied_steps(shelf)[id] = copy.steps_of_shelf(shelf)[id];
    }
    if (all.latest) std::copy_n(from.of(id), all.ranks, all.of(id));
  }
}

}  // namespace phub
