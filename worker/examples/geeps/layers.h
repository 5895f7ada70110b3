// Layers of a feed-forward network. A layer holds no data: parameters, activations, errors and
// scratch are in the memory that it is given.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "worker/examples/digits_data.h"
#include "worker/examples/geeps/device_math.h"

namespace phub::examples {

using digits::Random;

struct ForwardMemory {
  size_t samples;
  const float *parameters = nullptr, *in = nullptr;
  float *out = nullptr, *scratch = nullptr;
};
struct BackwardMemory {
  size_t samples;
  const float *parameters = nullptr, *in = nullptr, *out = nullptr;
  float* error = nullptr;     // gradient of the loss by `out`; may be overwritten
  float* gradient = nullptr;  // that of the parameters: all of them are written
  float* below = nullptr;     // error of in; null: not needed
  float* scratch = nullptr;   // holds nothing at first
};

class Layer {
 public:
  Layer(size_t inputs, size_t outputs, size_t parameters)
      : inputs_(inputs), outputs_(outputs), parameters_(parameters) {}
  virtual ~Layer() = default;

  // Floats: of one sample, of one sample, in all, for so many samples.
  size_t inputs() const { return inputs_; }
  size_t outputs() const { return outputs_; }
  size_t parameters() const { return parameters_; }
  virtual size_t scratch(size_t /*samples*/) const { return 0; }

  virtual void initialize(Random& random, std::span<float> parameters) const = 0;
  virtual void forward(Math& math, const ForwardMemory& memory) const = 0;
  virtual void backward(Math& math, const BackwardMemory& memory) const = 0;

 private:
  size_t inputs_, outputs_, parameters_;
};

using Layers = std::vector<std::unique_ptr<Layer>>;

// Parameters are the weights (inputs × outputs, or patch × filters), then the bias.
//
// out = in · weights + bias, then Relu if wanted.
std::unique_ptr<Layer> dense(size_t inputs, size_t outputs, bool relu);
// 3×3, then Relu.
std::unique_ptr<Layer> convolution(const ConvolutionShape& shape, size_t filters);
// out = in + Relu(in) · weights + bias, which trains at any depth (He et al. 2016). `scale` is of
// the initial weights.
std::unique_ptr<Layer> residual(size_t width, float scale);

}  // namespace phub::examples
