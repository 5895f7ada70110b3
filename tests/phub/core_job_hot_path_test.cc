// Between an arrival and its write-back a core asks for no memory and gives none back, whatever the
// job is and whatever happens to it; and what it has held since it was made was counted before.
// (tests/worker/hot_path_test.cc: the same of whole servers.)
#include <gtest/gtest.h>
#include <malloc.h>
#include <pthread.h>

#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "phub/core/gated.h"
#include "phub/core/shared_slots.h"
#include "tests/phub/core_script_rig.h"
#include "tests/phub/script.h"
#include "tests/worker/allocation_trap.h"
#include "transport/slot_window.h"

namespace phub {
namespace core_job_hot_path_test {

using Rig = testing::CoreJobRig;

constexpr uint32_t kChunks = 40;
constexpr uint64_t kRounds = 6;

// Of a job (core_script.h), and what happens to it: nulls; a NaN in some rounds; a queue in which
// results find no room at first; everything is sent twice.
const std::vector<std::string> kCases = {
    "",
    "mean",
    "sgd",
    "groups=(1,1),1 nulls",
    "nulls",
    "nan=exclude bad",
    "nan=pass bad",
    "full",
    "twice",
    "gated sgd",
    "gated sgd nan=skip bad",
    "gated sgd full",
    "gated sgd twice",
    "slack=2",
    "slack=2 nulls",
    "slack=2 full",
    "slack=2 twice",
};

struct Case {
  explicit Case(const std::string& text) {
    std::vector<std::string> words = testing::Words(text).words();
    for (const auto& [word, given] : {std::pair("nulls", &nulls), std::pair("bad", &bad),
                                      std::pair("full", &full_queue), std::pair("twice", &again)}) {
      *given = std::erase(words, word) > 0;
    }
    parameters = testing::core_script::JobWords(words).options.parameters;
  }
  JobParameters parameters;
  bool nulls = false, bad = false, full_queue = false, again = false;
};

void push_round(Rig& rig, const Case& one, uint64_t round) {
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const bool null = one.nulls && (rank + chunk + round) % 3 == 0;
      const bool bad = one.bad && rank == 1 && chunk == 5 && round % 2 == 0;
      if (null) {
        rig.arrive(rank, {chunk, static_cast<uint32_t>(round), ImmKind::kNull});
      } else {
        rig.push(rank, chunk, round,
                 bad ? std::numeric_limits<float>::quiet_NaN() : Rig::digit(rank));
      }
      if (one.again) rig.arrive(rank, {chunk, static_cast<uint32_t>(round), ImmKind::kData});
    }
  }
}

// In a thread that has the name of a core's. Returns how many results went out.
size_t run_case(const Case& one, uint64_t& calls) {
  RoundGate gate(1, kChunks, one.parameters.rules.on_nonfinite == OnNonFinite::kSkip);
  Rig::Options options{.parameters = one.parameters, .chunks = kChunks};
  if (one.parameters.rules.gated) {
    options.make_lock_step = [&gate](const Stages& stages) {
      return std::make_unique<Gated>(stages, gate, 0);
    };
  }
  Rig rig(std::move(options));
  size_t results = 0;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    push_round(rig, one, round);
    rig.endpoint.posted.reserve(10'000);
    rig.endpoint.room = one.full_queue ? 7 : ~size_t{0};
    {
      const testing::AllocationTrap trap;
      for (int pass = 0; pass < 100; ++pass) {
        if (pass == 50) rig.endpoint.room = ~size_t{0};
        rig.run();
      }
      calls += trap.calls();
    }
    results += rig.endpoint.posted.size();
    rig.endpoint.posted.clear();
    rig.take_reports();
  }
  return results;
}

TEST(CoreJobHotPath, AsksForNoMemory) {
  for (const std::string& text : kCases) {
    SCOPED_TRACE(text);
    const Case one(text);
    uint64_t calls = 0;
    size_t results = 0;
    std::thread([&] {
      pthread_setname_np(pthread_self(), "phub-core-0");
      results = run_case(one, calls);
    }).join();
    EXPECT_EQ(calls, 0u);
    EXPECT_GE(results, kRounds * kChunks * 3);
  }
}

// What is counted before a job is made is what it then asks for, but for what malloc adds.
TEST(CoreJobMemory, IsWhatWasCounted) {
  if (mallinfo2().uordblks == 0) GTEST_SKIP() << "sanitizers have a malloc of their own";
  for (const CoreJob::Size& size :
       {CoreJob::Size{.chunks = 1, .max_ranks = 1, .largest_chunk = 1},
        CoreJob::Size{.chunks = 5000, .max_ranks = 4},
        CoreJob::Size{.chunks = 5000, .queues = 3, .max_ranks = 65},
        CoreJob::Size{.chunks = 70, .max_ranks = 1024},
        CoreJob::Size{.chunks = 5000, .max_ranks = 4, .lock_step = false},
        CoreJob::Size{.chunks = 70, .max_ranks = 1024, .lock_step = false},
        CoreJob::Size{.chunks = 5000, .max_ranks = 64, .shares_slots = true},
        CoreJob::Size{.chunks = 5000, .places = 101},
        CoreJob::Size{.chunks = 9, .classes = 5000, .largest_chunk = 1 << 20},
        CoreJob::Size{.chunks = 9, .largest_chunk = 1 << 20, .differences = true},
        CoreJob::Size{.chunks = 9, .max_ranks = 1024, .largest_chunk = 1 << 18, .levels = 3}}) {
    SCOPED_TRACE(fmt::format("{} chunks, {} ranks, lock-step {}", size.chunks, size.max_ranks,
                             size.lock_step));
    testing::FakeEndpoint endpoint;
    const std::vector<HyperVersion> hyper(1);
    const std::vector<KeyScales> scales(size.classes);
    const std::vector<uint32_t> expected = {0};
    const std::string groups = size.levels == 3 ? "(1000,20),4" : "";
    const auto differences = size.differences
                                 ? std::optional(Differences{.format = kernels::DType::kInt8})
                                 : std::nullopt;
    std::vector<float*> arrays(size.places - 1);
    std::vector<uint64_t*> steps(size.places - 1);
    SlotWindow window({.slots = std::vector<SlotWindow::Slot>(size.chunks, {0, 4}),
                       .queue_chunks = {static_cast<uint32_t>(size.chunks)},
                       .max_ranks = static_cast<uint32_t>(size.max_ranks),
                       .end_rank = static_cast<uint32_t>(size.max_ranks),
                       .places = 0});
    SharedSlots shared(std::vector<uint32_t>(size.chunks), 1,
                       static_cast<uint32_t>(size.max_ranks));
    const struct mallinfo2 before = mallinfo2();
    std::vector<CoreChunk> chunks(size.chunks);
    for (CoreChunk& chunk : chunks) chunk.elements = static_cast<uint32_t>(size.largest_chunk);
    const auto job = std::make_unique<CoreJob>(
        0,
        JobParameters{
            .max_ranks = static_cast<uint32_t>(size.max_ranks),
            .rules = {.consistency = size.lock_step ? Consistency::kBsp : Consistency::kSsp},
            .differences = differences,
            .tree = RankTree(groups, 1024)},
        JobArrays{.shelves = {.arrays = arrays, .steps = steps, .each = 1}}, std::move(chunks),
        endpoint, HyperView{.schedule = hyper, .changes = {}, .scales = scales}, expected,
        static_cast<uint32_t>(size.queues), CoreJob::MakeLockStep(),
        size.shares_slots ? &window : nullptr, size.shares_slots ? &shared : nullptr);
    const struct mallinfo2 after = mallinfo2();
    const uint64_t held = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
    const uint64_t counted = CoreJob::bytes(size);
    // Its headers and rounding, and what it had kept back.
    const uint64_t of_malloc = 8192 + size.max_ranks * 64;
    EXPECT_GE(held + of_malloc, counted);
    EXPECT_LE(held, counted + of_malloc);
  }
}

}  // namespace core_job_hot_path_test
}  // namespace phub
