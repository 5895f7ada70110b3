// A CoreJob with everything around it in the test's hands: what arrives, what can be posted, and
// the slots of the ranks.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "phub/core/core_job.h"
#include "transport/wire.h"

namespace phub::testing {

// What is still to be taken. Takes without giving memory back, as the core's thread must.
class Inbox {
 public:
  void push_back(const Arrival& arrival) { all_.push_back(arrival); }
  bool empty() const { return taken_ == all_.size(); }
  const Arrival& pop_front() { return all_[taken_++]; }
  void clear() { taken_ = all_.size(); }
  size_t pending() const { return all_.size() - taken_; }

 private:
  std::vector<Arrival> all_;
  size_t taken_ = 0;
};

// What a test's endpoints have in common. Base: Endpoint, or one that is more.
template <class Base>
class InboxEndpoint : public Base {
 public:
  size_t poll(std::span<Arrival> out) override {
    size_t n = 0;
    while (n < out.size() && !inbox.empty()) out[n++] = inbox.pop_front();
    return n;
  }
  void flush() override { flushed = posted.size(); }
  bool arm(std::span<const uint32_t> /*after*/) override { return inbox.empty(); }
  void disarm() override {}
  int wake_fd() const override { return -1; }

  Inbox inbox;
  std::vector<std::pair<uint32_t, Write>> posted;  // to which rank, or queue
  size_t flushed = 0;
  size_t room = ~size_t{0};
};

class FakeEndpoint : public InboxEndpoint<BoxEndpoint> {
 public:
  bool post(QueuePair to, const Write& write) override {
    EXPECT_EQ(to.queue, 0u);
    EXPECT_TRUE(attached.contains(to.rank)) << "a write to rank " << to.rank << ", not attached";
    if (room == 0) return false;
    --room;
    posted.emplace_back(to.rank, write);
    return true;
  }
  bool arm(std::span<const uint32_t> after) override {
    wake_after.assign(after.begin(), after.end());
    return InboxEndpoint::arm(after);
  }
  void attach(uint32_t rank, uint32_t) override {
    EXPECT_TRUE(attached.insert(rank).second) << "rank " << rank << " is attached twice";
  }
  void detach(uint32_t rank) override {
    EXPECT_EQ(attached.erase(rank), 1u) << "rank " << rank << " is detached, but was not there";
  }
  void use_window(SlotWindow&) override {}  // the test writes to its places
  uint64_t now_ns() const override { return time_ns; }

  std::set<uint32_t> attached;
  std::vector<uint32_t> wake_after;
  uint64_t time_ns = 0;
};

template <typename TheEndpoint>
struct BasicCoreJobRig {
  struct Options {
    JobParameters parameters = {.max_ranks = 3};
    uint32_t chunks = 4;
    uint32_t elements = 64;                       // of each chunk
    kernels::DType dtype = kernels::DType::kF32;  // of gradients
    uint32_t stride = 0;  // elements from one chunk to the next; 0: those of a chunk
    kernels::SlotForm form = kernels::SlotForm::kElements;
    uint32_t columns = 0, limit = 0;  // of a compact one
    bool lazy = false;
    std::vector<uint32_t> expected = {0, 1, 2};
    std::vector<int32_t> priorities = {};
    bool admit = true;  // everyone who is expected
    bool snapshots = false;
    uint32_t shelves = 0;
    CoreJob::MakeLockStep make_lock_step = {};
    SlotWindow* window = nullptr;
    SharedSlots* shared = nullptr;
    uint32_t shared_slots = 0;  // so many slots the chunks share; 0: each has its own
  };

  // Parameters and one state of branches that do not run.
  struct Shelves {
    std::vector<std::vector<float>> arrays;    // [shelf][2]
    std::vector<std::vector<uint64_t>> steps;  // [shelf]
    std::vector<float*> at;
    std::vector<uint64_t*> steps_at;
    ShelfArrays view() const { return {.arrays = at, .steps = steps_at, .each = 2}; }
  };

  explicit BasicCoreJobRig(Options options) : options_(std::move(options)) {
    const JobParameters& p = options_.parameters;
    const size_t total = size_t{options_.chunks} * stride();
    slots.assign(p.max_ranks, std::vector<std::byte>(total * kernels::bytes_of(options_.dtype)));
    const size_t copies = p.rules.own_results() ? p.max_ranks : 1;
    results.assign(copies * total * kernels::bytes_of(p.rules.parameter_dtype), std::byte{0});
    parameters.assign(total, 0);
    for (auto* array : {&state, &copy_parameters, &copy_state}) array->assign(total, 0);
    sums.assign(p.rules.gated ? total : 0, 0);
    hyper = {{.from_round = 0, .values = kernels::default_hyper(p.rules.optimizer)}};
    hyper.front().values.lr = 1;
    std::vector<CoreChunk> chunks;
    for (uint32_t i = 0; i < options_.chunks; ++i) {
      CoreChunk chunk;
      chunk.offset = uint64_t{i} * stride();
      chunk.slot_offset = kernels::slot_bytes(options_.dtype, uint64_t{slot_of(i)} * stride());
      chunk.dtype = options_.dtype;
      chunk.schedule = p.schedules.empty() ? 0 : 1;
      chunk.elements = options_.elements;
      chunk.form = options_.form;
      chunk.columns = options_.columns;
      chunk.limit = options_.limit;
      chunk.lazy = options_.lazy;
      chunk.id = options_.chunks - 1 - i;  // not its index in the queue
      chunk.priority = i < options_.priorities.size() ? options_.priorities[i] : 0;
      chunks.push_back(chunk);
    }
    copy_steps.assign(options_.snapshots ? options_.chunks : 0, 0);
    copy_clocks.assign(p.rules.lock_step() ? 0 : copy_steps.size() * p.max_ranks, 0);
    make_shelves(shelves, total);
    if (options_.snapshots) make_shelves(copied_shelves, total);
    const bool in_results =
        !p.rules.own_results() && p.rules.parameter_dtype == kernels::DType::kF32;
    job = std::make_unique<CoreJob>(
        0, p,
        JobArrays{
            .results = results.data(),
            .result_stride =
                p.rules.own_results() ? total * kernels::bytes_of(p.rules.parameter_dtype) : 0,
            .parameters = in_results ? reinterpret_cast<float*>(results.data()) : parameters.data(),
            .state0 = state.data(),
            .sums = sums.data(),
            .copy = {.parameters = options_.snapshots ? copy_parameters.data() : nullptr,
                     .state0 = options_.snapshots ? copy_state.data() : nullptr,
                     .clocks = options_.snapshots ? saved_clocks() : SavedClocks(),
                     .shelves = copied_shelves.view()},
            .shelves = shelves.view()},
        std::move(chunks), endpoint, view(hyper), options_.expected, 1, options_.make_lock_step,
        options_.window, options_.shared);
    if (!options_.admit) return;
    job->hold();
    Boundary boundary{.round = 1};
    for (const uint32_t rank : options_.expected)
      boundary.admitted.push_back(admission(rank, 1, 1));
    job->commit(boundary);
    take_posts();
  }

  void make_shelves(Shelves& made, size_t elements) const {
    made.arrays.assign(2 * options_.shelves, std::vector<float>(elements));
    made.steps.assign(options_.shelves, std::vector<uint64_t>(options_.chunks));
    for (auto& array : made.arrays) made.at.push_back(array.data());
    for (auto& steps : made.steps) made.steps_at.push_back(steps.data());
  }
  Boundary::Admitted admission(uint32_t rank, uint32_t incarnation, uint64_t first_round) {
    return {
        .rank = rank, .incarnation = incarnation, .first_round = first_round, .slots = slots[rank]};
  }
  HyperView view(const std::vector<HyperVersion>& versions) const {
    return {.schedule = versions, .changes = {}, .scales = scales};
  }
  // Of snapshots.
  SavedClocks saved_clocks() {
    if (options_.parameters.rules.lock_step()) return {.steps = copy_steps.data()};
    return {.steps = copy_steps.data(),
            .latest = copy_clocks.data(),
            .ranks = options_.parameters.max_ranks};
  }
  void arrive(uint32_t rank, const Imm& imm) {
    endpoint.inbox.push_back({.rank = rank, .imm = encode(imm)});
  }
  uint32_t slot_of(uint32_t chunk) const {
    return options_.shared_slots > 0 ? chunk % options_.shared_slots : chunk;
  }
  void fill(uint32_t rank, uint32_t chunk, float value) {
    auto* slot = reinterpret_cast<float*>(slots[rank].data()) + slot_of(chunk) * stride();
    std::fill_n(slot, options_.elements, value);
  }
  // The gradient of the rank's chunk becomes `value`, and is announced.
  void push(uint32_t rank, uint32_t chunk, uint64_t round, float value) {
    fill(rank, chunk, value);
    arrive(rank, {chunk, static_cast<uint32_t>(round), ImmKind::kData});
  }
  void push_all(std::span<const uint32_t> ranks, uint32_t chunk, uint64_t round) {
    for (const uint32_t rank : ranks) push(rank, chunk, round, digit(rank));
  }
  // Base 4: how often rank r is in a sum is its r-th digit.
  static float digit(uint32_t rank) { return static_cast<float>(uint64_t{1} << (2 * rank)); }

  void run() {
    while (job->step()) {
    }
  }
  float result(uint32_t chunk, uint32_t element = 0) {
    return reinterpret_cast<const float*>(results.data())[chunk * stride() + element];
  }
  uint32_t stride() const { return options_.stride > 0 ? options_.stride : options_.elements; }
  // Of a chunk that has the same in all elements, as a place has it now.
  float at(uint32_t place, Places::Array array, uint32_t chunk) const {
    return *job->elements_of(place, array, chunk);
  }
  // What was written back to a rank, where each has results of its own.
  float result_of(uint32_t rank, uint32_t chunk) {
    const size_t total = size_t{options_.chunks} * stride();
    return reinterpret_cast<const float*>(results.data())[rank * total + chunk * stride()];
  }
  uint64_t waited_for() {  // a bit for each rank
    Probe probe{.arrivals = std::vector<uint64_t>(options_.parameters.max_ranks),
                .waited_for = {0}};
    job->probe(probe);
    return probe.waited_for[0];
  }
  // The results that were posted since the last call: "rank:chunk@round", n: null, i: of initial
  // parameters a part.
  std::vector<std::string> take_posts() {
    std::vector<std::string> out;
    for (const auto& [rank, write] : std::exchange(endpoint.posted, {})) {
      const Imm imm = decode(write.imm);
      const bool initial = imm.kind == ImmKind::kInitial, null = imm.kind == ImmKind::kNull;
      EXPECT_TRUE(!null || write.bytes == 0);
      out.push_back(fmt::format("{}:{}{}{}{}", rank, imm.chunk, initial ? "i" : "@", imm.round,
                                null ? "n" : ""));
    }
    return out;
  }
  // "violation 1 bytes 252", "broken 0", "excluded 2 chunk 3 @7", …
  std::vector<std::string> take_reports() {
    static const std::map<CoreReport::Type, std::string> kNames = {
        {CoreReport::kBroken, "broken"},       {CoreReport::kViolation, "violation"},
        {CoreReport::kNonFinite, "nonfinite"}, {CoreReport::kExcluded, "excluded"},
        {CoreReport::kSnapped, "snapped"},     {CoreReport::kGotState, "got"},
        {CoreReport::kSetState, "set"},        {CoreReport::kParentBroke, "parent"},
        {CoreReport::kSwitchEnded, "switch"},  {CoreReport::kSwitchBegun, "begun"},
        {CoreReport::kQuorum, "quorum"}};
    static constexpr const char* kViolations[] = {"stream",       "chunk", "kind",     "round",
                                                  "bytes",        "place", "interest", "weight",
                                                  "participants", "slot"};
    std::vector<std::string> out;
    CoreReport report;
    while (job->next_report(report)) {
      std::string text = kNames.at(report.type) + " ";
      if (report.type == CoreReport::kSnapped || report.type == CoreReport::kGotState ||
          report.type == CoreReport::kSetState || report.type == CoreReport::kSwitchBegun ||
          report.type == CoreReport::kQuorum) {
        out.push_back(fmt::format("{}@{}", text, report.round));
        continue;
      }
      text += report.rank == CoreReport::kNoRank ? "nobody" : std::to_string(report.rank);
      if (report.type == CoreReport::kNonFinite || report.type == CoreReport::kExcluded) {
        text += fmt::format(" chunk {} @{}", report.chunk, report.round);
      }
      if (report.type == CoreReport::kViolation) {
        text += fmt::format(" {} {}", kViolations[report.violation], report.said);
      } else if (report.type != CoreReport::kSwitchEnded) {
        EXPECT_EQ(report.said, 0u) << text;
      }
      out.push_back(std::move(text));
    }
    return out;
  }

  const Options options_;
  TheEndpoint endpoint;
  std::vector<std::vector<std::byte>> slots;
  std::vector<std::byte> results;
  std::vector<float> parameters, state, sums;
  std::vector<float> copy_parameters, copy_state;  // snapshots
  std::vector<uint64_t> copy_steps, copy_clocks;
  Shelves shelves, copied_shelves;
  std::vector<HyperVersion> hyper;
  std::vector<KeyScales> scales = {{}};
  std::unique_ptr<CoreJob> job;
};
using CoreJobRig = BasicCoreJobRig<FakeEndpoint>;

}  // namespace phub::testing
