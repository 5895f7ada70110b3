// What a rank has in checkpoints beyond one piece: residuals of a model of usual size.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tests/worker/saved_box.h"
#include "transport/control/messages.h"

namespace phub {
namespace large_part_test {

using namespace testing;

constexpr uint64_t kEvery = 2;
constexpr uint64_t kRoundsAfter = 4;
constexpr uint64_t kElements = kMaxStateBytes / sizeof(float) + (uint64_t{1} << 20);
static_assert(kElements * sizeof(float) > 4 * kPartPieceBytes);

class LargePartTest : public SavedBoxTest {
 protected:
  LargePartTest() : SavedBoxTest(PHUB_BINARY, uint64_t{4} << 30) {}
  static JobSpec spec_of(const std::string& name) {
    JobSpec spec;
    spec.name = name;
    spec.optimizer = "sgd";
    spec.gradient_dtype = "int4";
    spec.keys = {{"weights", kElements}};
    return spec;
  }
  static std::string parameters_of(const Worker& worker) {
    const std::span<const std::byte> bytes = worker.parameter_bytes(0);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static void train(Worker& worker) {
    const uint64_t round = worker.round(0) + 1;
    const std::span<float> gradient = worker.gradient(0);
    // Not a multiple of a scale: there is a residual, which differs all over the key.
    for (uint64_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = static_cast<float>((i * 31 + round * 17) % 1009) * 0.001f;
    }
    worker.push(0);
    worker.wait(0);
  }
};

// Which round is the first to be saved is the server's choice: training goes on until one is.
TEST_F(LargePartTest, ResidualsOfManyPiecesSurviveTheServer) {
  serve(kEvery);
  const JobSpec spec = spec_of("killed");
  std::string result;
  uint64_t restored = 0;
  uint64_t last = 0;
  through_rewinds(options(spec, 0), true, [&](Worker& worker) {
    worker.broadcast({});
    restored = worker.first_round() - 1;
    while (restored == 0) {
      train(worker);
      if (status(spec.name).durable_round > 0) die_and_come_back(kEvery);
    }
    last = restored + kRoundsAfter;
    while (worker.round(0) < last) train(worker);
    result = parameters_of(worker);
    worker.leave();
  });
  EXPECT_GT(restored, 0);

  Worker worker(options(spec_of("undisturbed"), 0));
  worker.broadcast({});
  while (worker.round(0) < last) train(worker);
  EXPECT_TRUE(result == parameters_of(worker));
  worker.leave();
}

}  // namespace large_part_test
}  // namespace phub
