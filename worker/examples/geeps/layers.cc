#include "worker/examples/geeps/layers.h"

#include <algorithm>
#include <cmath>

namespace phub::examples {
namespace {

// Uniform with variance scale² · 2/inputs (He et al. 2015, equation 10); biases are zero.
void initialize_weights(Random& random, size_t inputs, size_t outputs, float scale,
                        std::span<float> parameters) {
  const float limit = scale * std::sqrt(6.0f / static_cast<float>(inputs));
  std::ranges::fill(parameters, 0.0f);
  for (float& weight : parameters.first(inputs * outputs)) {
    weight = limit * (2 * random.uniform() - 1);
  }
}

// out = in · weights + bias, over so many rows.
struct Affine {
  size_t inputs, outputs;

  size_t parameters() const { return (inputs + 1) * outputs; }
  void forward(Math& math, size_t rows, const float* parameters, const float* in, float* out,
               bool add) const {
    math.multiply({.rows = rows, .columns = outputs, .depth = inputs, .add = add}, in, parameters,
                  out);
    math.run(rows, outputs, AddBias{outputs, parameters + inputs * outputs, out});
  }
  void gradient(Math& math, size_t rows, const float* in, const float* error, float* to) const {
    math.multiply({.rows = inputs, .columns = outputs, .depth = rows, .transpose_a = true}, in,
                  error, to);
    math.run(1, outputs, SumRows{rows, outputs, error, to + inputs * outputs});
  }
  void below(Math& math, size_t rows, const float* parameters, const float* error,
             float* to) const {
    math.multiply({.rows = rows, .columns = inputs, .depth = outputs, .transpose_b = true}, error,
                  parameters, to);
  }
};

class Dense : public Layer {
 public:
  Dense(size_t inputs, size_t outputs, bool relu)
      : Layer(inputs, outputs, Affine{inputs, outputs}.parameters()),
        affine_{inputs, outputs},
        relu_(relu) {}

  void initialize(Random& random, std::span<float> parameters) const override {
    initialize_weights(random, inputs(), outputs(), 1, parameters);
  }
  void forward(Math& math, const ForwardMemory& m) const override {
    affine_.forward(math, m.samples, m.parameters, m.in, m.out, false);
    if (relu_) math.run(1, m.samples * outputs(), Relu{m.out, m.out});
  }
  void backward(Math& math, const BackwardMemory& m) const override {
    if (relu_) math.run(1, m.samples * outputs(), ReluBackward{m.out, m.error});
    affine_.gradient(math, m.samples, m.in, m.error, m.gradient);
    if (m.below != nullptr) affine_.below(math, m.samples, m.parameters, m.error, m.below);
  }

 private:
  Affine affine_;
  bool relu_;
};

class Convolution : public Layer {
 public:
  Convolution(const ConvolutionShape& shape, size_t filters)
      : Layer(shape.height * shape.width * shape.channels,
              shape.out_height() * shape.out_width() * filters,
              Affine{shape.patch(), filters}.parameters()),
        shape_(shape),
        affine_{shape.patch(), filters} {}

  size_t scratch(size_t samples) const override { return rows(samples) * shape_.patch(); }
  void initialize(Random& random, std::span<float> parameters) const override {
    initialize_weights(random, shape_.patch(), affine_.outputs, 1, parameters);
  }
  void forward(Math& math, const ForwardMemory& m) const override {
    math.run(rows(m.samples), shape_.patch(), Patches{shape_, m.in, m.scratch});
    affine_.forward(math, rows(m.samples), m.parameters, m.scratch, m.out, false);
    math.run(1, m.samples * outputs(), Relu{m.out, m.out});
  }
  void backward(Math& math, const BackwardMemory& m) const override {
    const size_t places = rows(m.samples);
    math.run(1, m.samples * outputs(), ReluBackward{m.out, m.error});
    math.run(places, shape_.patch(), Patches{shape_, m.in, m.scratch});
    affine_.gradient(math, places, m.scratch, m.error, m.gradient);
    if (m.below == nullptr) return;
    affine_.below(math, places, m.parameters, m.error, m.scratch);
    math.run(m.samples * shape_.height * shape_.width, shape_.channels,
             PatchesBackward{shape_, m.scratch, m.below});
  }

 private:
  size_t rows(size_t samples) const { return samples * shape_.out_height() * shape_.out_width(); }

  ConvolutionShape shape_;
  Affine affine_;
};

class Residual : public Layer {
 public:
  Residual(size_t width, float scale)
      : Layer(width, width, Affine{width, width}.parameters()),
        affine_{width, width},
        scale_(scale) {}

  size_t scratch(size_t samples) const override { return samples * inputs(); }
  void initialize(Random& random, std::span<float> parameters) const override {
    initialize_weights(random, inputs(), outputs(), scale_, parameters);
  }
  void forward(Math& math, const ForwardMemory& m) const override {
    const size_t count = m.samples * inputs();
    math.run(1, count, Relu{m.in, m.scratch});
    math.run(1, count, Copy{m.in, m.out});
    affine_.forward(math, m.samples, m.parameters, m.scratch, m.out, true);
  }
  void backward(Math& math, const BackwardMemory& m) const override {
    const size_t count = m.samples * inputs();
    math.run(1, count, Relu{m.in, m.scratch});
    affine_.gradient(math, m.samples, m.scratch, m.error, m.gradient);
    if (m.below == nullptr) return;
    affine_.below(math, m.samples, m.parameters, m.error, m.below);
    math.run(1, count, ReluBackward{m.in, m.below});
    math.run(1, count, AddTo{m.error, m.below});
  }

 private:
  Affine affine_;
  float scale_;
};

}  // namespace

std::unique_ptr<Layer> dense(size_t inputs, size_t outputs, bool relu) {
  return std::make_unique<Dense>(inputs, outputs, relu);
}
std::unique_ptr<Layer> convolution(const ConvolutionShape& shape, size_t filters) {
  return std::make_unique<Convolution>(shape, filters);
}
std::unique_ptr<Layer> residual(size_t width, float scale) {
  return std::make_unique<Residual>(width, scale);
}

}  // namespace phub::examples
