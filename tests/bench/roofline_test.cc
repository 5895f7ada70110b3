#include "bench/roofline.h"

#include <gtest/gtest.h>

namespace phub {
namespace roofline_test {

using kernels::DType;
using kernels::Optimizer;

MemoryMix mix_of(Optimizer optimizer, DType dtype, uint32_t workers) {
  return mix_of_exchange(1000, workers, optimizer, kernels::default_hyper(optimizer), dtype, dtype);
}

// In units of the model's bytes as f32: the traffic that the exchange cannot do without.
TEST(RooflineTest, BytesOfAnExchange) {
  // Gradients, parameters and momentum read; parameters and momentum written.
  EXPECT_EQ(bytes_moved(mix_of(Optimizer::kNesterov, DType::kF32, 4)), 4000u * (4 + 4));
  EXPECT_EQ(bytes_moved(mix_of(Optimizer::kSgd, DType::kF32, 2)), 4000u * (2 + 2));
  EXPECT_EQ(bytes_moved(mix_of(Optimizer::kAdam, DType::kF32, 8)), 4000u * (8 + 6));
  EXPECT_EQ(bytes_moved(mix_of(Optimizer::kNone, DType::kF32, 4)), 4000u * (4 + 1));
  // Half the gradient; f32 parameters and momentum, and the parameters once more as bf16.
  EXPECT_EQ(bytes_moved(mix_of(Optimizer::kNesterov, DType::kBF16, 4)), 2000u * (4 + 1) + 16000u);
  EXPECT_EQ(bytes_moved(mix_of(Optimizer::kNone, DType::kF16, 4)), 2000u * (4 + 1));
}

TEST(RooflineTest, MeasuresEveryMix) {
  for (Optimizer optimizer : {Optimizer::kNone, Optimizer::kNesterov, Optimizer::kAdam}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const MemoryMix mix =
          mix_of_exchange(300'000, 3, optimizer, kernels::default_hyper(optimizer), dtype, dtype);
      Roofline roofline(mix, 2);
      roofline.measure(2);
      EXPECT_GT(roofline.limit_us(), 0);
      // Between a slow disk and faster than any cache.
      EXPECT_GT(roofline.gigabytes_per_s(), 0.05);
      EXPECT_LT(roofline.gigabytes_per_s(), 20000);
    }
  }
}

TEST(RooflineTest, MoreTrafficTakesLonger) {
  MemoryMix mix{.elements = 2'000'000, .gradients = 1, .updates = 0, .result_bytes = 4};
  Roofline small(mix, 1);
  mix.gradients = 16;
  Roofline large(mix, 1);
  for (int i = 0; i < 5; ++i) {
    small.measure(1);
    large.measure(1);
  }
  EXPECT_GT(large.limit_us(), 2 * small.limit_us());
}

}  // namespace roofline_test
}  // namespace phub
