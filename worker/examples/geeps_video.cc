// Trains a convolutional network with an LSTM on top to tell which way a shape moves, over videos
// whose local data need not fit in device memory (GeePS's video classification, section 5):
//
//   bin/geeps_video --standalone --frames 32 --budget 20%

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "transport/error.h"
#include "worker/examples/geeps/training.h"
#include "worker/examples/geeps/video.h"
#include "worker/examples/program.h"

namespace phub::examples {
namespace {

void run(int argc, char** argv) {
  TrainingOptions options;
  options.worker = options_from_environment();
  if (options.worker.spec.name.empty()) options.worker.spec.name = "geeps-video";
  options.lr = 0.2;
  size_t frames = 6, filters = 8, hidden = 32, clips = 4000;
  constexpr size_t kHeldOut = 500;
  CLI::App app("Trains a network on generated videos, within a GeePS cache's budget.");
  app.add_option("--frames", frames, "Of a video")
      ->check(CLI::Range(size_t{1}, size_t{1024}))
      ->capture_default_str();
  app.add_option("--filters", filters, "Of the first convolution; the second one has twice as many")
      ->check(CLI::Range(size_t{1}, size_t{1} << 10))
      ->capture_default_str();
  app.add_option("--hidden", hidden, "Units of the LSTM")
      ->check(CLI::Range(size_t{1}, size_t{1} << 14))
      ->capture_default_str();
  app.add_option("--clips", clips, "Videos to train with; they follow from --seed")
      ->check(CLI::Range(size_t{1}, size_t{1} << 40))
      ->capture_default_str();
  parse(app, options, argc, argv);
  const uint64_t workers = uint64_t{options.worker.spec.world_size} * options.devices;
  if (clips < workers) {
    fail(ErrorCode::kInvalid, "--clips {}: {} workers need at least one each", clips, workers);
  }
  const Videos videos(options.share.seed, clips, kHeldOut, frames);
  const std::string name =
      fmt::format("{} videos of {} frames, {} filters, {} units", clips, frames, filters, hidden);
  train(options, name, [&](const Share& share) {
    return std::make_unique<VideoNetwork>(videos, filters, hidden, share);
  });
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  return phub::examples::status_of("geeps_video", [&] { phub::examples::run(argc, argv); });
}
