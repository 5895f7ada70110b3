// A network for videos, as GeePS's (section 5.1): layers that see each frame, an LSTM that sees
// their outputs one after another, and layers that name the class after the last frame. The local
// data of a frame are rows of their own, so that a video may be longer than fits in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "worker/examples/geeps/lstm.h"
#include "worker/examples/geeps/model.h"
#include "worker/examples/geeps/stack.h"
#include "worker/examples/geeps/video_data.h"

namespace phub::examples {

// Two convolutions of so many filters, and twice as many; then the frame's contribution to the
// LSTM's gates.
Layers video_frame_layers(size_t filters, size_t hidden);
Layers video_class_layers(size_t hidden);

class VideoNetwork : public Model {
 public:
  // `videos` outlives it. Parameters: of the frames' layers, of the LSTM's cell, of the classes'
  // layers.
  VideoNetwork(const Videos& videos, size_t filters, size_t hidden, const Share& share);

  const Tables& tables() const override { return tables_; }
  std::vector<float> initial() const override;
  double train(geeps::Cache& cache, Math* math, uint64_t clock) override;
  std::string evaluate(const Parameters& parameters) const override;

  size_t correct(const Parameters& parameters, const Clips& clips) const;

 private:
  // `clips`: null: virtual.
  double train_mini_batch(geeps::Cache& cache, Math* math, const Clips* clips, bool last);
  void begin(geeps::Cache& cache, Math* math) const;
  void set_frame(geeps::Cache& cache, Math* math, const Clips* clips, size_t frame) const;
  void forward_cell(geeps::Cache& cache, Math* math, size_t frame) const;
  void backward_cell(geeps::Cache& cache, Math* math, size_t frame) const;
  void give_to_classes(geeps::Cache& cache, Math* math) const;
  void take_from_classes(geeps::Cache& cache, Math* math) const;

  const Videos& videos_;
  Share share_;
  size_t hidden_;
  Tables tables_{share_};
  Stack frames_;
  uint32_t cell_;  // parameters
  Stack classes_;
  uint32_t states_;           // after every frame, and before the first one: cells and outputs
  uint32_t flowing_;          // error of the state, from a frame to the one before
  std::optional<Loss> loss_;  // set by the constructor
};

}  // namespace phub::examples
