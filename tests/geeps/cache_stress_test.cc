// Random programs on a cache with its threads.
#include "tests/geeps/cache_rig.h"
#include "worker/device/host_device.h"
#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps::testing {
namespace {

class Threaded final : public Stage {
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

TEST(CacheStress, InTheThreadOfTheApplication) {
  run_seeds(60, false, [](uint64_t seed) { return Threaded(seed); });
}
TEST(CacheStress, OnAComputeStream) {
  run_seeds(60, true, [](uint64_t seed) { return Threaded(seed); });
}

}  // namespace
}  // namespace phub::geeps::testing
