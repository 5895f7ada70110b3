// Trains a network of many equal layers, with residual connections, on the handwritten digits: to
// see what a model needs that is much larger than device memory (GeePS, section 5.3).
//
//   bin/geeps_deep --standalone --layers 60 --width 256 --budget 5%

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>

#include "worker/examples/geeps/network.h"
#include "worker/examples/geeps/training.h"
#include "worker/examples/program.h"

namespace phub::examples {
namespace {

Layers layers_of(size_t count, size_t width) {
  Layers layers;
  layers.push_back(dense(digits::kPixels, width, false));
  const float scale = 1 / std::sqrt(static_cast<float>(count));
  for (size_t l = 0; l < count; ++l) layers.push_back(residual(width, scale));
  layers.push_back(dense(width, digits::kClasses, false));
  return layers;
}

void run(int argc, char** argv) {
  TrainingOptions options;
  options.worker = options_from_environment();
  if (options.worker.spec.name.empty()) options.worker.spec.name = "geeps-deep";
  options.lr = 0.02;
  std::string data_path = "build/data/digits.csv";
  size_t layers = 60, width = 256;
  CLI::App app("Trains a very deep network on handwritten digits, within a GeePS cache's budget.");
  app.add_option("--layers", layers, "Between the first and the last")
      ->check(CLI::Range(size_t{1}, size_t{10000}))
      ->capture_default_str();
  app.add_option("--width", width, "Units of each")
      ->check(CLI::Range(size_t{1}, size_t{1} << 16))
      ->capture_default_str();
  app.add_option("--data", data_path, "The digits as CSV")->capture_default_str();
  parse(app, options, argc, argv);
  const digits::Dataset data = digits::load(data_path);
  train(options, fmt::format("deep {} of {}", layers, width), [&](const Share& share) {
    return std::make_unique<Network>(layers_of(layers, width), data, share);
  });
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  return phub::examples::status_of("geeps_deep", [&] { phub::examples::run(argc, argv); });
}
