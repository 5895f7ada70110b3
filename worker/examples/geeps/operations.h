// The operations of layers besides matrix products, once for every device: an operation is a
// function of a row and a column that writes its own part of the result. Sums inside of one are in
// a fixed order, so that the same inputs give the same bits wherever they lie. Matrices are
// row-major, one row per sample; labels are whole numbers in floats.
#pragma once

#include <cmath>
#include <cstddef>
#include <variant>

#ifdef __CUDACC__
#define PHUB_ANYWHERE __host__ __device__
#else
#define PHUB_ANYWHERE
#endif

namespace phub::examples {

struct Fill {
  float value;
  float* x;
  PHUB_ANYWHERE void operator()(size_t /*row*/, size_t i) const { x[i] = value; }
};

struct Copy {
  const float* from;
  float* to;
  PHUB_ANYWHERE void operator()(size_t /*row*/, size_t i) const { to[i] = from[i]; }
};

struct AddTo {
  const float* from;
  float* to;
  PHUB_ANYWHERE void operator()(size_t /*row*/, size_t i) const { to[i] += from[i]; }
};

struct AddBias {
  size_t columns;
  const float* bias;
  float* x;
  PHUB_ANYWHERE void operator()(size_t row, size_t column) const {
    x[row * columns + column] += bias[column];
  }
};

// to[column] = the sum of the column. Once per column.
struct SumRows {
  size_t rows, columns;
  const float* x;
  float* to;
  PHUB_ANYWHERE void operator()(size_t /*row*/, size_t column) const {
    float sum = 0;
    for (size_t row = 0; row < rows; ++row) sum += x[row * columns + column];
    to[column] = sum;
  }
};

// to's row += the row of the table that the label names.
struct AddNamedRow {
  size_t columns;
  const float *table, *labels;
  float* to;
  PHUB_ANYWHERE void operator()(size_t row, size_t column) const {
    to[row * columns + column] += table[static_cast<size_t>(labels[row]) * columns + column];
  }
};

// The row of the table that each label names += that row of `from`. Once per column.
struct AddToNamedRows {
  size_t rows, columns;
  const float *from, *labels;
  float* table;
  PHUB_ANYWHERE void operator()(size_t /*row*/, size_t column) const {
    for (size_t row = 0; row < rows; ++row) {
      table[static_cast<size_t>(labels[row]) * columns + column] += from[row * columns + column];
    }
  }
};

struct Relu {
  const float* from;
  float* to;
  PHUB_ANYWHERE void operator()(size_t /*row*/, size_t i) const {
    to[i] = from[i] > 0 ? from[i] : 0;
  }
};

// `value` is the input or the output of the Relu.
struct ReluBackward {
  const float* value;
  float* error;
  PHUB_ANYWHERE void operator()(size_t /*row*/, size_t i) const {
    error[i] = value[i] > 0 ? error[i] : 0;
  }
};

// Softmax and cross-entropy of one sample: losses[row] += its loss; error = scale · the gradient of
// it by the logits. It works in place if error == logits. Once per row.
struct SoftmaxLoss {
  size_t classes;
  float scale;
  const float *logits, *labels;
  float *error, *losses;
  PHUB_ANYWHERE void operator()(size_t row, size_t /*column*/) const {
    const float* x = logits + row * classes;
    float* e = error + row * classes;
    const auto label = static_cast<size_t>(labels[row]);
    float highest = x[0];
    for (size_t c = 1; c < classes; ++c) highest = x[c] > highest ? x[c] : highest;
    const float labelled = x[label] - highest;
    float total = 0;
    for (size_t c = 0; c < classes; ++c) total += (e[c] = expf(x[c] - highest));
    losses[row] += logf(total) - labelled;
    for (size_t c = 0; c < classes; ++c) e[c] = (e[c] / total - (c == label ? 1.0f : 0.0f)) * scale;
  }
};

// A convolution of 3×3, padded with zeros, as a product with a matrix of patches: a row per place
// of the output, a column per place of the patch and channel. Images are height × width × channels.
struct ConvolutionShape {
  size_t height, width, channels, stride;
  PHUB_ANYWHERE size_t out_height() const { return (height + stride - 1) / stride; }
  PHUB_ANYWHERE size_t out_width() const { return (width + stride - 1) / stride; }
  PHUB_ANYWHERE size_t patch() const { return 9 * channels; }
};

// images → patches. Once per element of the patches.
struct Patches {
  ConvolutionShape shape;
  const float* images;
  float* patches;
  PHUB_ANYWHERE void operator()(size_t row, size_t column) const {
    const size_t x = row % shape.out_width() * shape.stride + column / shape.channels % 3;
    const size_t above = row / shape.out_width();
    const size_t y = above % shape.out_height() * shape.stride + column / shape.channels / 3;
    const size_t image = above / shape.out_height();
    // x and y count from the padding.
    const bool inside = x >= 1 && x <= shape.width && y >= 1 && y <= shape.height;
    const size_t pixel = inside ? (image * shape.height + y - 1) * shape.width + x - 1 : 0;
    patches[row * shape.patch() + column] =
        inside ? images[pixel * shape.channels + column % shape.channels] : 0;
  }
};

// The error of the patches → that of the images. Once per pixel (row) and channel (column).
struct PatchesBackward {
  ConvolutionShape shape;
  const float* patches;
  float* images;
  PHUB_ANYWHERE void operator()(size_t row, size_t channel) const {
    const size_t x = row % shape.width + 1;
    const size_t y = row / shape.width % shape.height + 1;
    const size_t image = row / shape.width / shape.height;
    float sum = 0;
    for (size_t place = 0; place < 9; ++place) {
      const size_t dx = place % 3, dy = place / 3;
      if (x < dx || y < dy || (x - dx) % shape.stride != 0 || (y - dy) % shape.stride != 0)
        continue;
      const size_t out_x = (x - dx) / shape.stride, out_y = (y - dy) / shape.stride;
      if (out_x >= shape.out_width() || out_y >= shape.out_height()) continue;
      const size_t out = (image * shape.out_height() + out_y) * shape.out_width() + out_x;
      sum += patches[out * shape.patch() + place * shape.channels + channel];
    }
    images[row * shape.channels + channel] = sum;
  }
};

PHUB_ANYWHERE inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// One step of an LSTM (Hochreiter and Schmidhuber 1997, with forget gates). A row of `gates` has
// the input gate, the forget gate, the candidate and the output gate, `hidden` floats each: before
// their activation functions, and after them when this is done.
struct LstmForward {
  size_t hidden;
  const float* cell_before;
  float *gates, *cell, *output;
  PHUB_ANYWHERE void operator()(size_t row, size_t unit) const {
    float* gate = gates + row * 4 * hidden + unit;
    const size_t at = row * hidden + unit;
    gate[0] = sigmoid(gate[0]);
    gate[hidden] = sigmoid(gate[hidden]);
    gate[2 * hidden] = tanhf(gate[2 * hidden]);
    gate[3 * hidden] = sigmoid(gate[3 * hidden]);
    cell[at] = gate[hidden] * cell_before[at] + gate[0] * gate[2 * hidden];
    output[at] = gate[3 * hidden] * tanhf(cell[at]);
  }
};

// Replaces the gates by the error of their values before the activation functions, and the error of
// the cell by that of the cell before.
struct LstmBackward {
  size_t hidden;
  const float *cell_before, *cell, *output_error;
  float *gates, *cell_error;
  PHUB_ANYWHERE void operator()(size_t row, size_t unit) const {
    float* gate = gates + row * 4 * hidden + unit;
    const size_t at = row * hidden + unit;
    const float input = gate[0], forget = gate[hidden], candidate = gate[2 * hidden],
                output = gate[3 * hidden];
    const float activated = tanhf(cell[at]);
    const float by_output = output_error[at];
    const float by_cell = cell_error[at] + by_output * output * (1 - activated * activated);
    gate[0] = by_cell * candidate * input * (1 - input);
    gate[hidden] = by_cell * cell_before[at] * forget * (1 - forget);
    gate[2 * hidden] = by_cell * input * (1 - candidate * candidate);
    gate[3 * hidden] = by_output * activated * output * (1 - output);
    cell_error[at] = by_cell * forget;
  }
};

using Operation =
    std::variant<Fill, Copy, AddTo, AddBias, SumRows, AddNamedRow, AddToNamedRows, Relu,
                 ReluBackward, SoftmaxLoss, Patches, PatchesBackward, LstmForward, LstmBackward>;

}  // namespace phub::examples
