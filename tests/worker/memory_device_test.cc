// Gradients and parameters in memory of a device that the NIC reads and writes: nothing goes
// through the host, and what the host would have to compute is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/seeds.h"
#include "tests/transport/test_memory_device.h"
#include "tests/worker/box.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"
#include "worker/device/host_device.h"
#include "worker/device_keys.h"
#include "worker/geeps/worker_exchange.h"
#include "worker/phub.h"

namespace phub::testing {
namespace memory_device_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

JobSpec spec_of(const std::string& name, uint32_t ranks) {
  JobSpec spec;
  spec.name = name;
  spec.keys = {{.name = "a", .elements = 5000}, {.name = "b", .elements = 33'000}};
  spec.world_size = ranks;
  spec.initial = "broadcast";
  spec.optimizer = "sgd";
  spec.hyper = {{"lr", 0.5}};
  spec.lease_ms = 60'000;  // nobody is to be lost for being slow
  return spec;
}

// Over a NIC that can: libfabric's here, RDMA in the emulated machines.
class MemoryDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const transport = std::getenv("PHUB_TRANSPORT");
    const std::string name = transport == nullptr ? "" : transport;
    if (name != "ofi" && name != "verbs") GTEST_SKIP() << "needs PHUB_TRANSPORT=ofi or verbs";
    box_ = std::make_unique<Box>();
  }
  WorkerOptions options(const JobSpec& spec, uint32_t rank = 0) {
    WorkerOptions options = box_->options(spec, rank);
    options.memory_device = device_.get();
    return options;
  }

  std::unique_ptr<HostDevice> device_ = make_host_device({.name = "dev0", .budget_bytes = 8 << 20});
  std::unique_ptr<Box> box_;
};

TEST_F(MemoryDeviceTest, AKeyOfTheWorkersOwnMemoryIsCopiedNowhere) {
  const auto seed = static_cast<uint32_t>(fresh_seeds(1).first);
  SCOPED_TRACE(::testing::Message() << "PHUB_SEED=" << seed);
  std::minstd_rand random(seed);
  const JobSpec spec = spec_of("in-place", 1);
  Worker worker(options(spec));
  std::vector<float> expected(38'000);
  for (float& value : expected) value = static_cast<float>(random() % 1000);
  ASSERT_TRUE(worker.broadcast(expected));
  ASSERT_TRUE(device_->holds(worker.gradient_bytes(0).data(), 20'000));
  ASSERT_TRUE(device_->holds(worker.parameter_bytes(1).data(), 132'000));
  const auto stream = device_->make_stream("program");
  DeviceKeys keys(worker, *device_);
  for (int round = 1; round <= 3; ++round) {
    for (size_t key = 0; key < 2; ++key) {
      const std::span<float> gradient = worker.gradient(key);
      stream->fill(gradient.data(), static_cast<float>(round * 2), gradient.size());
      keys.push(key, gradient.data(), *stream);
      keys.pull(key, const_cast<float*>(worker.parameters(key).data()), *stream);
    }
    for (float& value : expected) value += -0.5f * static_cast<float>(round * 2);
  }
  keys.wait();
  std::vector<float> result(38'000);
  device_->read(result.data(), worker.parameters(0).data(), 20'000);
  device_->read(result.data() + 5000, worker.parameters(1).data(), 132'000);
  EXPECT_TRUE(result == expected);
  const DeviceStats stats = device_->stats();
  EXPECT_EQ(stats.bytes_to_host + stats.bytes_to_device, 0u);
  EXPECT_EQ(stats.kernels, 12u) << "the fills, and what looks whether a result failed";
  EXPECT_EQ(worker.stats().bytes_copied, 0u);
  EXPECT_THAT(worker.connection(), HasSubstr("gradients in the device's memory"));
}

TEST_F(MemoryDeviceTest, AWorkerNeedsNoStreams) {
  const JobSpec spec = spec_of("plain", 2);
  each_rank(2, [&](uint32_t rank) {
    TestMemoryDevice device;
    WorkerOptions options = this->options(spec, rank);
    options.memory_device = &device;
    Worker worker(options);
    worker.broadcast(std::vector<float>(38'000, 10.0f));
    std::vector<float> ones(33'000, 1.0f), result(33'000);
    device.write(worker.gradient(1).data(), ones.data(), 132'000);
    worker.push_null(0);
    worker.push(1);
    const int flushes = device.flushes();
    worker.wait(1);
    EXPECT_GT(device.flushes(), flushes) << "before the program reads what the NIC has written";
    worker.pull(1, std::as_writable_bytes(std::span(result)));
    EXPECT_EQ(result, std::vector<float>(33'000, 10.0f - 0.5f * 2)) << "the sum of two";
    EXPECT_THAT(error_of([&] { worker.register_memory(1, {.gradient = ones.data()}); }),
                AllOf(HasSubstr("invalid: key 'b'"), HasSubstr("registers no other memory")));
    worker.register_memory(1, {});
    worker.barrier();
    worker.leave();
  });
}

TEST_F(MemoryDeviceTest, TheDeviceMustBeOneAndHaveRoom) {
  JobSpec spec = spec_of("room", 1);
  spec.keys[1].elements = 4'000'000;
  EXPECT_THAT(error_of([&] { Worker worker(options(spec)); }),
              AllOf(HasSubstr("full"), HasSubstr("gradients that the NIC reads")));
  Worker worker(options(spec_of("one", 1)));
  worker.broadcast(std::vector<float>(38'000));
  const auto other = make_host_device({.name = "dev1", .budget_bytes = 64 << 20});
  EXPECT_THAT(error_of([&] { DeviceKeys(worker, *other); }),
              AllOf(HasSubstr("memory of dev0"), HasSubstr("are to be on dev1")));
  EXPECT_THAT(error_of([&] { geeps::WorkerExchange exchange(worker, {}); }),
              HasSubstr("leave memory_device out"));
}

TEST_F(MemoryDeviceTest, AGpuThatTheNicDoesNotReachIsRefusedAtOnce) {
  TestMemoryDevice gpu(/*cuda_ordinal=*/0);
  WorkerOptions options = this->options(spec_of("gpu", 1));
  options.memory_device = &gpu;
  options.connect_timeout_ms = 600'000;  // it is not tried again until then
  EXPECT_THAT(error_of([&] { Worker worker(options); }),
              AllOf(HasSubstr("invalid: "), HasSubstr("memory_device")));
}

// The caller's handles may be closed in any order: the worker keeps its device.
TEST_F(MemoryDeviceTest, OverTheCInterface) {
  phub_options* options = nullptr;
  phub_device *device = nullptr, *other = nullptr;
  phub_worker* worker = nullptr;
  phub_device_keys* keys = nullptr;
  ASSERT_EQ(phub_options_create(&options), PHUB_OK);
  phub_options_set(options, "server", box_->address().c_str());
  phub_options_set(options, "job", "c");
  phub_options_set(options, "transport", std::getenv("PHUB_TRANSPORT"));
  phub_options_add_key(options, "a", 5000);
  ASSERT_EQ(phub_device_open_host(PHUB_DEVICE_KEYS_BYTES + (1 << 20), 0, 0, &device), PHUB_OK);
  ASSERT_EQ(phub_device_open_host(PHUB_DEVICE_KEYS_BYTES, 0, 0, &other), PHUB_OK);
  ASSERT_EQ(phub_options_set_memory_device(options, device), PHUB_OK) << phub_last_error();
  ASSERT_EQ(phub_worker_create(options, &worker), PHUB_OK) << phub_last_error();
  EXPECT_EQ(phub_options_destroy(options), PHUB_OK);
  phub_memory memory = {};
  memory.size = sizeof memory;
  ASSERT_EQ(phub_device_memory(device, &memory), PHUB_OK);
  EXPECT_GE(memory.used_bytes, 2 * 5000 * sizeof(float)) << "gradients and results";
  EXPECT_EQ(phub_device_keys_create(worker, other, &keys), PHUB_INVALID);
  EXPECT_THAT(phub_last_error(), HasSubstr("use one device for both"));
  ASSERT_EQ(phub_device_keys_create(worker, device, &keys), PHUB_OK) << phub_last_error();
  EXPECT_EQ(phub_device_close(device), PHUB_OK);
  EXPECT_EQ(phub_device_close(other), PHUB_OK);
  std::vector<float> gradient(5000, 1.5f), result(5000);
  for (float round = 1; round <= 3; ++round) {
    for (float& value : gradient) value = round * 1.5f;
    ASSERT_EQ(phub_push_device(keys, 0, gradient.data(), "f32", 2, 0, nullptr), PHUB_OK);
    ASSERT_EQ(phub_pull_device(keys, 0, result.data(), "f32", nullptr), PHUB_OK);
    EXPECT_EQ(result, std::vector<float>(5000, round * 3)) << "a sum of one, scaled";
  }
  EXPECT_EQ(phub_device_keys_destroy(keys), PHUB_OK);
  EXPECT_EQ(phub_worker_destroy(worker), PHUB_OK);
}

// No server is asked.
TEST(MemoryDeviceOptions, OverTheCInterface) {
  phub_options* options = nullptr;
  phub_device* device = nullptr;
  phub_worker* worker = nullptr;
  ASSERT_EQ(phub_options_create(&options), PHUB_OK);
  phub_options_set(options, "server", "127.0.0.1:1");
  phub_options_set(options, "job", "refused");
  phub_options_set(options, "transport", "tcp");
  phub_options_set_number(options, "connect_timeout_ms", 1);
  phub_options_add_key(options, "a", 5000);
  ASSERT_EQ(phub_device_open_host(1 << 20, 0, 0, &device), PHUB_OK);
  EXPECT_EQ(phub_options_set_memory_device(nullptr, device), PHUB_BAD_HANDLE);
  EXPECT_EQ(phub_options_set_memory_device(options, reinterpret_cast<const phub_device*>(options)),
            PHUB_BAD_HANDLE);
  ASSERT_EQ(phub_options_set_memory_device(options, device), PHUB_OK);
  EXPECT_EQ(phub_worker_create(options, &worker), PHUB_INVALID);
  EXPECT_THAT(phub_last_error(),
              AllOf(HasSubstr("(memory_device)"), HasSubstr("use verbs or ofi")));
  ASSERT_EQ(phub_options_set_memory_device(options, nullptr), PHUB_OK);
  EXPECT_EQ(phub_worker_create(options, &worker), PHUB_UNAVAILABLE) << phub_last_error();
  EXPECT_EQ(phub_device_close(device), PHUB_OK);
  EXPECT_EQ(phub_options_destroy(options), PHUB_OK);
}

// No server is asked.
TEST(MemoryDeviceOptions, WhatTheHostWouldComputeIsRefused) {
  TestMemoryDevice device;
  const auto refusal = [&](const std::function<void(WorkerOptions&)>& change) {
    WorkerOptions options;
    options.server = "127.0.0.1:1";
    options.connect_timeout_ms = 1;
    options.spec = spec_of("refused", 1);
    options.transport = "ofi";
    options.memory_device = &device;
    change(options);
    return error_of([&] { Worker worker(options); });
  };
  EXPECT_THAT(refusal([](WorkerOptions&) {}), HasSubstr("unavailable")) << "nobody is there";
  const auto refused = [](const char* why) {
    return AllOf(HasSubstr("invalid: "), HasSubstr("a device of a test (memory_device)"),
                 HasSubstr(why), HasSubstr("leave memory_device out"));
  };
  for (const char* transport : {"tcp", "shm"}) {
    EXPECT_THAT(refusal([&](WorkerOptions& options) { options.transport = transport; }),
                refused("memory of the host: use verbs or ofi"));
  }
  EXPECT_THAT(refusal([](WorkerOptions& options) { options.spec.keys[1].format = "int8"; }),
              refused("encoded by the host"));
  EXPECT_THAT(refusal([](WorkerOptions& options) { options.spec.parameter_dtype = "int8"; }),
              refused("added by the host"));
  EXPECT_THAT(refusal([](WorkerOptions& options) { options.send_order = "magnitude"; }),
              refused("computed by the host"));
  EXPECT_THAT(refusal([](WorkerOptions& options) {
                options.carry_over = 1;
                options.spec.consistency = "async";
              }),
              refused("added by the host"));
}

// "auto" finds shared memory or TCP here.
TEST(MemoryDeviceOptions, AutoFindsNoTransportThatCannot) {
  Box box(1);
  TestMemoryDevice device;
  WorkerOptions options = box.options(spec_of("auto", 1));
  options.transport = "auto";
  options.memory_device = &device;
  EXPECT_THAT(error_of([&] { Worker worker(options); }),
              AllOf(HasSubstr("invalid: "), HasSubstr("transport 'tcp'")));
}

}  // namespace memory_device_test
}  // namespace phub::testing
