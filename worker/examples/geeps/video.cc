#include "worker/examples/geeps/video.h"

#include <utility>

namespace phub::examples {

using geeps::Cache;
using geeps::Fetch;
using geeps::LocalBuffer;
using geeps::ReadBuffer;
using geeps::Save;
using geeps::UpdateBuffer;

Layers video_frame_layers(size_t filters, size_t hidden) {
  constexpr size_t kSide = Videos::kSide;
  Layers layers;
  layers.push_back(convolution({kSide, kSide, 1, 1}, filters));
  layers.push_back(convolution({kSide, kSide, filters, 2}, 2 * filters));
  layers.push_back(dense(kSide / 2 * kSide / 2 * 2 * filters, 4 * hidden, false));
  return layers;
}

Layers video_class_layers(size_t hidden) {
  Layers layers;
  layers.push_back(dense(hidden, Videos::kClasses, false));
  return layers;
}

VideoNetwork::VideoNetwork(const Videos& videos, size_t filters, size_t hidden, const Share& share)
    : videos_(videos),
      share_(share),
      hidden_(hidden),
      frames_(tables_, video_frame_layers(filters, hidden),
              {.name = "frame_", .samples = share.samples, .parts = videos.frames()}),
      cell_(tables_.add_parameters("cell", LstmCell::parameters(hidden))),
      classes_(tables_, video_class_layers(hidden),
               {.name = "class_", .samples = share.samples, .input_error = true}),
      states_(tables_.add_local("states", 2 * hidden * share.samples, videos.frames() + 1)),
      flowing_(tables_.add_local("flowing", 2 * hidden * share.samples)) {
  frames_.add_local();
  classes_.add_local();
  loss_.emplace(tables_, classes_, share.samples);
}

std::vector<float> VideoNetwork::initial() const {
  std::vector<float> all;
  Random random(share_.seed);
  frames_.initialize(random, all);
  const size_t at = all.size();
  all.resize(at + tables_.part_floats(cell_));
  initialize_lstm_cell(random, hidden_, std::span(all).subspan(at, LstmCell::parameters(hidden_)));
  classes_.initialize(random, all);
  return all;
}

double VideoNetwork::train(Cache& cache, Math* math, uint64_t clock) {
  double loss = 0;
  for (uint32_t i = 0; i < share_.mini_batches; ++i) {
    std::optional<Clips> clips;
    if (math != nullptr) {
      clips = videos_.batch(share_.seed, share_.rank, share_.world, clock * share_.mini_batches + i,
                            share_.samples);
    }
    loss += train_mini_batch(cache, math, clips ? &*clips : nullptr, i + 1 == share_.mini_batches);
  }
  return loss / (static_cast<double>(share_.samples) * share_.mini_batches);
}

double VideoNetwork::train_mini_batch(Cache& cache, Math* math, const Clips* clips, bool last) {
  std::vector<float> labels;
  if (clips != nullptr) labels.assign(clips->labels.begin(), clips->labels.end());
  loss_->set_labels(cache, math, labels);
  begin(cache, math);
  for (size_t frame = 0; frame < videos_.frames(); ++frame) {
    set_frame(cache, math, clips, frame);
    frames_.forward(cache, math, frame);
    forward_cell(cache, math, frame);
  }
  give_to_classes(cache, math);
  classes_.forward(cache, math);
  const double loss = loss_->run(cache, math, share_.scale());
  classes_.backward(cache, math, last);
  take_from_classes(cache, math);
  for (size_t frame = videos_.frames(); frame-- > 0;) {
    backward_cell(cache, math, frame);
    if (last && frame == 0) cache.table_clock(cell_);
    frames_.backward(cache, math, last && frame == 0, frame);
  }
  return loss;
}

// Nothing is remembered.
void VideoNetwork::begin(Cache& cache, Math* math) const {
  LocalBuffer before(cache, states_, tables_.rows(states_, 0), Fetch::kNo);
  if (math != nullptr) math->run(1, before.buffer().floats(), Fill{0, before.data()});
}

void VideoNetwork::set_frame(Cache& cache, Math* math, const Clips* clips, size_t frame) const {
  const uint32_t table = frames_.input();
  LocalBuffer pictures(cache, table, tables_.rows(table, frame), Fetch::kNo);
  if (math == nullptr) return;
  const auto pixels = clips->frame(frame);
  math->upload(pixels.data(), pictures.data(), pixels.size());
}

// The gates replace what the frame adds to them.
void VideoNetwork::forward_cell(Cache& cache, Math* math, size_t frame) const {
  const size_t streams = share_.samples, units = streams * hidden_;
  ReadBuffer weights = tables_.read(cache, cell_);
  LocalBuffer before(cache, states_, tables_.rows(states_, frame), Fetch::kYes, Save::kNo);
  LocalBuffer after(cache, states_, tables_.rows(states_, frame + 1), Fetch::kNo);
  LocalBuffer gates(cache, frames_.output(), tables_.rows(frames_.output(), frame));
  if (math == nullptr) return;
  lstm_cell_forward(*math, {.streams = streams,
                            .hidden = hidden_,
                            .weights = weights.data(),
                            .cell_before = before.data(),
                            .output_before = before.data() + units,
                            .cell = after.data(),
                            .output = after.data() + units,
                            .gates = gates.data()});
}

void VideoNetwork::backward_cell(Cache& cache, Math* math, size_t frame) const {
  const size_t streams = share_.samples, units = streams * hidden_;
  const uint32_t error_table = frames_.output_error();
  ReadBuffer weights = tables_.read(cache, cell_);
  UpdateBuffer update(cache, cell_, tables_.rows(cell_));
  LocalBuffer before(cache, states_, tables_.rows(states_, frame), Fetch::kYes, Save::kNo);
  LocalBuffer after(cache, states_, tables_.rows(states_, frame + 1), Fetch::kYes, Save::kNo);
  LocalBuffer gates(cache, frames_.output(), tables_.rows(frames_.output(), frame), Fetch::kYes,
                    Save::kNo);
  LocalBuffer error(cache, error_table, tables_.rows(error_table), Fetch::kNo);
  LocalBuffer flowing(cache, flowing_, tables_.rows(flowing_));
  if (math != nullptr) {
    math->run(1, 4 * units, Copy{gates.data(), error.data()});
    lstm_cell_backward(*math,
                       {.streams = streams,
                        .hidden = hidden_,
                        .weights = weights.data(),
                        .cell_before = before.data(),
                        .output_before = before.data() + units,
                        .cell = after.data(),
                        .output = after.data() + units,
                        .gates = error.data()},
                       flowing.data() + units, flowing.data(), update.data());
    tables_.clear_padding(*math, cell_, update.data());
  }
  update.update();
}

void VideoNetwork::give_to_classes(Cache& cache, Math* math) const {
  const size_t units = share_.samples * hidden_;
  const uint32_t table = classes_.input();
  LocalBuffer last(cache, states_, tables_.rows(states_, videos_.frames()), Fetch::kYes, Save::kNo);
  LocalBuffer in(cache, table, tables_.rows(table), Fetch::kNo);
  if (math != nullptr) math->run(1, units, Copy{last.data() + units, in.data()});
}

void VideoNetwork::take_from_classes(Cache& cache, Math* math) const {
  const size_t units = share_.samples * hidden_;
  const uint32_t table = classes_.input_error();
  LocalBuffer error(cache, table, tables_.rows(table), Fetch::kYes, Save::kNo);
  LocalBuffer flowing(cache, flowing_, tables_.rows(flowing_), Fetch::kNo);
  if (math == nullptr) return;
  math->run(1, units, Fill{0, flowing.data()});
  math->run(1, units, Copy{error.data(), flowing.data() + units});
}

size_t VideoNetwork::correct(const Parameters& parameters, const Clips& clips) const {
  const auto math = make_host_math();
  const size_t streams = clips.size(), units = streams * hidden_;
  std::vector<float> cell(units), output(units), next_cell(units), next_output(units);
  for (size_t f = 0; f < clips.frames; ++f) {
    const auto pixels = clips.frame(f);
    std::vector<float> gates = frames_.compute(parameters, {pixels.begin(), pixels.end()}, streams);
    lstm_cell_forward(*math, {.streams = streams,
                              .hidden = hidden_,
                              .weights = parameters[cell_].data(),
                              .cell_before = cell.data(),
                              .output_before = output.data(),
                              .cell = next_cell.data(),
                              .output = next_output.data(),
                              .gates = gates.data()});
    cell.swap(next_cell);
    output.swap(next_output);
  }
  return count_correct(classes_.compute(parameters, output, streams), clips.labels);
}

std::string VideoNetwork::evaluate(const Parameters& parameters) const {
  const Clips test = videos_.test();
  return held_out_accuracy(correct(parameters, test), test.size());
}

}  // namespace phub::examples
