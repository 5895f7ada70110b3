// What a rank keeps of coded gradients (any_job_test: in a job; rack_sim: whoever takes over a
// rank, or joins later).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/worker/expect_error.h"
#include "worker/memory/gradient_coder.h"

namespace phub {
namespace coded_test {

using testing::expect_error;

TEST(GradientCoder, RestoresWhatItSavedAndNothingElse) {
  JoinReply reply;
  reply.spec.name = "job";
  reply.spec.keys = {{.name = "a", .elements = 33, .format = "int4"},
                     {.name = "b", .elements = 1000},
                     {.name = "c", .elements = 5, .format = "topk"}};
  GradientCoder coder(reply);
  EXPECT_TRUE(coder.codes(0) && !coder.codes(1) && coder.codes(2));
  EXPECT_EQ(coder.gradient(0).size(), 33u);
  EXPECT_EQ(coder.residual_bytes(), 38 * sizeof(float));
  EXPECT_EQ(coder.residuals(), std::vector<std::byte>(coder.residual_bytes()));
  std::vector<std::byte> saved(coder.residual_bytes());
  for (size_t i = 0; i < saved.size(); ++i) saved[i] = static_cast<std::byte>(i);
  coder.restore(saved);
  EXPECT_EQ(coder.residuals(), saved);
  for (const size_t bytes : {size_t{0}, saved.size() - 4, saved.size() + 4, size_t{1033 * 4}}) {
    expect_error(
        ErrorCode::kInvalid,
        fmt::format("the saved residuals of this rank have {} bytes, and its keys 152", bytes),
        [&] { coder.restore(std::vector<std::byte>(bytes)); });
  }
  EXPECT_EQ(coder.residuals(), saved);
}

TEST(GradientCoder, AScheduleSaysTheFormatOfEachRound) {
  JoinReply reply;
  reply.spec.name = "job";
  reply.spec.gradient_dtype = "f32*3,topk-10*2,f32*1,int8";
  reply.spec.keys = {{.name = "a", .elements = 33}, {.name = "b", .elements = 5, .format = "f32"}};
  const GradientCoder coder(reply);
  EXPECT_TRUE(coder.codes(0) && !coder.codes(1)) << "it has a residual in all rounds";
  EXPECT_EQ(coder.residual_bytes(), 33 * sizeof(float));
  using kernels::DType;
  const std::vector<DType> formats = {DType::kF32,    DType::kF32, DType::kF32,  DType::kTopK10,
                                      DType::kTopK10, DType::kF32, DType::kInt8, DType::kInt8};
  for (uint64_t round = 1; round <= formats.size(); ++round) {
    EXPECT_EQ(coder.format(0, round), formats[round - 1]) << "round " << round;
    EXPECT_EQ(coder.format(1, round), DType::kF32);
  }
  EXPECT_EQ(coder.format(0, uint64_t{1} << 40), DType::kInt8);
}

}  // namespace coded_test
}  // namespace phub
