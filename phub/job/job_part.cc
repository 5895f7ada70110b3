#include "phub/job/job_part.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/trust.h"
#include "kernels/whole_key.h"
#include "phub/core/gated.h"
#include "phub/core/mirrored.h"
#include "phub/core/quorum.h"
#include "phub/core/switched_way.h"
#include "phub/job/quorum_fragments.h"
#include "transport/box_memory.h"
#include "transport/error.h"

namespace phub {
namespace {

size_t states_of(const JobSpec& spec) { return element_bytes(spec).states; }

LinkLayout link_layout(const JobSpec& spec, const Plan& plan, QueueNumbers queues,
                       const RankRange& ranks) {
  const JobRules rules = rules_of(spec);
  LinkLayout layout = phub::link_layout(plan, spec.max_ranks, result_format(spec),
                                        rules.own_results() ? spec.max_ranks : 1);
  layout.first_rank = ranks.first;
  layout.end_rank = ranks.end;
  layout.first_queue = queues.first;
  layout.all_queues = queues.all;
  layout.cores = static_cast<uint32_t>(plan.cores.size());
  for (const QueuePlan& queue : plan.queues) {
    layout.queue_core.push_back(queue.core);
    layout.queue_nic.push_back(plan.nics[queue.nic].name);
  }
  for (const CorePlan& core : plan.cores) {
    layout.core_node.push_back(core.os_node);
    layout.core_cpu.push_back(core.os_cpu);
  }
  layout.runs = node_runs(plan);
  layout.slot_runs = slot_runs(plan);
  layout.windowed = window_places(plan, plan.cores.front()).places > 0;
  layout.in_step = rules.quorum == 0;
  return layout;
}

std::optional<Differences> differences_of(const JobSpec& spec, const JobRules& rules,
                                          const Plan& plan) {
  if (!rules.difference) return std::nullopt;
  return Differences{.format = *rules.difference,
                     .stochastic = spec.rounding == RoundingMode::kStochastic,
                     .job = rounding_seed(spec.name),
                     .box_elements = plan.box_elements,
                     .worker_elements = plan.total_elements};
}

JobParameters parameters_of(const JobSpec& spec, const JobRules& rules, const Plan& plan,
                            const BoxLink& link, kernels::Store store, uint64_t first_round,
                            bool has_parent, std::span<const FormatSchedule> schedules) {
  return {.max_ranks = spec.max_ranks,
          .rack_ranks = spec.rack_ranks,
          .rules = rules,
          .differences = differences_of(spec, rules, plan),
          .tree = has_parent ? RankTree() : RankTree(spec.groups, spec.max_ranks),
          .slots_belong_to_worker = link.slots_belong_to_worker(),
          .progress_limit_ms = spec.progress_limit_ms,
          .slack = rules.consistency == Consistency::kSsp ? spec.slack : kNever,
          .store = store,
          .first_round = first_round,
          .has_parent = has_parent,
          .schedules = {schedules.begin(), schedules.end()}};
}

NodeMemory with_switch(NodeMemory memory, const Plan& plan, const SwitchedJob* switched) {
  if (switched != nullptr) memory.sums += switch_bytes(plan, switched->offer);
  return memory;
}

float* floats(const numa::Memory& memory) {
  return reinterpret_cast<float*>(memory.bytes().data());
}

// Gradients that are taken out of their slots: so many places are allocated at once at most.
constexpr uint32_t kMostMoved = 16;

// By chunk.
std::vector<uint32_t> keys_of(const Plan& plan) {
  std::vector<uint32_t> keys;
  keys.reserve(plan.chunks.size());
  for (const ChunkLayout& chunk : plan.chunks) keys.push_back(chunk.key);
  return keys;
}

uint32_t saved_ranks_of(const JobSpec& spec, const Manifest* restored) {
  const size_t saved = restored ? restored->ranks.size() : 0;
  return std::max(spec.max_ranks, static_cast<uint32_t>(saved));
}

}  // namespace

void complete_spec(JobSpec& spec) {
  validate(spec);
  if (spec.max_ranks == 0) spec.max_ranks = spec.world_size;
  const JobRules rules = rules_of(spec);
  for (const KeySpec& key : spec.keys) gradient_dtype(spec, key);
  const uint32_t groups = hyper_groups(spec);
  check_hyper(spec.hyper, groups);
  check_for_job(spec.hyper, spec);
  whole_keys(spec, rules.optimizer);  // checks them
  for (const HyperChange& change : spec.schedule) {
    check_hyper(change.values, groups);
    check_for_job(change.values, spec);
    const std::string fixed = fixed_value_in(change.values);
    if (!fixed.empty()) {
      fail(ErrorCode::kInvalid, "schedule: {} cannot change after round 1", fixed);
    }
  }
}

JobPart::JobPart(std::shared_ptr<const JobSpec> spec, Plan plan, Transport& transport,
                 kernels::Store store, bool snapshots, const Manifest* restored,
                 QueueNumbers queues, const Rack* rack, const SwitchedJob* switched,
                 const Standby* standby)
    : spec_(std::move(spec)),
      plan_(std::move(plan)),
      rules_(rack ? rules_of_sums(*spec_) : rules_of(*spec_)),
      ranks_(rack ? rack->ranks : RankRange{0, spec_->max_ranks}),
      has_parent_(rack != nullptr),
      memory_(with_switch(total_memory(plan_, *spec_, snapshots, saved_ranks_of(*spec_, restored),
                                       rack, standby ? &standby->layout : nullptr),
                          plan_, switched)),
      classes_(key_classes(*spec_)),
      schedules_(*spec_),
      hyper_(*spec_, rules_.optimizer, classes_),
      takes_snapshots_(snapshots),
      switch_offer_(switched ? switched->offer : SwitchOffer()),
      box_windows_(spec_->max_ranks),
      link_(transport.open_job(link_layout(*spec_, plan_, queues, ranks_))) {
  make_arrays(saved_ranks_of(*spec_, restored));
  if (restored) make_docks(restored->branches);
  if (rack) uplink_ = rack->connect(layout_above(rack->above, result_format(*spec_)));
  if (standby) uplink_ = standby->connect(layout_above(standby->layout, standby->results));
  const auto cores_of_plan = static_cast<uint32_t>(plan_.cores.size());
  const uint64_t first_round = restored ? restored->round + 1 : rack ? rack->first_round : 0;
  if (restored && !restored->hyper.empty()) hyper_.change(restored->hyper, first_round);
  std::vector<uint32_t> expected;
  for (uint32_t r = ranks_.first; r < ranks_.end; ++r) {
    if (restored ? restored->ranks[r].expected : r < spec_->world_size) expected.push_back(r);
  }
  PHUB_CHECK(switched == nullptr || (rules_.lock_step() && rack == nullptr));
  const JobParameters parameters = parameters_of(*spec_, rules_, plan_, *link_, store, first_round,
                                                 has_parent_, schedules_.all());
  if (rules_.gated && !has_parent_) {
    gate_ = std::make_unique<RoundGate>(
        cores_of_plan, static_cast<uint32_t>(plan_.chunks.size()),
        rules_.on_nonfinite == OnNonFinite::kSkip,
        GateShare{.others = queues.other_boxes, .is_told = queues.first > 0},
        kernels::adapts(rules_.optimizer) ? keys_of(plan_) : std::vector<uint32_t>(),
        make_key_steps(cores_of_plan));
  }
  if (rules_.quorum > 0) {
    quorum_ =
        make_quorum_gates(*spec_, plan_, std::max<uint64_t>(first_round, 1), standby != nullptr);
  }
  for (uint32_t core = 0; core < cores_of_plan; ++core) {
    const auto make_lock_step = [&, core](const Stages& stages) -> std::unique_ptr<Way> {
      if (rack) return std::make_unique<Uplinked>(stages, uplink_of(core, rack->above));
      if (quorum_) return make_quorum(stages, core, standby);
      if (standby) {
        return std::make_unique<Mirrored<LockStep>>(uplink_of(core, standby->layout), stages);
      }
      auto intake =
          switched ? make_switch_intake(plan_, core, switch_offer_, switched->options, first_round)
                   : nullptr;
      if (intake && gate_) {
        return std::make_unique<Switched<Gated>>(std::move(intake), stages, *gate_, core);
      }
      if (intake) return std::make_unique<Switched<LockStep>>(std::move(intake), stages);
      if (gate_) return std::make_unique<Gated>(stages, *gate_, core);
      return std::make_unique<LockStep>(stages);
    };
    core_jobs_.push_back(std::make_unique<CoreJob>(
        core, parameters, arrays_, chunks_of(core), link_->endpoint(core), hyper_.view(), expected,
        static_cast<uint32_t>(plan_.cores[core].queues.size()), make_lock_step, make_window(core),
        make_shared_slots(core)));
  }
}

std::unique_ptr<Way> JobPart::make_quorum(const Stages& stages, uint32_t core,
                                          const Standby* standby) {
  const std::vector<uint32_t> fragments = fragments_of(stages.table, *spec_, plan_);
  if (!standby) return std::make_unique<Quorum>(stages, *quorum_, core, fragments);
  return std::make_unique<Mirrored<Quorum>>(uplink_of(core, standby->layout), stages, *quorum_,
                                            core, fragments);
}

// A queue of the box above is polled by the core that has its chunks.
LinkLayout JobPart::layout_above(const Layout& above, const ResultFormat& results) const {
  LinkLayout layout = phub::link_layout(above, 1, results, 1);
  for (const std::vector<uint32_t>& chunks : above.queue_chunks) {
    uint32_t& core = layout.queue_thread.emplace_back(0);
    if (!chunks.empty()) core = plan_.queues[plan_.chunks[chunks.front()].queue].core;
    for (const uint32_t id : chunks) {
      PHUB_CHECK(plan_.queues[plan_.chunks[id].queue].core == core);
    }
  }
  layout.threads = static_cast<uint32_t>(plan_.cores.size());
  for (const CorePlan& core : plan_.cores) layout.thread_cpu.push_back(core.os_cpu);
  return layout;
}

CoreUplink JobPart::uplink_of(uint32_t core, const Layout& box_above) {
  const uint64_t result_bytes = kernels::bytes_of(rules_.parameter_dtype);
  const std::vector<uint64_t> sums = offsets_of_sums(box_above);
  CoreUplink uplink{.endpoint = &uplink_->endpoint_of(core),
                    .sums = uplink_->gradients(),
                    .results = uplink_->results(),
                    .places = {},
                    .own_results = arrays_.results};
  for (const uint32_t queue : plan_.cores[core].queues) {
    for (const uint32_t id : plan_.queue_chunks[queue]) {
      const ChunkLayout& above = box_above.chunks[id];
      uplink.places.push_back({.sum = sums[id],
                               .slot = above.slot_offset,
                               .result = above.offset * result_bytes,
                               .queue = above.queue,
                               .index = above.index});
    }
  }
  return uplink;
}

void JobPart::make_arrays(uint32_t saved_ranks) {
  const uint32_t node = plan_.cores.front().os_node;
  const std::vector<NodeRun> runs = node_runs(plan_);
  // Before anything is touched: each chunk's pages go to the node of the core that handles it.
  const auto make = [&](numa::Memory& memory, const char* what) {
    memory = allocate(plan_.box_elements * sizeof(float), node,
                      fmt::format("{} of job '{}'", what, spec_->name));
    place(memory.bytes(), sizeof(float), runs);
    return floats(memory);
  };
  const size_t states = has_parent_ ? 0 : states_of(*spec_);
  std::byte* results = link_->results().data();
  const bool f32 = rules_.parameter_dtype == kernels::DType::kF32;
  arrays_.results = results;
  if (rules_.difference) arrays_.view = reinterpret_cast<float*>(results);
  arrays_.result_stride =
      rules_.own_results() ? plan_.box_elements * kernels::bytes_of(rules_.parameter_dtype) : 0;
  if (memory_.master > 0) {
    arrays_.parameters = make(memory_of_arrays_[0], "parameters");
  } else if (f32) {
    arrays_.parameters = reinterpret_cast<float*>(results);
  }
  if (rules_.state8) {
    make_states8(states);
  } else if (states > 0 && kernels::takes_whole_keys(rules_.optimizer)) {
    make_state_pieces(states);
  } else {
    if (states > 0) arrays_.state0 = make(memory_of_arrays_[1], "optimizer state");
    if (states > 1) arrays_.state1 = make(memory_of_arrays_[2], "optimizer state");
  }
  if (rules_.gated && !has_parent_) arrays_.sums = make(memory_of_sums_, "sums of a gated round");
  arrays_.shelves = make_shelves(shelves_, true);
  docks_.resize(spec_->branches);
  if (!takes_snapshots_ || !box_has_state(*spec_)) return;
  arrays_.copy.parameters = make(memory_of_copies_[0], "snapshots");
  if (states > 0) arrays_.copy.state0 = make(memory_of_copies_[1], "snapshots");
  if (states > 1) arrays_.copy.state1 = make(memory_of_copies_[2], "snapshots");
  if (arrays_.view) arrays_.copy.view = make(memory_of_copies_[3], "snapshots");
  arrays_.copy.shelves = make_shelves(copied_shelves_, false);
  // Else the cores do it, chunk by chunk, in the first snapshot, while the ranks wait.
  for (const numa::Memory& copy : memory_of_copies_) numa::populate(copy.bytes());
  const size_t chunks = plan_.chunks.size();
  const uint32_t ranks = rules_.lock_step() ? 0 : saved_ranks;
  memory_of_clocks_ = allocate(SavedClocks::bytes(chunks, ranks), node,
                               fmt::format("clocks of job '{}'", spec_->name));
  numa::populate(memory_of_clocks_.bytes());
  auto* const steps = reinterpret_cast<uint64_t*>(memory_of_clocks_.bytes().data());
  arrays_.copy.clocks = {
      .steps = steps, .latest = ranks > 0 ? steps + chunks : nullptr, .ranks = ranks};
}

size_t JobPart::saved_arrays() const { return saved_arrays_of(*spec_); }

template <typename Arrays>
SavedImage JobPart::image_of(const Arrays& arrays) const {
  std::vector<std::span<std::byte>> memory;
  for (size_t array = 0; array < saved_arrays() && takes_snapshots_; ++array) {
    memory.push_back(
        std::as_writable_bytes(std::span(array_of(arrays, 0, array), plan_.box_elements)));
  }
  const size_t arrays_of_shelves = spec_->branches * arrays.shelves.each;  // docks are here alone
  for (float* const array : arrays.shelves.arrays.first(arrays_of_shelves)) {
    if (takes_snapshots_) {
      memory.push_back(std::as_writable_bytes(std::span(array, plan_.box_elements)));
    }
  }
  if (saved_clocks().steps) {
    memory.push_back(memory_of_clocks_.bytes().first(
        SavedClocks::bytes(plan_.chunks.size(), saved_clocks().ranks)));
  }
  for (uint64_t* const steps : arrays.shelves.steps.first(spec_->branches)) {
    if (takes_snapshots_) {
      memory.push_back(std::as_writable_bytes(std::span(steps, plan_.chunks.size())));
    }
  }
  return SavedImage(std::move(memory));
}
template SavedImage JobPart::image_of(const SnapshotArrays& arrays) const;

SavedImage JobPart::image_of_values() {
  SavedImage image = image_of(loaded());
  for (Shelf& dock : docks_) image.append(dock.image());
  return image;
}

// Converts parameters to 16-bit results as the optimizer does. Out of lock-step the results of each
// rank are made when it joins.
void JobPart::publish_restored(const Manifest& saved) {
  take_loaded_states();
  uint64_t* const steps = saved_clocks().steps;
  if (rules_.lock_step() && steps) take_steps(saved.steps, saved.round, steps);
  for (const SavedShelf& shelf : saved.branches.shelves) {
    if (is_on_disk(shelf.branch, saved)) continue;
    take_steps(shelf.steps, saved.round, shelves_.steps[shelf.place - 1]);
  }
  const auto orders = branch_orders_.add(orders_of(saved.branches.moves), saved.round + 1);
  if (steps) {
    for (const auto& core_job : core_jobs_) core_job->restore(saved_clocks(), orders);
  }
  if (!rules_.lock_step()) return;
  const void* parameters = arrays_.parameters;
  if (parameters == nullptr || parameters == arrays_.results || arrays_.view) return;
  for (const ChunkLayout& chunk : plan_.chunks) {
    if (chunk.queue == kElsewhere) continue;
    const uint64_t offset = chunk.box_offset;
    kernels::convert(arrays_.parameters + offset, kernels::DType::kF32,
                     arrays_.results + offset * kernels::bytes_of(rules_.parameter_dtype),
                     rules_.parameter_dtype, chunk.elements);
  }
}

// Out of lock-step they have a file of their own, with the clocks.
std::vector<uint64_t> JobPart::saved_steps(uint64_t round) const {
  const uint64_t* const steps = saved_clocks().steps;
  if (steps == nullptr || !rules_.lock_step()) return {};
  std::vector<uint64_t> all = gathered(steps);
  return all == std::vector{round} ? std::vector<uint64_t>() : all;
}

std::vector<uint64_t> JobPart::saved_steps_of_shelf(uint32_t shelf) const {
  return gathered(arrays_.copy.shelves.steps[shelf - 1]);
}

// By chunk, by key, or one for all: as few as tell them.
std::vector<uint64_t> JobPart::gathered(const uint64_t* steps) const {
  const std::vector<ChunkLayout>& chunks = plan_.chunks;
  std::vector<uint64_t> of_chunks(steps, steps + chunks.size()), of_keys(spec_->keys.size());
  if (std::ranges::all_of(of_chunks, [steps](uint64_t n) { return n == *steps; })) return {*steps};
  bool is_of_keys = true;
  for (size_t i = 0; i < chunks.size(); ++i) {
    uint64_t& of_key = of_keys[chunks[i].key];
    if (chunks[i].key_element == 0) of_key = of_chunks[i];
    is_of_keys = is_of_keys && of_key == of_chunks[i];
  }
  return is_of_keys ? of_keys : of_chunks;
}

// By chunk, from as they were gathered; none: so many as rounds. REQUIRES: the job is in lock-step.
// Throws Error(kInvalid).
void JobPart::take_steps(const std::vector<uint64_t>& from, uint64_t round, uint64_t* to) const {
  const size_t chunks = plan_.chunks.size();
  if (from.size() > 1 && from.size() != spec_->keys.size() && from.size() != chunks) {
    fail(ErrorCode::kInvalid, "the checkpoint of job '{}' has {} steps for {} keys in {} chunks",
         spec_->name, from.size(), spec_->keys.size(), chunks);
  }
  for (size_t i = 0; i < chunks; ++i) {
    const size_t at = from.size() == chunks ? i : from.size() == 1 ? 0 : plan_.chunks[i].key;
    to[i] = from.empty() ? round : from[at];
  }
}

// Null: the core has slots of everything.
SlotWindow* JobPart::make_window(uint32_t core) {
  const CorePlan& of = plan_.cores[core];
  SlotWindow::Shape shape{.max_ranks = spec_->max_ranks,
                          .first_rank = ranks_.first,
                          .end_rank = ranks_.end,
                          .places = window_places(plan_, of).places,
                          .block_places = kMostMoved,
                          .os_node = of.os_node,
                          .box = &box_windows_};
  if (shape.places == 0 && !plan_.shares_slots()) return nullptr;
  for (const uint32_t queue : of.queues) {
    shape.queue_chunks.push_back(static_cast<uint32_t>(plan_.queue_chunks[queue].size()));
    for (const uint32_t id : plan_.queue_chunks[queue]) {
      const ChunkLayout& chunk = plan_.chunks[id];
      shape.slots.push_back({chunk.slot_offset, plan_.slot_room_of(chunk)});
    }
  }
  return windows_.emplace_back(std::make_unique<SlotWindow>(std::move(shape))).get();
}

// Null: each chunk has a slot.
SharedSlots* JobPart::make_shared_slots(uint32_t core) {
  if (!plan_.shares_slots()) return nullptr;
  std::vector<uint32_t> slot_of;
  uint32_t slots = 0;
  for (const uint32_t queue : plan_.cores[core].queues) {
    const uint32_t shared = plan_.queue_shares[queue];
    for (size_t i = 0; i < plan_.queue_chunks[queue].size(); ++i) {
      slot_of.push_back(slots + static_cast<uint32_t>(i % shared));
    }
    slots += shared;
    const uint64_t bytes = shared * plan_.shared_room(plan_.queue_chunks[queue]);
    box_windows_.bytes += (ranks_.end - ranks_.first) * bytes;
  }
  return shared_
      .emplace_back(std::make_unique<SharedSlots>(std::move(slot_of), slots, spec_->max_ranks))
      .get();
}

std::string JobPart::note_of_windows() {
  if (!box_windows_.refused || std::exchange(told_of_refusal_, true)) return "";
  return fmt::format(
      "job '{}': its windows of gradients cannot grow, as all of --memory-limit is in use: ranks "
      "that push in different orders wait until there is room; end another job, or raise "
      "--memory-limit",
      spec_->name);
}

std::vector<CoreChunk> JobPart::chunks_of(uint32_t core) const {
  std::vector<CoreChunk> out;
  const std::vector<uint32_t>& queues = plan_.cores[core].queues;
  out.reserve(chunks_on(plan_, plan_.cores[core]));
  for (size_t q = 0; q < queues.size(); ++q) {
    for (uint32_t id : plan_.queue_chunks[queues[q]]) {
      const ChunkLayout& chunk = plan_.chunks[id];
      CoreChunk c;
      c.queue = static_cast<uint16_t>(q);
      c.offset = chunk.box_offset;
      c.worker_offset = chunk.offset;
      c.slot_offset = chunk.slot_offset;
      c.dtype = gradient_dtype(*spec_, spec_->keys[chunk.key]);
      c.schedule = schedules_.number_of(chunk.key);
      c.elements = chunk.elements;
      const SlotFormat& format = plan_.key_format[chunk.key];
      c.form = !format.is_rows()       ? format.is_factors() ? kernels::SlotForm::kFactors
                                                             : kernels::SlotForm::kElements
               : format.rank_limit > 0 ? kernels::SlotForm::kEither
                                       : kernels::SlotForm::kRows;
      c.columns = format.columns;
      c.limit = format.rank_limit > 0 ? format.rank_limit : format.rows_limit;
      c.lazy = spec_->keys[chunk.key].lazy;
      const kernels::Fold fold = fold_of(spec_->keys[chunk.key]);
      c.value = fold.type;
      c.operation = fold.operation;
      // A rank without rows of this chunk has rows of another one, and has sent a gradient of both.
      // Where rows are but the other form of pairs, a chunk without any has none. What a source
      // sends to its standby has no rows.
      c.skips = spec_->keys[chunk.key].rows_limit == 0 || spec_->keys[chunk.key].rank_limit > 0 ||
                rules_.mirrors;
      c.id = id;
      c.priority = spec_->keys[chunk.key].priority;
      c.hyper_class = classes_.of_key[chunk.key];
      out.push_back(c);
    }
  }
  return out;
}

std::string JobPart::where(uint32_t chunk) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  return fmt::format("key '{}', elements {} to {}", spec_->keys[c.key].name, c.key_element,
                     c.key_element + c.elements - 1);
}

}  // namespace phub
