// Random programs on a cache in one thread: a seed chooses the order of everything that goes on
// beside the application. PHUB_SEED repeats a failure.
#include "tests/geeps/cache_rig.h"
#include "tests/geeps/stepped.h"

namespace phub::geeps::testing {
namespace {

class Stepped final : public Stage {
 public:
  explicit Stepped(uint64_t seed) : random_(seed) {}

  std::unique_ptr<Device> make_device(uint64_t budget, bool measures) override {
    return std::make_unique<SteppedDevice>(budget, !measures, random_);
  }
  std::unique_ptr<Exchange> make_exchange(const JobSpec& job,
                                          std::span<const float> initial) override {
    return std::make_unique<SteppedExchange>(job, initial);
  }
  Cache::MakeDriver make_driver() override {
    return [this](Mover& mover, std::mutex& mutex) {
      auto driver = std::make_unique<SteppedDriver>(mover, mutex, random_);
      driver_ = driver.get();
      return driver;
    };
  }
  void between_calls() override {
    if (random_() % 2 == 0) driver_->play(random_() % 12);
  }

 private:
  std::mt19937_64 random_;
  SteppedDriver* driver_ = nullptr;
};

TEST(CacheSeeded, InTheThreadOfTheApplication) {
  run_seeds(phub::testing::scaled(1000), false, [](uint64_t seed) { return Stepped(seed); });
}
TEST(CacheSeeded, OnAComputeStream) {
  run_seeds(phub::testing::scaled(1000), true, [](uint64_t seed) { return Stepped(seed); });
}

}  // namespace
}  // namespace phub::geeps::testing
