// Gradients of the applications' layers against finite differences of their outputs.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "worker/examples/geeps/layers.h"
#include "worker/examples/geeps/lstm.h"

namespace phub::examples {
namespace examples_layers_test {

std::vector<float> random_floats(Random& random, size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = 2 * random.uniform() - 1;
  return values;
}

// The norm of what is wrong with the gradient of f by x, relative to that of the gradient.
double gradient_error(std::vector<float>& x, const std::vector<float>& gradient,
                      const std::function<double()>& f) {
  constexpr float kStep = 1e-3f;
  double wrong = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const float at = x[i], upper = at + kStep, lower = at - kStep;
    x[i] = upper;
    const double above = f();
    x[i] = lower;
    const double below = f();
    x[i] = at;
    const double difference = (above - below) / (upper - lower) - gradient[i];
    wrong += difference * difference;
    norm += double{gradient[i]} * gradient[i];
  }
  EXPECT_GT(norm, 0);
  return std::sqrt(wrong / norm);
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

constexpr double kTolerance = 1e-2;
constexpr float kNotANumber = NAN;

void check_gradients(const Layer& layer) {
  constexpr size_t kSamples = 3;
  Random random(1);
  const auto math = make_host_math();
  std::vector<float> parameters(layer.parameters());
  layer.initialize(random, parameters);
  for (float& p : parameters) p += 0.1f * (2 * random.uniform() - 1);  // biases too
  auto in = random_floats(random, kSamples * layer.inputs());
  const auto weights = random_floats(random, kSamples * layer.outputs());  // of the outputs
  std::vector<float> out(weights.size()), scratch(layer.scratch(kSamples));
  const auto f = [&] {
    layer.forward(*math, {kSamples, parameters.data(), in.data(), out.data(), scratch.data()});
    return dot(out, weights);
  };
  f();
  std::vector<float> error = weights, gradient(parameters.size(), kNotANumber),
                     below(in.size(), kNotANumber);
  std::ranges::fill(scratch, kNotANumber);
  layer.backward(*math, {kSamples, parameters.data(), in.data(), out.data(), error.data(),
                         gradient.data(), below.data(), scratch.data()});
  EXPECT_LT(gradient_error(parameters, gradient, f), kTolerance);
  EXPECT_LT(gradient_error(in, below, f), kTolerance);
}

TEST(Layers, Dense) { check_gradients(*dense(9, 5, false)); }
TEST(Layers, DenseWithRelu) { check_gradients(*dense(9, 13, true)); }
TEST(Layers, Convolution) { check_gradients(*convolution({5, 6, 2, 1}, 3)); }
TEST(Layers, ConvolutionWithStride) { check_gradients(*convolution({5, 6, 2, 2}, 3)); }
TEST(Layers, Residual) { check_gradients(*residual(8, 0.5f)); }

// Two time steps, so that the errors flow from one to the other.
class LstmGradients : public ::testing::Test {
 protected:
  static constexpr size_t kStreams = 3, kHidden = 4, kSymbols = 5, kSteps = 2;
  static constexpr size_t kUnits = kStreams * kHidden;

  double forward() {
    losses_.assign(kStreams, 0);
    for (size_t t = 0; t < kSteps; ++t) lstm_forward(*math_, step(t), 1, losses_.data());
    return std::accumulate(losses_.begin(), losses_.end(), 0.0);
  }
  LstmStep step(size_t t) {
    return {.sizes = {kSymbols, kHidden},
            .streams = kStreams,
            .recurrent = recurrent_.data(),
            .output = output_.data(),
            .inputs = &symbols_[t * kStreams],
            .labels = &symbols_[(t + 1) * kStreams],
            .cell_before = &cells_[t * kUnits],
            .output_before = &outputs_[t * kUnits],
            .cell = &cells_[(t + 1) * kUnits],
            .hidden_output = &outputs_[(t + 1) * kUnits],
            .gates = &gates_[t * 4 * kUnits],
            .error = &errors_[t * kStreams * kSymbols]};
  }

  const std::unique_ptr<Math> math_ = make_host_math();
  Random random_{7};
  const LstmSizes sizes_{kSymbols, kHidden};
  std::vector<float> recurrent_ = random_floats(random_, sizes_.recurrent());
  std::vector<float> output_ = random_floats(random_, sizes_.output());
  const std::vector<float> symbols_ = {0, 3, 2, 1, 4, 4, 2, 0, 1};
  std::vector<float> cells_ = random_floats(random_, (kSteps + 1) * kUnits);
  std::vector<float> outputs_ = random_floats(random_, (kSteps + 1) * kUnits);
  std::vector<float> gates_ = std::vector<float>(kSteps * 4 * kUnits);
  std::vector<float> errors_ = std::vector<float>(kSteps * kStreams * kSymbols);
  std::vector<float> losses_;
};

TEST_F(LstmGradients, AreThoseOfTheLoss) {
  forward();
  std::vector<float> hidden_error(kUnits), cell_error(kUnits), recurrent(recurrent_.size()),
      output(output_.size());
  for (size_t t = kSteps; t-- > 0;) {
    std::vector<float> of_step(recurrent.size(), kNotANumber);
    std::vector<float> output_of_step(output.size(), kNotANumber);
    lstm_backward(*math_, step(t), hidden_error.data(), cell_error.data(), of_step.data(),
                  output_of_step.data());
    for (size_t i = 0; i < recurrent.size(); ++i) recurrent[i] += of_step[i];
    for (size_t i = 0; i < output.size(); ++i) output[i] += output_of_step[i];
  }
  const auto f = [&] { return forward(); };
  EXPECT_LT(gradient_error(recurrent_, recurrent, f), kTolerance);
  EXPECT_LT(gradient_error(output_, output, f), kTolerance);
  // By what was before the first step: cells_ and outputs_ begin with it.
  cell_error.resize(cells_.size());
  hidden_error.resize(outputs_.size());
  EXPECT_LT(gradient_error(cells_, cell_error, f), kTolerance);
  EXPECT_LT(gradient_error(outputs_, hidden_error, f), kTolerance);
}

}  // namespace examples_layers_test
}  // namespace phub::examples
