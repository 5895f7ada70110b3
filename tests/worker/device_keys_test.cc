// Keys on a device: the bits of the same job without one; no call waits; whatever ends, streams go
// on.
#include "worker/device_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/convert_scaled.h"
#include "kernels/encode.h"
#include "tests/device/device_suite.h"
#include "tests/seeds.h"
#include "tests/temporary_directory.h"
#include "tests/worker/box.h"
#include "transport/error.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"

namespace phub::testing {
namespace device_keys_test {

using kernels::DType;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;
using Direction = HostDevice::Direction;

constexpr size_t kBudget = DeviceKeys::kDeviceBytes + (64 << 20);

// Ranks are threads here, and would hold each other up in the queues that their streams share.
[[maybe_unused]] const int kQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);

// A driver that takes no memory of others.
class NoPages final : public HostPages {
  void do_register(void* /*begin*/, size_t /*bytes*/, HostUse /*use*/,
                   std::string_view what) override {
    fail(ErrorCode::kFull, "refused: {}", what);
  }
  void do_unregister(void* /*begin*/) noexcept override {}
};

std::unique_ptr<Device> make_host(size_t budget) {
  return make_host_device({.budget_bytes = budget});
}
std::unique_ptr<Device> make_slow(size_t budget) {
  return make_host_device({.name = "slow",
                           .budget_bytes = budget,
                           .copy_bytes_per_second = 2e9,
                           .copy_latency = std::chrono::microseconds(200),
                           .poison_copies = true});
}
std::unique_ptr<Device> make_staged(size_t budget) {
  static NoPages pages;
  return make_host_device({.name = "staged", .budget_bytes = budget, .pages = &pages});
}
std::unique_ptr<Device> make_cuda(size_t budget) {
  return make_cuda_device({.ordinal = 0, .budget_bytes = budget});
}
std::string none() { return ""; }
// The worker's memory is the device's, and the NIC reads and writes it.
constexpr const char* kNic = "nic";
std::string no_nic() {
  const char* const transport = std::getenv("PHUB_TRANSPORT");
  const std::string name = transport == nullptr ? "" : transport;
  return name == "ofi" || name == "verbs" ? "" : "needs PHUB_TRANSPORT=ofi or verbs";
}
std::string no_cuda() {
  const CudaDevices found = cuda_devices();
  return found.devices.empty() ? "no CUDA device: " + found.none_because : "";
}

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 5000},
               {.name = "b", .elements = 7},
               {.name = "c", .elements = 33'000}};
  spec.world_size = ranks;
  spec.optimizer = "adam";
  spec.reduction = "mean";
  spec.hyper = {{"lr", 0.01}};
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

WorkerOptions options_of_rank(const Box& box, const JobSpec& spec, uint32_t rank) {
  WorkerOptions options = box.options(spec, rank);
  return options;
}

// What one program computes with.
struct Formats {
  std::string job_gradient = "f32", job_parameter = "f32";
  DType gradient = DType::kF32, parameter = DType::kF32;
  float scale = 1;
  bool odd_rounds = false;  // some gradients are null, and some are not finite
};

bool is_null(const Formats& formats, uint32_t seed) { return formats.odd_rounds && seed % 5 == 2; }

Bytes gradient_of(const Formats& formats, uint32_t seed, uint64_t elements) {
  std::minstd_rand random(seed);
  std::vector<float> values(elements);
  for (float& value : values) value = static_cast<float>(random() % 2001) / 1000 - 1;
  if (formats.odd_rounds && seed % 3 == 0) {
    const bool is_nan = random() % 2 == 0;
    values[random() % elements] =
        is_nan ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
  }
  Bytes bytes(elements * kernels::bytes_of(formats.gradient));
  kernels::convert(values.data(), DType::kF32, bytes.data(), formats.gradient, elements);
  return bytes;
}

uint32_t seed_of(uint32_t seed, uint32_t rank, uint64_t round, size_t key) {
  return static_cast<uint32_t>(seed + 1000 * round + 100 * rank + 10 * key + 1);
}

JobSpec spec_of_factors(const std::string& name, uint32_t ranks) {
  JobSpec spec = spec_of(name, ranks);
  spec.keys.push_back({.name = "matrix", .elements = 300 * 110, .shape = {300, 110}});
  set_rank_limit(spec.keys.back(), 5);
  return spec;
}

// Of one rank and round: in two parts, of which one or both may be empty.
struct HostFactors {
  HostFactors(uint32_t seed, const KeySpec& key) {
    std::minstd_rand random(seed);
    for (uint32_t limit = key.rank_limit, p = 0; p < 2; ++p) {
      pairs[p] = random() % (limit + 1);
      limit -= pairs[p];
      for (auto* side : {&left[p], &right[p]}) {
        side->resize(pairs[p] * key.shape[side == &left[p] ? 0 : 1]);
        for (float& value : *side) value = static_cast<float>(random() % 2001) / 1000 - 1;
      }
    }
  }
  void push(Worker& worker, size_t key) const {
    const FactorPairs parts[] = {{left[0].data(), right[0].data(), pairs[0]},
                                 {left[1].data(), right[1].data(), pairs[1]}};
    worker.push_factors(key, parts, {});
  }

  uint32_t pairs[2];
  std::vector<float> left[2], right[2];
};

// What a rank pushes of a key in a round, on a device.
class OnDevice {
 public:
  OnDevice(Device& device, const KeySpec& key, const Formats& formats, uint32_t seed)
      : device_(device) {
    if (!is_factors(key)) {
      if (!is_null(formats, seed)) add(gradient_of(formats, seed, key.elements));
      return;
    }
    const HostFactors of(seed, key);
    for (const size_t part : {0, 1}) {
      add(of.left[part]);
      add(of.right[part]);
      pairs_.push_back(of.pairs[part]);
    }
  }
  void push(DeviceKeys& keys, size_t key, Stream& stream, const Formats& formats) const {
    if (pairs_.empty()) {
      const DevicePush how{.dtype = formats.gradient, .scale = formats.scale};
      return keys.push(key, memory_.empty() ? nullptr : memory_[0].data(), stream, how);
    }
    const FactorPairs parts[] = {{memory_[0].floats(), memory_[1].floats(), pairs_[0]},
                                 {memory_[2].floats(), memory_[3].floats(), pairs_[1]}};
    keys.push_factors(key, parts, stream);
  }

 private:
  template <typename T>
  void add(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    memory_.emplace_back(device_, bytes, "gradient");
    if (bytes > 0) device_.write(memory_.back().data(), values.data(), bytes);
  }

  Device& device_;
  std::vector<DeviceMemory> memory_;
  std::vector<uint32_t> pairs_;
};

bool is_coded_on_device(const JobSpec& spec, size_t key) {
  if (is_compact(spec.keys[key])) return false;
  const auto format = kernels::parse_format(gradient_format(spec, spec.keys[key]));
  return format && Device::may_encode(*format);
}

class DeviceKeysTest : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    const std::string missing = GetParam().missing();
    if (!missing.empty()) GTEST_SKIP() << missing;
  }

  WorkerOptions options_on(Device& device, const JobSpec& spec, uint32_t rank) const {
    WorkerOptions options = options_of_rank(*box_, spec, rank);
    if (GetParam().name == kNic) options.memory_device = &device;
    options.send_order = send_order_;
    return options;
  }

  // The results of all rounds and keys, as rank 0 has them, in the program's formats.
  std::vector<Bytes> without_device(const JobSpec& spec, const Formats& formats, uint32_t seed,
                                    uint64_t rounds) {
    std::vector<Bytes> results;
    each_rank(spec.world_size, [&](uint32_t rank) {
      WorkerOptions options = options_of_rank(*box_, spec, rank);
      options.send_order = send_order_;
      Worker worker(options);
      for (uint64_t round = 1; round <= rounds; ++round) {
        for (size_t key = 0; key < worker.keys(); ++key) {
          const uint64_t elements = spec.keys[key].elements;
          if (is_factors(spec.keys[key])) {
            HostFactors(seed_of(seed, rank, round, key), spec.keys[key]).push(worker, key);
            continue;
          }
          const bool null = is_null(formats, seed_of(seed, rank, round, key));
          const Bytes from = gradient_of(formats, seed_of(seed, rank, round, key), elements);
          const std::string& format = gradient_memory_format(spec, spec.keys[key]);
          kernels::convert_scaled(from.data(), formats.gradient, formats.scale,
                                  worker.gradient_bytes(key).data(), *kernels::parse_dtype(format),
                                  elements);
          worker.push(key, {.null = null});
        }
        for (size_t key = 0; key < worker.keys(); ++key) {
          worker.wait(key);
          const uint64_t elements = spec.keys[key].elements;
          Bytes result(elements * kernels::bytes_of(formats.parameter));
          kernels::convert(worker.parameter_bytes(key).data(),
                           *kernels::parse_dtype(spec.parameter_dtype), result.data(),
                           formats.parameter, elements);
          if (rank == 0) results.push_back(std::move(result));
        }
      }
    });
    return results;
  }

  // The same with keys on a device. All calls are made before any work of the first round begins.
  std::vector<Bytes> with_device(const JobSpec& spec, const Formats& formats, uint32_t seed,
                                 uint64_t rounds) {
    std::vector<Bytes> results;
    // On one GPU, what a rank's streams wait for may hold up another one that allocates memory.
    std::barrier allocated(static_cast<ptrdiff_t>(spec.world_size));
    each_rank(spec.world_size, [&](uint32_t rank) {
      const auto device = GetParam().make(kBudget);
      Worker worker(options_on(*device, spec, rank));
      {
        const auto stream = device->make_stream("program");
        std::vector<OnDevice> pushed;
        std::vector<DeviceMemory> pulled;
        DeviceKeys keys(worker, *device);
        for (size_t key = 0; key < worker.keys(); ++key) {
          EXPECT_EQ(keys.encodes(key), is_coded_on_device(spec, key));
        }
        std::minstd_rand random(seed + rank);
        for (uint64_t round = 1; round <= rounds; ++round) {
          for (size_t key = 0; key < worker.keys(); ++key) {
            pushed.emplace_back(*device, spec.keys[key], formats, seed_of(seed, rank, round, key));
            pulled.emplace_back(
                *device, spec.keys[key].elements * kernels::bytes_of(formats.parameter), "result");
          }
        }
        allocated.arrive_and_wait();
        StreamGate gate;
        gate.close(*stream);
        std::vector<size_t> order(worker.keys());
        std::iota(order.begin(), order.end(), 0);
        for (uint64_t round = 0; round < rounds; ++round) {
          std::shuffle(order.begin(), order.end(), random);
          for (const size_t key : order) {
            pushed[round * order.size() + key].push(keys, key, *stream, formats);
          }
          std::shuffle(order.begin(), order.end(), random);
          for (const size_t key : order) {
            keys.pull(key, pulled[round * order.size() + key].data(), *stream, formats.parameter);
          }
        }
        gate.open();
        stream->synchronize();
        keys.wait();
        if (rank == 0) {
          for (const DeviceMemory& each : pulled) {
            results.emplace_back(each.bytes());
            device->read(results.back().data(), each.data(), each.bytes());
          }
        }
      }
      worker.leave();
    });
    return results;
  }

  void expect_same_bits(JobSpec spec, const Formats& formats, uint64_t rounds) {
    const auto seed = static_cast<uint32_t>(fresh_seeds(1).first);
    SCOPED_TRACE(::testing::Message() << "PHUB_SEED=" << seed);
    spec.gradient_dtype = formats.job_gradient;
    spec.parameter_dtype = formats.job_parameter;
    // Random roundings depend on the name.
    const bool same_name = spec.rounding == "stochastic";
    const std::string name = spec.name;
    if (!same_name) spec.name = name + "-plain";
    const auto plain = without_device(spec, formats, seed, rounds);
    if (same_name) ASSERT_TRUE(box_->becomes_empty());
    if (!same_name) spec.name = name + "-device";
    const auto device = with_device(spec, formats, seed, rounds);
    ASSERT_EQ(plain.size(), device.size());
    for (size_t i = 0; i < plain.size(); ++i) {
      ASSERT_TRUE(plain[i] == device[i])
          << "round " << i / spec.keys.size() + 1 << ", key " << i % spec.keys.size();
    }
  }

  std::unique_ptr<Box> box_ = std::make_unique<Box>();
  std::string send_order_ = "priority";
};

TEST_P(DeviceKeysTest, ResultsAreTheBitsOfAJobWithoutADevice) {
  expect_same_bits(spec_of("f32", 2), {}, 4);
}

TEST_P(DeviceKeysTest, SoTheyAreInOtherFormatsAndScaled) {
  expect_same_bits(
      spec_of("bf16", 2),
      {.job_gradient = "bf16", .gradient = DType::kF32, .parameter = DType::kF16, .scale = 0.375f},
      3);
  expect_same_bits(spec_of("f16", 2),
                   {.job_gradient = "f32",
                    .job_parameter = "bf16",
                    .gradient = DType::kF16,
                    .parameter = DType::kF32},
                   3);
  expect_same_bits(spec_of("scaled", 1), {.scale = 3}, 2);
}

TEST_P(DeviceKeysTest, KeysAreConvertedPieceByPiece) {
  JobSpec spec = spec_of("pieces", 1);
  spec.keys[1].elements = DeviceKeys::kPieceBytes / 4 + 1001;
  expect_same_bits(spec, {.gradient = DType::kBF16, .parameter = DType::kBF16}, 2);
}

// The same keys, whose results are sums of gradients.
JobSpec of_sums(JobSpec spec) {
  spec.optimizer = "none";
  spec.hyper.clear();
  spec.reduction = "sum";
  return spec;
}

JobSpec spec_with_parts(const std::string& name, uint32_t ranks) {
  JobSpec spec = spec_of(name, ranks);
  spec.keys[1].elements = 1'300'003;  // three parts
  return spec;
}

TEST_P(DeviceKeysTest, LargeKeysGoPartByPart) {
  expect_same_bits(spec_with_parts("parts-f32", 2), {}, 3);
  expect_same_bits(spec_with_parts("parts-bf16", 2),
                   {.job_gradient = "bf16", .gradient = DType::kF32, .parameter = DType::kF16}, 2);
}

TEST_P(DeviceKeysTest, LargeKeysAreNullAsAWholeAndPulledAgain) {
  const JobSpec spec = of_sums(spec_with_parts("null-parts", 1));
  const auto device = GetParam().make(kBudget);
  Worker worker(options_on(*device, spec, 0));
  const auto stream = device->make_stream("program");
  const size_t elements = spec.keys[1].elements;
  const DeviceMemory memory(*device, elements * sizeof(float), "values");
  DeviceKeys keys(worker, *device);
  const auto expect_all = [&](float value) {
    stream->synchronize();
    std::vector<float> read(elements);
    device->read(read.data(), memory.data(), memory.bytes());
    EXPECT_EQ(read, std::vector<float>(elements, value));
  };
  stream->fill(memory.floats(), 2.0f, elements);
  keys.push(1, memory.data(), *stream);
  keys.push(1, memory.data(), *stream, {.scale = 4});  // in the next round
  keys.pull(1, memory.data(), *stream);
  expect_all(8);
  stream->fill(memory.floats(), 1.0f, elements);
  keys.pull(1, memory.data(), *stream);
  expect_all(8);
  keys.push(1, nullptr, *stream);
  keys.pull(1, memory.data(), *stream);
  expect_all(0);
  keys.wait();
  EXPECT_EQ(worker.round(1), 3u);
}

TEST_P(DeviceKeysTest, NoGradientIsAGradientOfZero) {
  const JobSpec spec = of_sums(spec_of("null", 1));
  const auto device = GetParam().make(kBudget);
  Worker worker(options_on(*device, spec, 0));
  const auto stream = device->make_stream("program");
  const DeviceMemory memory(*device, spec.keys[1].elements * sizeof(float), "values");
  DeviceKeys keys(worker, *device);
  stream->fill(memory.floats(), 2.0f, spec.keys[1].elements);
  const auto values = [&] {
    stream->synchronize();
    std::vector<float> read(spec.keys[1].elements);
    device->read(read.data(), memory.data(), memory.bytes());
    return read;
  };
  keys.push(1, memory.data(), *stream, {.scale = 4});
  keys.pull(1, memory.data(), *stream);  // in place
  EXPECT_EQ(values(), std::vector<float>(spec.keys[1].elements, 8.0f));
  keys.push(1, nullptr, *stream);
  keys.pull(1, memory.data(), *stream);
  EXPECT_EQ(values(), std::vector<float>(spec.keys[1].elements, 0.0f));
  EXPECT_EQ(worker.round(1), 2u);
}

// A driver has room for about a thousand calls that wait, and then holds up who makes more.
TEST_P(DeviceKeysTest, MoreCallsWaitForAnotherRankThanADriverTakes) {
  constexpr size_t kKeys = 2000;
  JobSpec spec = of_sums(spec_of("many", 2));
  spec.keys.clear();
  for (size_t key = 0; key < kKeys; ++key) {
    spec.keys.push_back({.name = std::to_string(key), .elements = 1});
  }
  std::promise<void> called;
  each_rank(2, [&](uint32_t rank) {
    if (rank == 1) {
      Worker worker(options_of_rank(*box_, spec, rank));
      called.get_future().wait_for(std::chrono::seconds(1));
      for (size_t key = 0; key < kKeys; ++key) worker.push(key, {.null = true});
      for (size_t key = 0; key < kKeys; ++key) worker.wait(key);
      return worker.leave();
    }
    const auto device = GetParam().make(kBudget);
    Worker worker(options_on(*device, spec, rank));
    {
      const auto stream = device->make_stream("program");
      const DeviceMemory memory(*device, kKeys * sizeof(float), "values");
      DeviceKeys keys(worker, *device);
      stream->fill(memory.floats(), 2.0f, kKeys);
      for (size_t key = 0; key < kKeys; ++key) {
        keys.push(key, memory.floats() + key, *stream, {.scale = 4});
        keys.pull(key, memory.floats() + key, *stream);
      }
      called.set_value();
      keys.wait();
      std::vector<float> read(kKeys);
      device->read(read.data(), memory.data(), memory.bytes());
      EXPECT_EQ(read, std::vector<float>(kKeys, 8.0f));
    }
    worker.leave();
  });
}

TEST_P(DeviceKeysTest, SoAreFactors) {
  if (GetParam().name == kNic) GTEST_SKIP() << "the host puts factors together";
  expect_same_bits(spec_of_factors("factors", 2), {}, 6);
}

// Keys in three formats.
JobSpec spec_of_coded(const std::string& name, const std::vector<std::string>& formats) {
  JobSpec spec = spec_of(name, 2);
  spec.on_nonfinite = "pass";
  for (size_t key = 0; key < spec.keys.size(); ++key) spec.keys[key].format = formats[key];
  return spec;
}

TEST_P(DeviceKeysTest, CodedKeysHaveTheSameBits) {
  if (GetParam().name == kNic) GTEST_SKIP() << "coded formats are refused";
  expect_same_bits(spec_of_coded("whole", {"int8", "int4", "int8"}), {}, 5);
  expect_same_bits(spec_of_coded("float", {"fp8-e4m3", "f32", "fp8-e5m2"}), {.scale = 0.37f}, 4);
  expect_same_bits(spec_of_coded("wide", {"topk", "int8", "int32"}),
                   {.gradient = DType::kBF16, .scale = -3}, 4);
  expect_same_bits(spec_of_coded("by-round", {"f32*2,int8", "topk-100-int4", "int4*1,f32"}), {}, 4);
}

TEST_P(DeviceKeysTest, SoTheyHaveWithRandomRoundings) {
  if (GetParam().name == kNic) GTEST_SKIP() << "coded formats are refused";
  JobSpec spec = spec_of_coded("random", {"int8", "int4", "fp8-e4m3"});
  spec.rounding = "stochastic";
  expect_same_bits(spec, {.gradient = DType::kF16, .odd_rounds = true}, 5);
}

// A null, or what is not finite, leaves the residual alone.
TEST_P(DeviceKeysTest, SoTheyHaveWithGradientsThatAreNotSent) {
  if (GetParam().name == kNic) GTEST_SKIP() << "coded formats are refused";
  JobSpec spec = of_sums(spec_of_coded("odd", {"int8", "topk", "int4"}));
  spec.on_nonfinite = "exclude";
  expect_same_bits(spec, {.odd_rounds = true}, 12);
  spec = spec_of_coded("odd-passed", {"int4", "fp8-e4m3", "int8"});
  expect_same_bits(spec, {.odd_rounds = true}, 8);
}

// Nothing follows the last chunk, not even what aligns the next one.
TEST_P(DeviceKeysTest, CodedKeysOfWholeChunksHaveTheSameBits) {
  if (GetParam().name == kNic) GTEST_SKIP() << "coded formats are refused";
  JobSpec spec = spec_of_coded("whole-chunks", {"int8", "int4", "int8"});
  for (KeySpec& key : spec.keys) key.elements = 2 * spec.chunk_elements;
  expect_same_bits(spec, {}, 3);
}

TEST_P(DeviceKeysTest, LargeCodedKeysGoPartByPart) {
  if (GetParam().name == kNic) GTEST_SKIP() << "coded formats are refused";
  JobSpec spec = spec_of_coded("coded-parts", {"int8", "int8", "topk"});
  spec.keys[1].elements = 2'100'003;
  expect_same_bits(spec, {.gradient = DType::kBF16, .parameter = DType::kBF16}, 2);
}

// As a whole, where the order asks for it.
TEST_P(DeviceKeysTest, TheyAreEncodedPieceByPiece) {
  if (GetParam().name == kNic) GTEST_SKIP() << "coded formats are refused";
  send_order_ = "magnitude";
  JobSpec spec = spec_of_coded("coded-pieces", {"int8", "int32", "int4"});
  spec.keys[1].elements = DeviceKeys::kPieceBytes / 4 + 10'001;
  expect_same_bits(spec, {.gradient = DType::kBF16, .parameter = DType::kBF16}, 2);
}

TEST_P(DeviceKeysTest, AStreamWaitsForTheOtherRanks) {
  const JobSpec spec = spec_of("waits", 2);
  const auto device = GetParam().make(kBudget);
  std::unique_ptr<Worker> workers[2];
  each_rank(2, [&](uint32_t rank) {
    workers[rank] = std::make_unique<Worker>(rank == 0 ? options_on(*device, spec, rank)
                                                       : options_of_rank(*box_, spec, rank));
  });
  const auto stream = device->make_stream("program");
  const auto event = device->make_event();
  const DeviceMemory memory(*device, spec.keys[1].elements * sizeof(float), "values");
  DeviceKeys keys(*workers[0], *device);
  stream->fill(memory.floats(), 1.0f, spec.keys[1].elements);
  keys.push(1, memory.data(), *stream);
  keys.pull(1, memory.data(), *stream);
  stream->record(*event);
  EXPECT_FALSE(event->done()) << "rank 1 has not pushed";
  workers[1]->push_null(1);
  event->wait();
  keys.wait();
  EXPECT_EQ(workers[0]->round(1), 1u);
}

// What ends while rank 0's stream waits for a result: it goes on, with poison.
class DeviceKeysEndTest : public DeviceKeysTest {
 protected:
  void SetUp() override {
    DeviceKeysTest::SetUp();
    if (IsSkipped()) return;
    device_ = GetParam().make(kBudget);
    each_rank(2, [&](uint32_t rank) {
      workers_[rank] = std::make_unique<Worker>(rank == 0 ? options_on(*device_, spec_, rank)
                                                          : options_of_rank(*box_, spec_, rank));
    });
    stream_ = device_->make_stream("program");
    memory_ = DeviceMemory(*device_, spec_.keys[0].elements * sizeof(float), "results");
    gradient_ = DeviceMemory(*device_, spec_.keys[0].elements * sizeof(float), "gradients");
    keys_ = std::make_unique<DeviceKeys>(*workers_[0], *device_);
    stream_->fill(gradient_.floats(), 1.0f, spec_.keys[0].elements);
    keys_->push(0, gradient_.data(), *stream_);
    keys_->pull(0, memory_.data(), *stream_);
  }
  void TearDown() override {
    keys_.reset();
    stream_.reset();
  }

  void expect_poison() {
    stream_->synchronize();
    std::vector<uint8_t> bytes(memory_.bytes());
    device_->read(bytes.data(), memory_.data(), bytes.size());
    EXPECT_TRUE(is_poisoned(bytes));
  }
  void expect_all_calls_fail(ErrorCode code, const std::string& words) {
    for (const auto& call :
         std::vector<std::function<void()>>{[&] { keys_->push(1, memory_.data(), *stream_); },
                                            [&] { keys_->pull(1, memory_.data(), *stream_); },
                                            [&] { keys_->wait(); }, [&] { keys_->check(); }}) {
      std::string what;
      EXPECT_EQ(code_of(call, &what), code);
      EXPECT_THAT(what, HasSubstr(words));
    }
  }

  const JobSpec spec_ = [] {
    JobSpec spec = spec_of("ends", 2);
    spec.lease_ms = 5000;  // for so long a worker tries to reach a box that is gone
    return spec;
  }();
  std::unique_ptr<Device> device_;  // outlives a worker whose memory is there
  std::unique_ptr<Worker> workers_[2];
  std::unique_ptr<Stream> stream_;
  DeviceMemory memory_, gradient_;
  std::unique_ptr<DeviceKeys> keys_;
};

TEST_P(DeviceKeysEndTest, TheWorker) {
  workers_[0]->end("enough");
  expect_poison();
  expect_all_calls_fail(ErrorCode::kFenced, "enough");
}

TEST_P(DeviceKeysEndTest, TheBox) {
  box_.reset();
  expect_poison();
  expect_all_calls_fail(ErrorCode::kUnavailable, "");
}

TEST_P(DeviceKeysEndTest, TheKeys) {
  keys_.reset();
  expect_poison();
  workers_[1]->push_null(0);
  workers_[0]->wait(0);  // it was sent
  EXPECT_EQ(workers_[0]->round(0), 1u);
  workers_[0]->push(1);  // by the worker itself again
}

const DeviceFactory kDevices[] = {{"host", make_host, none},
                                  {"slow", make_slow, none},
                                  {"staged", make_staged, none},
                                  {kNic, make_host, no_nic},
                                  {"cuda", make_cuda, no_cuda}};
const auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Devices, DeviceKeysTest, ::testing::ValuesIn(kDevices), kName);
INSTANTIATE_TEST_SUITE_P(Devices, DeviceKeysEndTest, ::testing::ValuesIn(kDevices), kName);

class HostDeviceKeysTest : public ::testing::Test {
 protected:
  const JobSpec spec_ = spec_of("host", 1);
  Box box_;
  Worker worker_{options_of_rank(box_, spec_, 0)};
  std::unique_ptr<HostDevice> device_ = make_host_device({.name = "dev0", .budget_bytes = kBudget});
  std::unique_ptr<Stream> stream_ = device_->make_stream("program");
  DeviceMemory memory_{*device_, spec_.keys[0].elements * sizeof(float), "values"};
};

TEST_F(HostDeviceKeysTest, ACopyThatFailsEndsThem) {
  DeviceKeys keys(worker_, *device_);
  const auto other = device_->make_stream("other");
  const DeviceMemory result(*device_, spec_.keys[1].elements * sizeof(float), "result");
  device_->fail_copy(Direction::kToHost, 0, 20);
  StreamGate gate;
  gate.close(*stream_);
  keys.push(1, memory_.data(), *stream_);
  keys.pull(1, result.data(), *other);
  gate.open();
  other->synchronize();
  std::vector<uint8_t> bytes(result.bytes());
  device_->read(bytes.data(), result.data(), bytes.size());
  EXPECT_TRUE(is_poisoned(bytes));
  std::string what;
  EXPECT_EQ(code_of([&] { keys.wait(); }, &what), ErrorCode::kInternal);
  EXPECT_THAT(what, AllOf(HasSubstr("dev0"), HasSubstr("failed after 20 bytes")));
  EXPECT_EQ(code_of([&] { keys.pull(0, memory_.data(), *other); }), ErrorCode::kInternal);
}

// The part before was pushed, so the box waits for the rest of the gradient, which never comes.
TEST_F(HostDeviceKeysTest, ACopyThatFailsBetweenPartsEndsTheWorkerToo) {
  const JobSpec spec = spec_with_parts("half", 2);
  std::unique_ptr<Worker> workers[2];
  each_rank(2, [&](uint32_t rank) {
    WorkerOptions options = options_of_rank(box_, spec, rank);
    options.wait_timeout_ms = 20'000;
    workers[rank] = std::make_unique<Worker>(options);
    workers[rank]->wait_all();
  });
  const DeviceMemory memory(*device_, spec.keys[1].elements * sizeof(float), "gradient");
  stream_->fill(memory.floats(), 1.0f, spec.keys[1].elements);
  DeviceKeys keys(*workers[0], *device_);
  device_->fail_copy(Direction::kToHost, 1, 20);
  keys.push(1, memory.data(), *stream_);
  std::string what;  // part 0 was pushed, and may have gone to the box
  EXPECT_EQ(code_of([&] { keys.wait(); }, &what), ErrorCode::kInternal);
  EXPECT_THAT(what, HasSubstr("failed after 20 bytes"));
  EXPECT_EQ(code_of([&] { workers[0]->wait(1); }, &what), ErrorCode::kFenced);
  EXPECT_THAT(what, HasSubstr("a copy of key 'b' from dev0 failed"));
}

TEST_F(HostDeviceKeysTest, AStreamOfTheCallersThatFailedEndsThem) {
  DeviceKeys keys(worker_, *device_);
  const HostMemory host(*device_, 64, "host");
  device_->fail_copy(Direction::kToDevice, 0, 20);
  stream_->copy_to_device(memory_.data(), host.data(), host.bytes());
  EXPECT_EQ(code_of([&] { stream_->synchronize(); }), ErrorCode::kInternal);
  EXPECT_EQ(code_of([&] { keys.push(0, memory_.data(), *stream_); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { keys.wait(); }), ErrorCode::kUnavailable);
}

TEST_F(HostDeviceKeysTest, WrongCallsNameTheKeyAndChangeNothing) {
  DeviceKeys keys(worker_, *device_);
  const auto push = [&](size_t key, const void* memory, Stream& stream, float scale = 1) {
    std::string what;
    EXPECT_EQ(code_of([&] { keys.push(key, memory, stream, {.scale = scale}); }, &what),
              ErrorCode::kInvalid);
    return what;
  };
  std::vector<float> host(5000);
  const auto other = make_host_device({.name = "dev1", .budget_bytes = 4096});
  const auto others = other->make_stream("far");
  EXPECT_THAT(push(3, memory_.data(), *stream_), HasSubstr("key 3 is out of range"));
  EXPECT_THAT(push(0, host.data(), *stream_),
              AllOf(HasSubstr("push of key 'a': 20000 bytes (5000 elements of f32)"),
                    HasSubstr("not inside memory of dev0")));
  EXPECT_THAT(push(0, memory_.floats() + 1, *stream_), HasSubstr("key 'a'")) << "too short";
  EXPECT_THAT(push(2, memory_.data(), *stream_), HasSubstr("key 'c'")) << "too short";
  EXPECT_THAT(push(0, memory_.data(), *others), HasSubstr("stream 'far' is of dev1"));
  EXPECT_THAT(push(0, memory_.data(), *stream_, std::numeric_limits<float>::quiet_NaN()),
              HasSubstr("not finite"));
  std::string what;
  EXPECT_EQ(code_of([&] { keys.pull(0, host.data(), *stream_); }, &what), ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("pull of key 'a'"));
  EXPECT_EQ(code_of([&] { keys.pull(0, nullptr, *stream_); }), ErrorCode::kInvalid);
  EXPECT_EQ(worker_.round(0), 0u);
  stream_->fill(memory_.floats(), 1.0f, spec_.keys[0].elements);
  keys.push(0, memory_.data(), *stream_);
  keys.pull(0, memory_.data(), *stream_);
  keys.wait();
  EXPECT_EQ(worker_.round(0), 1u);
}

TEST_F(HostDeviceKeysTest, WrongFactorsNameTheKeyAndChangeNothing) {
  const JobSpec spec = spec_of_factors("factors", 1);
  Worker worker(options_of_rank(box_, spec, 0));
  DeviceKeys keys(worker, *device_);
  const std::vector<float> host(5 * 300);
  const auto refused = [&](size_t key, const std::vector<FactorPairs>& factors,
                           const DevicePush& how = {}) {
    std::string what;
    EXPECT_EQ(code_of([&] { keys.push_factors(key, factors, *stream_, how); }, &what),
              ErrorCode::kInvalid);
    return what;
  };
  const float* const here = memory_.floats();
  EXPECT_THAT(refused(4, {{here, here, 1}}), HasSubstr("key 4 is out of range"));
  EXPECT_THAT(refused(0, {{here, here, 1}}), HasSubstr("key 'a' is sent as it is"));
  EXPECT_THAT(refused(3, {{here, here, 3}, {here, here, 3}}),
              HasSubstr("6 pairs for key 'matrix', whose rank_limit is 5"));
  EXPECT_THAT(refused(3, {{here, here, ~0u}, {here, here, 1}}), HasSubstr("4294967296 pairs"));
  EXPECT_THAT(refused(3, {{here, here, 1}, {host.data(), here, 2}}),
              HasSubstr("2400 bytes (600 elements of f32)"));
  EXPECT_THAT(refused(3, {{here, nullptr, 2}}), HasSubstr("220 elements"));
  EXPECT_THAT(refused(3, {{here, here + 4900, 1}}), HasSubstr("110 elements")) << "too short";
  EXPECT_THAT(refused(3, {{here, here, 1}}, {.scale = 2}), HasSubstr("without a scale"));
  EXPECT_THAT(refused(3, {{here, here, 1}}, {.dtype = DType::kBF16}), HasSubstr("in f32"));
  std::string what;
  EXPECT_EQ(code_of([&] { keys.push(3, here, *stream_); }, &what), ErrorCode::kInvalid);
  EXPECT_THAT(what, HasSubstr("factors of key 'matrix' are sent: use push_factors()"));
  EXPECT_EQ(worker.round(3), 0u);
  keys.push(3, nullptr, *stream_);
  keys.push_factors(3, {}, *stream_);
  keys.wait();
  EXPECT_EQ(worker.round(3), 2u);
}

TEST_F(HostDeviceKeysTest, NeedMemoryOfTheDevice) {
  const auto small = make_host_device({.budget_bytes = DeviceKeys::kDeviceBytes - 1});
  EXPECT_EQ(code_of([&] { DeviceKeys(worker_, *small); }), ErrorCode::kFull);
  const auto enough = make_host_device({.budget_bytes = DeviceKeys::kDeviceBytes});
  DeviceKeys(worker_, *enough).wait();
}

TEST_F(HostDeviceKeysTest, MemoryOfOthersIsTakenWhereTheDeviceHasIt) {
  const auto all =
      make_host_device({.budget_bytes = DeviceKeys::kDeviceBytes, .holds_all_memory = true});
  const auto stream = all->make_stream("program");
  std::vector<float> host(5000, 1.0f), result(5000);
  DeviceKeys keys(worker_, *all);
  keys.push(0, host.data(), *stream);
  keys.pull(0, result.data(), *stream);
  keys.wait();
  EXPECT_TRUE(std::memcmp(result.data(), worker_.parameters(0).data(), 20'000) == 0);
}

class CodedDeviceKeysTest : public HostDeviceKeysTest {
 protected:
  static constexpr size_t kElements = 5000;
  JobSpec coded(const std::string& name) const {
    JobSpec spec = of_sums(spec_of(name, 1));
    spec.keys = {{.name = "a", .elements = kElements, .format = "int8"}};
    return spec;
  }
  // The gradient of a round is at memory_ and returned.
  std::vector<float> gradient(uint32_t round) {
    const Bytes bytes = gradient_of({}, round, kElements);
    device_->write(memory_.data(), bytes.data(), bytes.size());
    std::vector<float> values(kElements);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  static std::vector<float> result(Worker& worker) {
    const auto of = worker.parameters(0);
    return {of.begin(), of.end()};
  }
  // What a worker has in this round that pushes these rounds itself.
  std::vector<float> expected(const std::vector<uint32_t>& rounds) {
    Worker worker(options_of_rank(box_, coded("expected" + std::to_string(++jobs_)), 0));
    for (const uint32_t round : rounds) {
      std::ranges::copy(gradient(round), worker.gradient(0).begin());
      worker.push_pull(0);
    }
    return result(worker);
  }
  void push_alone(Worker& worker, uint32_t round) {
    std::ranges::copy(gradient(round), worker.gradient(0).begin());
    worker.push_pull(0);
  }
  void push_on(DeviceKeys& keys, uint32_t round) {
    gradient(round);
    keys.push(0, memory_.data(), *stream_);
    keys.wait();
  }

  int jobs_ = 0;
};

TEST_F(CodedDeviceKeysTest, OnlyTheCodesCrossTheBus) {
  JobSpec spec = coded("codes");
  spec.keys.push_back({.name = "large", .elements = 2'100'003, .format = "int8"});
  Worker worker(options_of_rank(box_, spec, 0));
  DeviceKeys keys(worker, *device_);
  EXPECT_EQ(worker.parts(1), 2u);
  for (const uint32_t round : {1, 2}) push_on(keys, round);
  EXPECT_EQ(result(worker), expected({1, 2}));
  EXPECT_EQ(worker.stats().bytes_copied, 0u);
  EXPECT_EQ(device_->stats().bytes_to_host, 2 * (kElements + sizeof(float)));
}

TEST_F(CodedDeviceKeysTest, TheResidualGoesToTheDeviceAndBack) {
  Worker worker(options_of_rank(box_, coded("back"), 0));
  push_alone(worker, 1);
  {
    DeviceKeys keys(worker, *device_);
    EXPECT_TRUE(keys.encodes(0));
    EXPECT_FALSE(worker.may_encode(0));
    push_on(keys, 2);
    push_on(keys, 3);
  }
  EXPECT_EQ(result(worker), expected({1, 2, 3}));
  push_alone(worker, 4);
  EXPECT_EQ(result(worker), expected({1, 2, 3, 4}));
  {
    DeviceKeys keys(worker, *device_);
    push_on(keys, 5);
    EXPECT_EQ(result(worker), expected({1, 2, 3, 4, 5}));
    gradient(6);
    keys.push(0, memory_.data(), *stream_);  // whose result may still be to come
  }
  push_alone(worker, 7);
  EXPECT_EQ(result(worker), expected({1, 2, 3, 4, 5, 6, 7}));
}

TEST_F(CodedDeviceKeysTest, TheResidualIsZeroAfterAFailure) {
  Worker worker(options_of_rank(box_, coded("lost"), 0));
  push_alone(worker, 1);
  {
    DeviceKeys keys(worker, *device_);
    device_->fail_copy(Direction::kToHost, 0, 20);
    gradient(2);
    const auto push_and_wait = [&] {  // the copy may have failed before push() returns
      keys.push(0, memory_.data(), *stream_);
      keys.wait();
    };
    EXPECT_EQ(code_of(push_and_wait), ErrorCode::kInternal);
  }
  push_alone(worker, 3);
  EXPECT_EQ(result(worker), expected({3}));
}

TEST_F(CodedDeviceKeysTest, WithoutRoomForItTheWorkerEncodes) {
  for (const bool room : {false, true}) {
    Worker worker(options_of_rank(box_, coded(room ? "room" : "no-room"), 0));
    const size_t bytes = DeviceKeys::encoding_bytes(worker);
    EXPECT_EQ(bytes, DeviceKeys::kDeviceBytes + 20'224);
    const auto device =
        make_host_device({.budget_bytes = bytes - (room ? 0 : 1), .holds_all_memory = true});
    const auto stream = device->make_stream("program");
    DeviceKeys keys(worker, *device);
    EXPECT_EQ(keys.encodes(0), room);
    for (const uint32_t round : {1, 2}) {
      const std::vector<float> from = gradient(round);
      keys.push(0, from.data(), *stream);
      keys.wait();
    }
    EXPECT_EQ(result(worker), expected({1, 2}));
  }
}

TEST_F(CodedDeviceKeysTest, WhatTheWorkerNeedsItEncodesItself) {
  WorkerOptions carries = options_of_rank(box_, coded("carries"), 0);
  carries.spec.consistency = "async";
  carries.carry_over = 2;
  Worker of_carries(carries);
  EXPECT_FALSE(DeviceKeys(of_carries, *device_).encodes(0));
  WorkerOptions some = options_of_rank(box_, coded("some"), 0);
  some.spec.chunk_elements = 1024;
  some.interest = {{.key = "a", .writes = {{0, 2000}}}};
  Worker of_some(some);
  EXPECT_FALSE(DeviceKeys(of_some, *device_).encodes(0));
  const TemporaryDirectory folder = TemporaryDirectory::in_memory();
  const Box saves("core:2 pu:1", uint64_t{1} << 33, {}, {.folder = folder.path(), .every = 1});
  JobSpec saved = coded("saved");
  saved.optimizer = "sgd";
  Worker of_saved(options_of_rank(saves, saved, 0));
  ASSERT_TRUE(of_saved.saves_residuals());
  EXPECT_FALSE(DeviceKeys(of_saved, *device_).encodes(0));
}

// The door that they use is open to others.
TEST_F(CodedDeviceKeysTest, AnyCallerMayEncode) {
  Worker worker(options_of_rank(box_, coded("caller"), 0));
  const auto refused = [](const std::function<void()>& call) {
    std::string what;
    EXPECT_EQ(code_of(call, &what), ErrorCode::kInvalid);
    return what;
  };
  std::vector<float> own(kElements);
  worker.register_memory(0, {.parameters = own.data()});
  EXPECT_THAT(refused([&] { worker.begin_encoding(0); }), HasSubstr("'a' has registered memory"));
  worker.register_memory(0, {});
  const CodedSlots slots = worker.begin_encoding(0);
  EXPECT_EQ(slots.residual.size(), kElements);
  EXPECT_THAT(refused([&] { worker.begin_encoding(0); }), HasSubstr("key 'a' is not coded, its"));
  EXPECT_THAT(refused([&] { worker.gradient(0); }), HasSubstr("use gradient_bytes()"));
  EXPECT_THAT(refused([&] { worker.register_memory(0, {.gradient = own.data()}); }),
              HasSubstr("its caller encodes it"));
  const std::span<std::byte> bytes = worker.gradient_bytes(0);
  for (const uint32_t round : {1, 2}) {
    const std::vector<float> from = gradient(round);
    for (size_t at = 0, slot = 0; at < kElements; at += slots.chunk_elements) {
      const size_t count = std::min<size_t>(slots.chunk_elements, kElements - at);
      kernels::encode(from.data() + at, slots.residual.data() + at, DType::kInt8, {},
                      bytes.data() + slot, count);
      slot += slots.chunk_bytes;
    }
    worker.push_pull(0);
  }
  EXPECT_EQ(result(worker), expected({1, 2}));
  worker.end_encoding(0);
  push_alone(worker, 3);
  EXPECT_EQ(result(worker), expected({1, 2, 3}));
  EXPECT_THAT(refused([&] { worker_.begin_encoding(0); }), HasSubstr("is not coded"));
}

// Events of pushes are used again, and none is made while a program is in its course.
TEST_F(HostDeviceKeysTest, TheWorkersOwnMemoryIsWhatIsCopied) {
  DeviceKeys keys(worker_, *device_);
  stream_->fill(memory_.floats(), 1.0f, spec_.keys[0].elements);
  for (int round = 0; round < 3; ++round) {
    keys.push(0, memory_.data(), *stream_);
    keys.pull(0, memory_.data(), *stream_);
  }
  keys.wait();
  EXPECT_EQ(worker_.stats().bytes_copied, 0u);
  const DeviceStats stats = device_->stats();
  EXPECT_EQ(stats.bytes_to_host, 3 * memory_.bytes());
  EXPECT_EQ(stats.bytes_to_device, 3 * memory_.bytes());
}

}  // namespace device_keys_test
}  // namespace phub::testing
