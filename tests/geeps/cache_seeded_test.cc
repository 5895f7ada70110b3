// Random programs on a cache in one thread: a seed chooses the order of everything that goes on
// beside the application. PHUB_SEED repeats a failure.
#include "tests/geeps/cache_rig.h"
#include "tests/geeps/stepped.h"

namespace phub::geeps::testing {
namespace cache_seeded_test {

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

// For each of so many accesses that lie in the same memory, whether an event is done. A GPU's
// driver takes microseconds to say so.
double questions_for_each_of(uint32_t accesses, bool in_stream) {
  std::mt19937_64 random(phub::testing::fresh_seeds(1).first);
  constexpr uint64_t kBudget = 16 << 10;
  SteppedDevice device(1 << 20, true, random);
  const std::vector<TableSpec> tables = {
      {"w", 1, dense(1)},
      {.name = "state", .row_floats = 256, .keys = dense(accesses), .local = true}};
  JobSpec job;
  job.keys = keys_of(tables);
  SteppedExchange exchange(job, std::vector<float>(1));
  const auto stream = device.make_stream("compute");
  SteppedDriver* driver = nullptr;
  Cache cache(device, exchange, tables,
              {.budget_bytes = kBudget,
               .reserved_bytes = 2048,
               .compute = in_stream ? stream.get() : nullptr},
              [&](Mover& mover, std::mutex& mutex) {
                auto made = std::make_unique<SteppedDriver>(mover, mutex, random);
                driver = made.get();
                return made;
              });
  const auto iterate = [&] {
    for (const uint64_t row : tables[1].keys) {
      cache.post_local_access(cache.local_access(1, std::span(&row, 1), Fetch::kYes).handle,
                              Save::kYes);
      driver->play(random() % 12);
    }
  };
  cache.begin_virtual();
  iterate();
  cache.finish_sequence();
  iterate();
  const uint64_t before = device.questions;
  constexpr uint32_t kIterations = 10;
  for (uint32_t i = 0; i < kIterations; ++i) iterate();
  EXPECT_GT(cache.stats().bytes_to_device, 0u) << "all lie side by side";
  return static_cast<double>(device.questions - before) / (kIterations * accesses);
}

TEST(CacheSeeded, NobodyAsksAboutEveryEventForEachAccess) {
  for (const bool in_stream : {false, true}) {
    EXPECT_LT(questions_for_each_of(400, in_stream), 3 * questions_for_each_of(100, in_stream));
  }
}

}  // namespace cache_seeded_test
}  // namespace phub::geeps::testing
