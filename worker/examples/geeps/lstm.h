// A language model: an LSTM that reads a text symbol by symbol and predicts the next one. Trained
// by backpropagation through so many time steps; the state of the LSTM is carried to the next ones.
// The local data of a time step are rows of their own, so that a sequence may be longer than fits
// in device memory; the parameters are read, and updated, at every step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "worker/examples/digits_data.h"
#include "worker/examples/geeps/model.h"
#include "worker/examples/geeps/text.h"

namespace phub::examples {

// The cell of an LSTM, for so many streams (rows).
struct LstmCell {
  size_t streams, hidden;
  const float* weights;                      // hidden × 4 · hidden, then the bias
  const float *cell_before, *output_before;  // streams × hidden
  float *cell, *output;                      // the same, after the step
  float* gates;  // streams × 4 · hidden: the contributions of the step's inputs, then the gates

  static size_t parameters(size_t hidden) { return (hidden + 1) * 4 * hidden; }
};
void lstm_cell_forward(Math& math, const LstmCell& cell);
// hidden_error and cell_error are the errors of the step's outputs to the next one (and to the
// layer above), replaced by those of its inputs. Writes the gradient of the weights, and the error
// of the inputs' contributions over the gates.
void lstm_cell_backward(Math& math, const LstmCell& cell, float* hidden_error, float* cell_error,
                        float* gradient);
// Weights uniform with variance 1/hidden; biases zero, but one for the forget gates.
void initialize_lstm_cell(digits::Random& random, size_t hidden, std::span<float> parameters);

struct LstmSizes {
  size_t symbols = 0, hidden = 128;

  // The elements of the recurrent layer: symbols × 4 · hidden, hidden × 4 · hidden, then the bias.
  size_t recurrent() const { return symbols * 4 * hidden + LstmCell::parameters(hidden); }
  size_t output() const { return (hidden + 1) * symbols; }  // hidden × symbols, then the bias
};

// The inputs and outputs of a time step of the language model, for so many streams (rows).
struct LstmStep {
  LstmSizes sizes;
  size_t streams;
  const float *recurrent, *output;           // parameters
  const float *inputs, *labels;              // symbols
  const float *cell_before, *output_before;  // streams × hidden
  float *cell, *hidden_output;               // the same, after the step
  float* gates;                              // streams × 4 · hidden
  float* error;                              // streams × symbols: of the logits
};
// Adds each stream's loss to `losses`; `error` is scaled.
void lstm_forward(Math& math, const LstmStep& step, float scale, float* losses);
// hidden_error and cell_error are the errors of the step's outputs to the next one, replaced by
// those of its inputs. Writes the gradients of the step. Overwrites the gates.
void lstm_backward(Math& math, const LstmStep& step, float* hidden_error, float* cell_error,
                   float* recurrent_gradient, float* output_gradient);

class Lstm : public Model {
 public:
  // share.samples: streams. `text` outlives it.
  Lstm(const Text& text, size_t hidden, size_t steps, const Share& share);

  const Tables& tables() const override { return tables_; }
  std::vector<float> initial() const override;
  double train(geeps::Cache& cache, Math* math, uint64_t clock) override;
  std::string evaluate(const Parameters& parameters) const override;
  std::vector<float> state() const override { return carried_; }
  void restore_state(std::span<const float> state) override;

  double held_out_loss(const Parameters& parameters) const;  // per symbol, in nats

 private:
  void train_window(geeps::Cache& cache, Math* math, const Window& window, bool last);
  void begin(geeps::Cache& cache, Math* math, const Window& window);
  void forward(geeps::Cache& cache, Math* math, const Window& window, size_t step);
  void backward(geeps::Cache& cache, Math* math, size_t step) const;
  void carry(geeps::Cache& cache, Math* math);

  const Text& text_;
  LstmSizes sizes_;
  size_t steps_;
  Share share_;
  Tables tables_{share_};
  uint32_t recurrent_, output_;  // parameters
  // Tables with a part for every step: its symbols and labels, gates, error of the logits. The
  // states have one for every step and one before the first: cells and outputs.
  uint32_t symbols_, gates_, errors_, states_;
  uint32_t flowing_;            // error of the state, from a step to the one before
  uint32_t losses_;             // each stream's, summed over the steps
  double loss_ = 0;             // the sum of the clock so far
  std::vector<float> carried_;  // a copy of the last state
  bool restored_ = false;       // carried_ comes from a checkpoint
};

}  // namespace phub::examples
