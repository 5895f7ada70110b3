// Random programs on a cache with its threads.
#include "tests/geeps/cache_rig.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps::testing {
namespace cache_stress_test {

class Threaded : public Stage {
 public:
  explicit Threaded(uint64_t seed) : random_(seed) {}

  std::unique_ptr<Device> make_device(uint64_t budget, bool) override {
    return make_host_device({.budget_bytes = budget,
                             .copy_bytes_per_second = random_() % 2 == 0 ? 0 : 1e9,
                             .copy_latency = std::chrono::microseconds(random_() % 3 * 10),
                             .poison_copies = true});
  }
  std::unique_ptr<Exchange> make_exchange(const JobSpec& job,
                                          std::span<const float> initial) override {
    return std::make_unique<StandaloneExchange>(job, initial);
  }
  Cache::MakeDriver make_driver() override { return make_threads; }

 private:
  std::mt19937_64 random_;
};

class OnCuda final : public Threaded {
 public:
  using Threaded::Threaded;
  std::unique_ptr<Device> make_device(uint64_t budget, bool measures) override {
    if (measures) return make_host_device({.budget_bytes = budget});
    return make_cuda_device({.ordinal = 0, .budget_bytes = budget});
  }
};

TEST(CacheStress, InTheThreadOfTheApplication) {
  run_seeds(60, false, [](uint64_t seed) { return Threaded(seed); });
}
TEST(CacheStress, OnAComputeStream) {
  run_seeds(60, true, [](uint64_t seed) { return Threaded(seed); });
}

TEST(CacheStress, OnCudaInTheThreadOfTheApplication) {
  if (const auto found = cuda_devices(); found.devices.empty()) GTEST_SKIP() << found.none_because;
  run_seeds(60, false, [](uint64_t seed) { return OnCuda(seed); });
}
TEST(CacheStress, OnAComputeStreamOfCuda) {
  if (const auto found = cuda_devices(); found.devices.empty()) GTEST_SKIP() << found.none_because;
  run_seeds(60, true, [](uint64_t seed) { return OnCuda(seed); });
}

}  // namespace cache_stress_test
}  // namespace phub::geeps::testing
