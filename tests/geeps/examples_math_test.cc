// The applications' mathematics on every device against sums in double, and on the host against
// itself elsewhere in memory.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <vector>

#include "worker/device/cuda_device.h"
#include "worker/examples/digits_data.h"
#include "worker/examples/geeps/device_math.h"
#include "worker/examples/geeps/devices.h"

namespace phub::examples {
namespace examples_math_test {

using digits::Random;

std::vector<float> random_floats(Random& random, size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = 2 * random.uniform() - 1;
  return values;
}

float element(const std::vector<float>& matrix, bool transposed, size_t rows, size_t columns,
              size_t row, size_t column) {
  return transposed ? matrix[column * rows + row] : matrix[row * columns + column];
}

struct Shape {
  size_t rows, columns, depth;
};
constexpr Shape kShapes[] = {{1, 1, 1},    {4, 8, 5},     {3, 7, 64},   {5, 9, 1},
                             {32, 10, 64}, {17, 130, 33}, {128, 40, 16}};

class MathOn : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("cuda") && cuda_devices().devices.empty()) {
      GTEST_SKIP() << "no CUDA device: " << cuda_devices().none_because;
    }
    on_ = make_device({.device = GetParam()}, 0, 16 << 20);
  }
  void TearDown() override { operands_.clear(); }

  // In memory of the device.
  float* put(const std::vector<float>& values) {
    DeviceMemory& memory =
        operands_.emplace_back(*on_.device, values.size() * sizeof(float), "operand");
    on_.math->upload(values.data(), memory.floats(), values.size());
    return memory.floats();
  }
  std::vector<float> get(const float* operand, size_t count) {
    std::vector<float> values(count);
    on_.math->download(operand, values.data(), count);
    return values;
  }

  ComputeDevice on_;

 private:
  std::deque<DeviceMemory> operands_;
};
INSTANTIATE_TEST_SUITE_P(Devices, MathOn, ::testing::Values("host", "cuda"),
                         [](const auto& device) { return std::string(device.param); });

TEST_P(MathOn, ProductsAreSumsOverTheDepth) {
  Random random(1);
  for (const Shape& s : kShapes) {
    const auto a = random_floats(random, s.rows * s.depth);
    const auto b = random_floats(random, s.depth * s.columns);
    const auto before = random_floats(random, s.rows * s.columns);
    for (int flags = 0; flags < 8; ++flags) {
      const Product product{.rows = s.rows,
                            .columns = s.columns,
                            .depth = s.depth,
                            .transpose_a = (flags & 1) != 0,
                            .transpose_b = (flags & 2) != 0,
                            .add = (flags & 4) != 0};
      float* const there = put(before);
      on_.math->multiply(product, put(a), put(b), there);
      const std::vector<float> c = get(there, before.size());
      for (size_t i = 0; i < s.rows; ++i) {
        for (size_t j = 0; j < s.columns; ++j) {
          double sum = product.add ? before[i * s.columns + j] : 0;
          for (size_t k = 0; k < s.depth; ++k) {
            sum += double{element(a, product.transpose_a, s.rows, s.depth, i, k)} *
                   element(b, product.transpose_b, s.depth, s.columns, k, j);
          }
          ASSERT_NEAR(c[i * s.columns + j], sum, 1e-5 * static_cast<double>(s.depth))
              << s.rows << " × " << s.columns << " × " << s.depth << " flags " << flags;
        }
      }
    }
  }
}

TEST(HostMath, SameBitsWhereverTheDataLie) {
  const auto math = make_host_math();
  Random random(2);
  for (const Shape& s : kShapes) {
    const auto a = random_floats(random, s.rows * s.depth);
    const auto b = random_floats(random, s.depth * s.columns);
    const size_t count = s.rows * s.columns;
    std::vector<float> expected(count);
    math->multiply({s.rows, s.columns, s.depth}, a.data(), b.data(), expected.data());
    math->run(s.rows, s.columns, AddBias{s.columns, b.data(), expected.data()});
    std::vector<float> sums(s.columns);
    math->run(1, s.columns, SumRows{s.rows, s.columns, expected.data(), sums.data()});
    for (size_t shift = 1; shift < 17; ++shift) {
      std::vector<float> memory(shift + a.size() + b.size() + count + s.columns);
      float* a_there = memory.data() + shift;
      float* b_there = a_there + a.size();
      float* c_there = b_there + b.size();
      std::ranges::copy(a, a_there);
      std::ranges::copy(b, b_there);
      math->multiply({s.rows, s.columns, s.depth}, a_there, b_there, c_there);
      math->run(s.rows, s.columns, AddBias{s.columns, b_there, c_there});
      math->run(1, s.columns, SumRows{s.rows, s.columns, c_there, c_there + count});
      ASSERT_EQ(std::memcmp(expected.data(), c_there, count * sizeof(float)), 0) << shift;
      ASSERT_EQ(std::memcmp(sums.data(), c_there + count, s.columns * sizeof(float)), 0) << shift;
    }
  }
}

TEST_P(MathOn, LossIsTheCrossEntropyOfTheSoftmax) {
  Random random(3);
  constexpr size_t kRows = 7, kClasses = 5;
  const auto logits = random_floats(random, kRows * kClasses);
  std::vector<float> labels(kRows);
  for (size_t row = 0; row < kRows; ++row) labels[row] = static_cast<float>(row % kClasses);
  constexpr float kScale = 0.25f;
  float* const error_there = put(std::vector<float>(logits.size()));
  float* const losses_there = put(std::vector<float>(kRows, 1.0f));
  on_.math->run(kRows, 1,
                SoftmaxLoss{kClasses, kScale, put(logits), put(labels), error_there, losses_there});
  const auto error = get(error_there, logits.size()), losses = get(losses_there, kRows);
  for (size_t row = 0; row < kRows; ++row) {
    double total = 0;
    for (size_t c = 0; c < kClasses; ++c) total += std::exp(double{logits[row * kClasses + c]});
    for (size_t c = 0; c < kClasses; ++c) {
      const bool is_label = c == row % kClasses;
      const double p = std::exp(double{logits[row * kClasses + c]}) / total;
      EXPECT_NEAR(error[row * kClasses + c], kScale * (p - (is_label ? 1 : 0)), 1e-6);
      if (is_label) {
        EXPECT_NEAR(losses[row], 1 - std::log(p), 1e-5);  // added to what was there
      }
    }
  }
}

// A convolution, from its definition.
double convolved(const ConvolutionShape& s, const std::vector<float>& images,
                 const std::vector<float>& filter, size_t image, size_t out_y, size_t out_x) {
  double sum = 0;
  for (int dy = -1; dy <= 1; ++dy) {
    for (int dx = -1; dx <= 1; ++dx) {
      const auto y = static_cast<int>(out_y * s.stride) + dy;
      const auto x = static_cast<int>(out_x * s.stride) + dx;
      if (y < 0 || x < 0 || y >= static_cast<int>(s.height) || x >= static_cast<int>(s.width)) {
        continue;
      }
      const size_t pixel =
          (image * s.height + static_cast<size_t>(y)) * s.width + static_cast<size_t>(x);
      const auto place = static_cast<size_t>((dy + 1) * 3 + dx + 1);
      for (size_t c = 0; c < s.channels; ++c) {
        sum += double{images[pixel * s.channels + c]} * filter[place * s.channels + c];
      }
    }
  }
  return sum;
}

TEST_P(MathOn, PatchesTimesAFilterAreItsConvolution) {
  Random random(4);
  for (const ConvolutionShape& s : {ConvolutionShape{8, 8, 1, 1}, ConvolutionShape{5, 7, 3, 1},
                                    ConvolutionShape{8, 8, 2, 2}, ConvolutionShape{7, 5, 2, 2}}) {
    constexpr size_t kImages = 2;
    const auto images = random_floats(random, kImages * s.height * s.width * s.channels);
    const auto filter = random_floats(random, s.patch());
    const size_t places = kImages * s.out_height() * s.out_width();
    float* const patches = put(std::vector<float>(places * s.patch()));
    float* const out_there = put(std::vector<float>(places));
    on_.math->run(places, s.patch(), Patches{s, put(images), patches});
    on_.math->multiply({places, 1, s.patch()}, patches, put(filter), out_there);
    const std::vector<float> out = get(out_there, places);
    for (size_t place = 0; place < places; ++place) {
      const size_t x = place % s.out_width(), y = place / s.out_width() % s.out_height();
      const size_t image = place / s.out_width() / s.out_height();
      ASSERT_NEAR(out[place], convolved(s, images, filter, image, y, x), 1e-5);
    }
  }
}

}  // namespace examples_math_test
}  // namespace phub::examples
