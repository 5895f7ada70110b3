#include "worker/examples/geeps/lstm.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "transport/error.h"
#include "worker/examples/digits_data.h"

namespace phub::examples {

using geeps::Cache;
using geeps::Fetch;
using geeps::LocalBuffer;
using geeps::ReadBuffer;
using geeps::Save;
using geeps::UpdateBuffer;

namespace {

float initial_limit(size_t hidden) { return std::sqrt(3.0f / static_cast<float>(hidden)); }

void set_uniform(digits::Random& random, float limit, std::span<float> weights) {
  for (float& weight : weights) weight = limit * (2 * random.uniform() - 1);
}

LstmCell cell_of(const LstmStep& s) {
  return {.streams = s.streams,
          .hidden = s.sizes.hidden,
          .weights = s.recurrent + s.sizes.symbols * 4 * s.sizes.hidden,
          .cell_before = s.cell_before,
          .output_before = s.output_before,
          .cell = s.cell,
          .output = s.hidden_output,
          .gates = s.gates};
}

}  // namespace

void lstm_cell_forward(Math& math, const LstmCell& c) {
  const size_t hidden = c.hidden, all_gates = 4 * hidden;
  math.multiply({.rows = c.streams, .columns = all_gates, .depth = hidden, .add = true},
                c.output_before, c.weights, c.gates);
  math.run(c.streams, all_gates, AddBias{all_gates, c.weights + hidden * all_gates, c.gates});
  math.run(c.streams, hidden, LstmForward{hidden, c.cell_before, c.gates, c.cell, c.output});
}

void lstm_cell_backward(Math& math, const LstmCell& c, float* hidden_error, float* cell_error,
                        float* gradient) {
  const size_t hidden = c.hidden, all_gates = 4 * hidden;
  math.run(c.streams, hidden,
           LstmBackward{hidden, c.cell_before, c.cell, hidden_error, c.gates, cell_error});
  math.multiply({.rows = c.streams, .columns = hidden, .depth = all_gates, .transpose_b = true},
                c.gates, c.weights, hidden_error);
  math.multiply({.rows = hidden, .columns = all_gates, .depth = c.streams, .transpose_a = true},
                c.output_before, c.gates, gradient);
  math.run(1, all_gates, SumRows{c.streams, all_gates, c.gates, gradient + hidden * all_gates});
}

void initialize_lstm_cell(digits::Random& random, size_t hidden, std::span<float> parameters) {
  const size_t weights = hidden * 4 * hidden;
  set_uniform(random, initial_limit(hidden), parameters.first(weights));
  std::ranges::fill(parameters.subspan(weights), 0.0f);
  std::ranges::fill(parameters.subspan(weights + hidden, hidden), 1.0f);
}

void lstm_forward(Math& math, const LstmStep& s, float scale, float* losses) {
  const size_t hidden = s.sizes.hidden, symbols = s.sizes.symbols, all_gates = 4 * hidden;
  math.run(1, s.streams * all_gates, Fill{0, s.gates});
  math.run(s.streams, all_gates, AddNamedRow{all_gates, s.recurrent, s.inputs, s.gates});
  lstm_cell_forward(math, cell_of(s));
  math.multiply({.rows = s.streams, .columns = symbols, .depth = hidden}, s.hidden_output, s.output,
                s.error);
  math.run(s.streams, symbols, AddBias{symbols, s.output + hidden * symbols, s.error});
  math.run(s.streams, 1, SoftmaxLoss{symbols, scale, s.error, s.labels, s.error, losses});
}

void lstm_backward(Math& math, const LstmStep& s, float* hidden_error, float* cell_error,
                   float* recurrent_gradient, float* output_gradient) {
  const size_t hidden = s.sizes.hidden, symbols = s.sizes.symbols, all_gates = 4 * hidden;
  math.multiply({.rows = hidden, .columns = symbols, .depth = s.streams, .transpose_a = true},
                s.hidden_output, s.error, output_gradient);
  math.run(1, symbols, SumRows{s.streams, symbols, s.error, output_gradient + hidden * symbols});
  math.multiply(
      {.rows = s.streams, .columns = hidden, .depth = symbols, .transpose_b = true, .add = true},
      s.error, s.output, hidden_error);
  lstm_cell_backward(math, cell_of(s), hidden_error, cell_error,
                     recurrent_gradient + symbols * all_gates);
  math.run(1, symbols * all_gates, Fill{0, recurrent_gradient});
  math.run(1, all_gates,
           AddToNamedRows{s.streams, all_gates, s.gates, s.inputs, recurrent_gradient});
}

Lstm::Lstm(const Text& text, size_t hidden, size_t steps, const Share& share)
    : text_(text),
      sizes_{.symbols = text.symbols(), .hidden = hidden},
      steps_(steps),
      share_(share),
      recurrent_(tables_.add_parameters("recurrent", sizes_.recurrent())),
      output_(tables_.add_parameters("output", sizes_.output())),
      symbols_(tables_.add_local("symbols", size_t{2} * share.samples, steps)),
      gates_(tables_.add_local("gates", 4 * hidden * share.samples, steps)),
      errors_(tables_.add_local("errors", sizes_.symbols * share.samples, steps)),
      states_(tables_.add_local("states", 2 * hidden * share.samples, steps + 1)),
      flowing_(tables_.add_local("flowing", 2 * hidden * share.samples)),
      losses_(tables_.add_local("losses", share.samples)),
      carried_(2 * hidden * share.samples) {
  window(text.train(), size_t{share.world} * share.samples, 0, 1, steps, 0);  // long enough?
}

std::vector<float> Lstm::initial() const {
  std::vector<float> all(tables_.part_floats(recurrent_) + tables_.part_floats(output_));
  digits::Random random(share_.seed);
  const size_t of_symbols = sizes_.symbols * 4 * sizes_.hidden;
  const float limit = initial_limit(sizes_.hidden);
  const std::span<float> parameters(all);
  set_uniform(random, limit, parameters.first(of_symbols));
  initialize_lstm_cell(random, sizes_.hidden,
                       parameters.subspan(of_symbols, LstmCell::parameters(sizes_.hidden)));
  set_uniform(random, limit,
              parameters.subspan(tables_.part_floats(recurrent_), sizes_.hidden * sizes_.symbols));
  return all;
}

double Lstm::train(Cache& cache, Math* math, uint64_t clock) {
  loss_ = 0;
  for (uint32_t i = 0; i < share_.mini_batches; ++i) {
    const size_t first = size_t{share_.rank} * share_.samples;
    const Window now = window(text_.train(), size_t{share_.world} * share_.samples, first,
                              share_.samples, steps_, clock * share_.mini_batches + i);
    train_window(cache, math, now, i + 1 == share_.mini_batches);
  }
  return loss_ / static_cast<double>(share_.samples * share_.mini_batches * steps_);
}

void Lstm::train_window(Cache& cache, Math* math, const Window& window, bool last) {
  begin(cache, math, window);
  for (size_t step = 0; step < steps_; ++step) forward(cache, math, window, step);
  for (size_t step = steps_; step-- > 0;) backward(cache, math, step);
  if (last) {
    cache.table_clock(output_);
    cache.table_clock(recurrent_);
  }
  carry(cache, math);
}

// At the start of the text nothing is remembered.
void Lstm::begin(Cache& cache, Math* math, const Window& window) {
  LocalBuffer before(cache, states_, tables_.rows(states_, 0));
  LocalBuffer losses(cache, losses_, tables_.rows(losses_), Fetch::kNo);
  if (math == nullptr) return;
  if (window.at_start)
    math->run(1, carried_.size(), Fill{0, before.data()});
  else if (restored_)
    math->upload(carried_.data(), before.data(), carried_.size());
  restored_ = false;
  math->run(1, losses.buffer().floats(), Fill{0, losses.data()});
}

void Lstm::forward(Cache& cache, Math* math, const Window& window, size_t step) {
  const size_t streams = share_.samples, units = streams * sizes_.hidden;
  ReadBuffer recurrent = tables_.read(cache, recurrent_);
  ReadBuffer output = tables_.read(cache, output_);
  LocalBuffer before(cache, states_, tables_.rows(states_, step), Fetch::kYes, Save::kNo);
  LocalBuffer after(cache, states_, tables_.rows(states_, step + 1), Fetch::kNo);
  LocalBuffer symbols(cache, symbols_, tables_.rows(symbols_, step), Fetch::kNo);
  LocalBuffer gates(cache, gates_, tables_.rows(gates_, step), Fetch::kNo);
  LocalBuffer error(cache, errors_, tables_.rows(errors_, step), Fetch::kNo);
  LocalBuffer losses(cache, losses_, tables_.rows(losses_));
  if (math == nullptr) return;
  math->upload(&window.inputs[step * streams], symbols.data(), streams);
  math->upload(&window.labels[step * streams], symbols.data() + streams, streams);
  lstm_forward(*math,
               {.sizes = sizes_,
                .streams = streams,
                .recurrent = recurrent.data(),
                .output = output.data(),
                .inputs = symbols.data(),
                .labels = symbols.data() + streams,
                .cell_before = before.data(),
                .output_before = before.data() + units,
                .cell = after.data(),
                .hidden_output = after.data() + units,
                .gates = gates.data(),
                .error = error.data()},
               share_.scale() / static_cast<float>(steps_), losses.data());
}

void Lstm::backward(Cache& cache, Math* math, size_t step) const {
  const size_t streams = share_.samples, units = streams * sizes_.hidden;
  const bool top = step + 1 == steps_;
  ReadBuffer recurrent = tables_.read(cache, recurrent_);
  ReadBuffer output = tables_.read(cache, output_);
  UpdateBuffer recurrent_update(cache, recurrent_, tables_.rows(recurrent_));
  UpdateBuffer output_update(cache, output_, tables_.rows(output_));
  LocalBuffer before(cache, states_, tables_.rows(states_, step), Fetch::kYes, Save::kNo);
  LocalBuffer after(cache, states_, tables_.rows(states_, step + 1), Fetch::kYes, Save::kNo);
  LocalBuffer symbols(cache, symbols_, tables_.rows(symbols_, step), Fetch::kYes, Save::kNo);
  LocalBuffer gates(cache, gates_, tables_.rows(gates_, step), Fetch::kYes, Save::kNo);
  LocalBuffer error(cache, errors_, tables_.rows(errors_, step), Fetch::kYes, Save::kNo);
  LocalBuffer flowing(cache, flowing_, tables_.rows(flowing_), top ? Fetch::kNo : Fetch::kYes);
  if (math != nullptr) {
    if (top) math->run(1, 2 * units, Fill{0, flowing.data()});
    lstm_backward(*math,
                  {.sizes = sizes_,
                   .streams = streams,
                   .recurrent = recurrent.data(),
                   .output = output.data(),
                   .inputs = symbols.data(),
                   .cell_before = before.data(),
                   .output_before = before.data() + units,
                   .cell = after.data(),
                   .hidden_output = after.data() + units,
                   .gates = gates.data(),
                   .error = error.data()},
                  flowing.data() + units, flowing.data(), recurrent_update.data(),
                  output_update.data());
    tables_.clear_padding(*math, recurrent_, recurrent_update.data());
    tables_.clear_padding(*math, output_, output_update.data());
  }
  recurrent_update.update();
  output_update.update();
}

// What the last step gave is what the next window begins with.
void Lstm::carry(Cache& cache, Math* math) {
  LocalBuffer last(cache, states_, tables_.rows(states_, steps_), Fetch::kYes, Save::kNo);
  LocalBuffer first(cache, states_, tables_.rows(states_, 0), Fetch::kNo);
  LocalBuffer losses(cache, losses_, tables_.rows(losses_), Fetch::kYes, Save::kNo);
  if (math == nullptr) return;
  math->run(1, carried_.size(), Copy{last.data(), first.data()});
  math->download(last.data(), carried_.data(), carried_.size());
  std::vector<float> each(share_.samples);
  math->download(losses.data(), each.data(), each.size());
  loss_ = std::accumulate(each.begin(), each.end(), loss_);
}

void Lstm::restore_state(std::span<const float> state) {
  if (state.size() != carried_.size()) {
    fail(ErrorCode::kInvalid, "a checkpoint with a state of {} floats, not {}", state.size(),
         carried_.size());
  }
  std::ranges::copy(state, carried_.begin());
  restored_ = true;
}

double Lstm::held_out_loss(const Parameters& parameters) const {
  constexpr size_t kStreams = 16;
  const auto math = make_host_math();
  const size_t steps = text_.test().size() / kStreams - 1;
  const Window all = window(text_.test(), kStreams, 0, kStreams, steps, 0);
  const size_t units = kStreams * sizes_.hidden;
  std::vector<float> cell(units), output(units), next_cell(units), next_output(units),
      gates(4 * units), error(kStreams * sizes_.symbols), losses(kStreams);
  for (size_t step = 0; step < steps; ++step) {
    lstm_forward(*math,
                 {.sizes = sizes_,
                  .streams = kStreams,
                  .recurrent = parameters[recurrent_].data(),
                  .output = parameters[output_].data(),
                  .inputs = &all.inputs[step * kStreams],
                  .labels = &all.labels[step * kStreams],
                  .cell_before = cell.data(),
                  .output_before = output.data(),
                  .cell = next_cell.data(),
                  .hidden_output = next_output.data(),
                  .gates = gates.data(),
                  .error = error.data()},
                 1, losses.data());
    cell.swap(next_cell);
    output.swap(next_output);
  }
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(kStreams * steps);
}

std::string Lstm::evaluate(const Parameters& parameters) const {
  return fmt::format("held-out loss {:.3f} nats (frequencies alone: {:.3f})",
                     held_out_loss(parameters), text_.entropy());
}

}  // namespace phub::examples
