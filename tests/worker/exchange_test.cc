// Workers, library, control port, shared memory and cores together: what callers lend, set and ask
// for (any_job_test: the bytes that come back are those of a single process).
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <future>
#include <thread>

#include "kernels/kernels.h"
#include "tests/oracle/coded.h"
#include "tests/oracle/reference.h"
#include "tests/worker/box.h"

namespace phub {
namespace exchange_test {

using kernels::DType;
using testing::Box;
using testing::each_rank;

// The gradient of one element: the same in the worker and in the reference.
float gradient_of(uint64_t seed, uint32_t rank, uint64_t round, size_t key, size_t element) {
  uint64_t x = seed + rank * 0x9e3779b97f4a7c15u + round * 0xbf58476d1ce4e5b9u +
               key * 0x94d049bb133111ebu + element * 0xd6e8feb86659fd93u;
  x ^= x >> 31;
  x *= 0x7fb5d329728ea185u;
  x ^= x >> 27;
  return (static_cast<float>(x % 20001) - 10000.0f) / 3000.0f;
}

struct Case {
  std::string optimizer = "nesterov";
  std::string reduction = "mean";
  uint32_t ranks = 3;
};

JobSpec spec_of(const Case& c, std::string name) {
  JobSpec spec;
  spec.name = std::move(name);
  spec.keys = {{.name = "a", .elements = 1},
               {.name = "b", .elements = 33, .priority = 3, .lr_scale = 0.5},
               {.name = "c", .elements = 5000, .decay_scale = 0},
               {.name = "d", .elements = 30000, .priority = -1}};
  spec.world_size = c.ranks;
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  spec.optimizer = c.optimizer;
  spec.reduction = c.reduction;
  spec.initial = c.optimizer == "none" ? "zeros" : "broadcast";
  if (c.optimizer != "none") spec.hyper = {{"lr", 0.05}, {"weight_decay", 0.01}};
  return spec;
}

void fill(std::span<std::byte> slot, DType type, uint64_t seed, uint32_t rank, uint64_t round,
          size_t key) {
  const size_t n = slot.size() / kernels::bytes_of(type);
  for (size_t e = 0; e < n; ++e) {
    reference::store(slot.data(), type, e, gradient_of(seed, rank, round, key, e));
  }
}

// Between every format of the memory and every format of the job.
TEST(Exchange, RegisteredMemoryIsConvertedAndScaled) {
  constexpr size_t kElements = 9001;
  Box box;
  for (const std::string job : {"f32", "bf16", "f16"}) {
    JobSpec spec;
    spec.name = "convert-" + job;
    spec.keys = {{.name = "w", .elements = kElements}};
    spec.gradient_dtype = spec.parameter_dtype = job;
    Worker worker(box.options(spec));
    worker.wait_all();
    for (const std::string memory : {"f32", "bf16", "f16"}) {
      for (const float scale : {1.0f, 0.375f, -3.3f}) {
        SCOPED_TRACE(job + " from " + memory + " times " + std::to_string(scale));
        const DType inside = *kernels::parse_dtype(job), outside = *kernels::parse_dtype(memory);
        const size_t bytes = kElements * kernels::bytes_of(outside);
        std::vector<std::byte> gradient(bytes), result(bytes), want(bytes);
        fill(gradient, outside, 5, 0, worker.round(0), 0);
        std::vector<std::byte> slot(kElements * kernels::bytes_of(inside));
        for (size_t e = 0; e < kElements; ++e) {
          reference::store(slot.data(), inside, e,
                           reference::load(gradient.data(), outside, e) * scale);
          reference::store(want.data(), outside, e, reference::load(slot.data(), inside, e));
        }
        worker.register_memory(0, {.gradient = gradient.data(),
                                   .parameters = result.data(),
                                   .gradient_dtype = memory,
                                   .parameter_dtype = memory,
                                   .gradient_scale = scale});
        worker.push_pull(0);
        EXPECT_TRUE(result == want);
      }
    }
    EXPECT_THROW(worker.register_memory(0, {.gradient_dtype = "f64"}), Error);
    EXPECT_THROW(worker.register_memory(0, {.gradient_scale = NAN}), Error);
  }
}

// The scaled elements are what a coded format is of.
TEST(Exchange, RegisteredMemoryIsScaledAndThenCoded) {
  constexpr size_t kElements = 9001;
  Box box;
  for (const char* format : {"fp8-e4m3", "fp8-e5m2", "int32", "int8", "int4", "topk"}) {
    JobSpec spec;
    spec.name = format;
    spec.keys = {{.name = "w", .elements = kElements}};
    spec.gradient_dtype = format;
    spec.rounding = "stochastic";
    Worker worker(box.options(spec));
    worker.wait_all();
    EXPECT_EQ(worker.gradient_bytes(0).size(), kElements * sizeof(float));
    CodedRank sender(spec, 0);
    for (const std::string memory : {"f32", "bf16", "f16", "f32"}) {
      for (const float scale : {1.0f, 0.375f, -3.3f}) {
        SCOPED_TRACE(std::string(format) + " from " + memory + " times " + std::to_string(scale));
        const DType outside = *kernels::parse_dtype(memory);
        std::vector<std::byte> gradient(kElements * kernels::bytes_of(outside));
        std::vector<float> result(kElements), pushed(kElements);
        const uint64_t round = worker.round(0) + 1;
        fill(gradient, outside, 5, 0, round, 0);
        for (size_t e = 0; e < kElements; ++e) {
          pushed[e] = reference::load(gradient.data(), outside, e) * scale;
        }
        worker.register_memory(0, {.gradient = gradient.data(),
                                   .parameters = result.data(),
                                   .gradient_dtype = memory,
                                   .gradient_scale = scale});
        worker.push_pull(0);
        EXPECT_TRUE(result == sender.send(0, round, pushed));
        worker.register_memory(0, {});
      }
    }
  }
}

// Of few bytes and of more than caches keep, whose copies go past them. The library's memory has
// them afterwards.
TEST(Exchange, AGradientIsCopiedAndPushed) {
  Box box;
  for (const char* format : {"f32", "bf16", "int8"}) {
    for (const size_t elements : {9001, 3'000'001}) {
      SCOPED_TRACE(format + std::to_string(elements));
      JobSpec spec;
      spec.name = format + std::to_string(elements);
      spec.keys = {{.name = "w", .elements = elements}};
      spec.gradient_dtype = format;
      Worker worker(box.options(spec));
      worker.wait_all();
      const DType inside = *kernels::parse_dtype(gradient_memory_format(spec, spec.keys[0]));
      CodedRank sender(spec, 0);
      for (uint64_t round = 1; round <= 2; ++round) {
        std::vector<std::byte> gradient(1 + elements * kernels::bytes_of(inside));
        const std::span<std::byte> odd = std::span(gradient).subspan(1);  // at any address
        std::vector<std::byte> even(odd.size());
        fill(even, inside, 5, 0, round, 0);
        std::ranges::copy(even, odd.begin());
        const uint64_t copied = worker.stats().bytes_copied;
        worker.push_copy(0, odd);
        EXPECT_GE(worker.stats().bytes_copied, copied + odd.size());
        std::ranges::fill(gradient, std::byte{7});
        EXPECT_TRUE(std::ranges::equal(worker.gradient_bytes(0), even));
        worker.wait(0);
        std::vector<float> pushed(elements);
        for (size_t e = 0; e < elements; ++e) pushed[e] = reference::load(even.data(), inside, e);
        const bool is_coded = format == std::string("int8");
        EXPECT_TRUE(std::ranges::equal(worker.parameters(0),
                                       is_coded ? sender.send(0, round, pushed) : pushed));
      }
    }
  }
}

// Nothing is copied over TCP, each way once over shared memory.
TEST(Exchange, MemoryThatIsRegisteredIsUsedInPlace) {
  constexpr uint32_t kRanks = 2;
  constexpr size_t kElements = 300'000, kBytes = kElements * sizeof(float);
  constexpr uint64_t kRounds = 5;
  Box box(2);
  JobSpec spec;
  spec.name = "place";
  spec.keys = {{.name = "a", .elements = 5},
               {.name = "b", .elements = kElements},
               {.name = "c", .elements = 77}};
  spec.world_size = kRanks;
  each_worker(box, spec, [&](Worker& worker, uint32_t rank) {
    const bool in_place = worker.connection().starts_with("tcp");
    // What a box of this host reads and writes.
    const bool shows_memory = worker.connection().find("over memory") != std::string::npos;
    std::vector<float> gradient(kElements);
    std::vector<float> memory(kElements + 2, -7);  // with a guard at either end
    float* all = memory.data() + 1;
    const std::vector<float> before(worker.parameters(1).begin(), worker.parameters(1).end());
    worker.register_memory(1, {.gradient = gradient.data(), .parameters = all});
    worker.wait(1);  // copies what is here
    const uint64_t copied = worker.stats().bytes_copied;
    for (uint64_t round = 1; round <= kRounds; ++round) {
      for (const size_t key : {0, 2})
        fill(worker.gradient_bytes(key), DType::kF32, 1, rank, round, key);
      fill(std::as_writable_bytes(std::span(gradient)), DType::kF32, 1, rank, round, 1);
      for (const size_t key : {2, 1, 0}) worker.push(key);
      worker.wait_all();
      const auto sum = [&](size_t key, size_t e) {
        return gradient_of(1, 0, round, key, e) + gradient_of(1, 1, round, key, e);
      };
      bool right = true;
      for (size_t e = 0; e < kElements; ++e) right &= all[e] == sum(1, e);
      for (size_t e = 0; e < 5; ++e) right &= worker.parameters(0)[e] == sum(0, e);
      for (size_t e = 0; e < 77; ++e) right &= worker.parameters(2)[e] == sum(2, e);
      EXPECT_TRUE(right) << round;
    }
    EXPECT_EQ(memory.front(), -7);
    EXPECT_EQ(memory.back(), -7);
    EXPECT_EQ(worker.stats().bytes_copied - copied, in_place ? 0 : 2 * kRounds * kBytes);
    const std::span<const float> library = worker.parameters(1);
    if (in_place && !shows_memory) {
      EXPECT_TRUE(std::equal(before.begin(), before.end(), library.begin()));
    }
    // Taken back while it is lent: first the result comes.
    fill(std::as_writable_bytes(std::span(gradient)), DType::kF32, 1, rank, 8, 1);
    worker.push_null(0);
    worker.push_null(2);
    worker.push(1);
    worker.register_memory(1, {});
    if (in_place) {
      EXPECT_EQ(all[kElements - 1],
                gradient_of(1, 0, 8, 1, kElements - 1) + gradient_of(1, 1, 8, 1, kElements - 1));
    }
    worker.wait_all();
    // In the library's memory again: the registered one stays as it is.
    const std::vector<float> kept = memory;
    fill(worker.gradient_bytes(1), DType::kF32, 1, rank, 9, 1);
    worker.push_null(0);
    worker.push_null(2);
    worker.push(1);
    worker.wait_all();
    EXPECT_EQ(library[3], gradient_of(1, 0, 9, 1, 3) + gradient_of(1, 1, 9, 1, 3));
    EXPECT_EQ(memory, kept);
    // From memory that is used in place to memory that is not: nothing goes the old way.
    std::vector<float> other(kElements), result(kElements);
    worker.register_memory(1, {.gradient = gradient.data(), .parameters = all});
    for (const bool own : {true, false}) {
      if (!own) {
        worker.register_memory(
            1, {.gradient = other.data(), .parameters = result.data(), .in_place = false});
        std::ranges::fill(gradient, NAN);
      }
      fill(std::as_writable_bytes(std::span(own ? gradient : other)), DType::kF32, 1, rank, 10, 1);
      worker.push_null(0);
      worker.push_null(2);
      worker.push(1);
      worker.wait_all();
      EXPECT_EQ((own ? all : result.data())[9],
                gradient_of(1, 0, 10, 1, 9) + gradient_of(1, 1, 10, 1, 9));
      std::ranges::fill(memory, -7);
    }
    EXPECT_EQ(worker.parameters(1)[9], result[9]);
    EXPECT_EQ(all[9], -7);
    worker.barrier();
  });
}

// Over TCP small pushes are gathered, and a rank may leave before they have been sent.
TEST(Exchange, WhatWasPushedBeforeALeaveCounts) {
  Box box(1);
  for (int job = 0; job < 20; ++job) {
    JobSpec spec;
    spec.name = "leaves" + std::to_string(job);
    spec.keys = {{.name = "a", .elements = 1}, {.name = "b", .elements = 1}};
    spec.world_size = 2;
    std::barrier<> joined(2);
    each_rank(2, [&](uint32_t rank) {
      WorkerOptions options = box.options(spec, rank);
      options.transport = "tcp";
      Worker worker(options);
      worker.wait_all();
      joined.arrive_and_wait();
      for (size_t key : {0, 1}) {
        worker.gradient(key)[0] = 3;
        worker.push(key);
      }
      if (rank == 0) return worker.leave();
      worker.wait_all();
      for (size_t key : {0, 1}) EXPECT_EQ(worker.parameters(key)[0], 6);
    });
  }
}

TEST(Exchange, ABroadcastThatLacksAKeyIsRefusedAndCanBeMadeAgain) {
  Box box;
  JobSpec spec = spec_of({.ranks = 1}, "lacking");
  Worker worker(box.options(spec));
  std::vector<std::vector<float>> initial;
  std::vector<const float*> pointers;
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    std::vector<float>& values = initial.emplace_back(spec.keys[k].elements);
    for (size_t e = 0; e < values.size(); ++e) values[e] = gradient_of(99, 0, 0, k, e);
    pointers.push_back(values.data());
  }
  EXPECT_THROW(worker.broadcast_keys(std::span(pointers).first(3)), Error);
  EXPECT_THROW(worker.broadcast_keys({}), Error);
  const float* last = std::exchange(pointers[3], nullptr);
  EXPECT_THROW(worker.broadcast_keys(pointers), Error);
  pointers[3] = last;
  EXPECT_TRUE(worker.broadcast_keys(pointers));
  for (size_t k = 0; k < spec.keys.size(); ++k) {
    const std::span<const float> here = worker.parameters(k);
    EXPECT_TRUE(std::equal(here.begin(), here.end(), pointers[k])) << k;
  }
  EXPECT_FALSE(worker.broadcast_keys(pointers));
}

// Whoever copies: what was taken back, or belonged to a worker that has left, may go at once.
TEST(Exchange, MemoryThatIsTakenBackIsNotTouchedAnyMore) {
  constexpr size_t kElements = size_t{8} << 20, kBytes = kElements * sizeof(float);
  Box box;
  JobSpec spec = spec_of({.optimizer = "none"}, "taken");
  spec.keys = {{.name = "w", .elements = kElements}};
  spec.hyper.clear();
  spec.world_size = 1;
  Worker worker(box.options(spec));
  worker.wait_all();
  for (int i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    void* memory =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    worker.register_memory(
        0, {.gradient = i % 2 ? memory : nullptr, .parameters = i % 2 ? nullptr : memory});
    auto other = std::async(std::launch::async, [&] {
      try {
        worker.push(0);
        worker.wait(0);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kFenced) << error.what();
      }
    });
    if (i % 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    } else {
      while (worker.round(0) < worker.first_round() + static_cast<uint64_t>(i) &&
             other.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
        std::this_thread::yield();
    }
    if (i < 5) {
      worker.register_memory(0, {});
    } else {
      worker.leave();
    }
    munmap(memory, kBytes);  // a copy that goes on is a SIGSEGV
    other.get();
  }
}

// What every rank sets for its next round is one change; what only one rank sets holds as well.
TEST(Exchange, GroupsOfKeysHaveValuesOfTheirOwn) {
  Box box;
  JobSpec spec = spec_of({.optimizer = "sgd", .reduction = "sum"}, "groups");
  spec.keys = {{.name = "a", .elements = 20000},
               {.name = "b", .elements = 64, .lr_scale = 0.5, .group = 2},
               {.name = "c", .elements = 64, .group = 1}};
  spec.hyper = {{"lr", 1}, {"lr@2", 4}};
  spec.schedule = {{.round = 3, .values = {{"lr", 0.5}, {"lr@1", 8}}}};
  spec.initial = "zeros";
  spec.world_size = 2;
  each_worker(box, spec, [&](Worker& worker, uint32_t r) {
    std::vector<float> want(3, 0);
    for (uint64_t round = 1; round <= 8; ++round) {
      if (round == 5) {
        EXPECT_EQ(worker.set_hyper({{"lr@0", 0.125}, {"lr@2", 16}}, round), round);
      }
      if (round == 6 && r == 1) {
        EXPECT_EQ(worker.set_hyper({{"lr", 2}}, round), round);
      }
      const std::vector<float> rates = round < 3    ? std::vector<float>{1, 2, 1}
                                       : round < 5  ? std::vector<float>{0.5, 0.25, 8}
                                       : round == 5 ? std::vector<float>{0.125, 8, 8}
                                                    : std::vector<float>{2, 1, 2};
      for (size_t key = 0; key < 3; ++key) {
        for (float& g : worker.gradient(key)) g = 1;
        worker.push(key);
      }
      worker.wait_all();
      for (size_t key = 0; key < 3; ++key) {
        want[key] -= 2 * rates[key];
        for (float p : worker.parameters(key)) {
          ASSERT_EQ(p, want[key]) << "round " << round << " key " << key;
        }
      }
    }
    worker.barrier();
    if (r == 0) {
      EXPECT_EQ(std::ranges::count(box.log("groups"), LogRecord::Kind::kHyper, &LogRecord::kind),
                2);
    }
    worker.barrier();
  });
}

// As a scheduler does: the rate of the next step is set after each, while another rank lags behind
// and its chunks of the step before are still in progress.
TEST(Exchange, ARateIsThatOfTheStepItWasSetFor) {
  Box box;
  JobSpec spec = spec_of({.optimizer = "sgd", .reduction = "sum"}, "rates");
  spec.keys = {{.name = "w", .elements = 64}, {.name = "b", .elements = 32}};
  spec.hyper = {{"lr", 1}};
  spec.initial = "zeros";
  spec.world_size = 2;
  std::barrier pushed(2), set(2);
  each_worker(box, spec, [&](Worker& worker, uint32_t r) {
    float want = 0, rate = 1;
    for (uint64_t round = 1; round <= 4; ++round) {
      for (size_t key = 0; key < 2; ++key) {
        for (float& g : worker.gradient(key)) g = 1;
      }
      if (r == 0) worker.push(0), worker.push(1);
      pushed.arrive_and_wait();
      // The step of rank 0 is over, that of rank 1 is not: its rate stays what it was.
      if (r == 0) {
        EXPECT_EQ(worker.set_hyper({{"lr", 10 * rate}}), round + 1);
      }
      set.arrive_and_wait();
      if (r == 1) worker.push(0), worker.push(1);
      worker.wait_all();
      want -= 2 * rate;
      rate *= 10;
      for (size_t key = 0; key < 2; ++key) {
        for (float p : worker.parameters(key)) ASSERT_EQ(p, want) << "round " << round;
      }
    }
    if (r == 0) {  // far ahead, and then nothing before that
      EXPECT_EQ(worker.set_hyper({{"lr", 1}}, 100), 100u);
      EXPECT_EQ(worker.set_hyper({{"lr", 2}}, 50), 100u);
      EXPECT_THROW(worker.set_hyper({{"lr", 2}}, uint64_t{1} << 40), Error);
    }
    worker.barrier();
  });
}

}  // namespace exchange_test
}  // namespace phub
