// Trains a network on the handwritten digits with its data in a GeePS cache:
//
//   bin/geeps_digits --standalone --model cnn --budget 35%
//
//   bin/phub serve --listen 127.0.0.1:7717 &
//   for rank in 0 1; do bin/geeps_digits --world 2 --rank $rank & done; wait

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "worker/examples/geeps/network.h"
#include "worker/examples/geeps/training.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"

namespace phub::examples {
namespace {

using digits::kClasses;
using digits::kPixels;

Layers layers_of(const std::string& model, size_t hidden) {
  Layers layers;
  if (model == "mlp") {
    layers.push_back(dense(kPixels, hidden, true));
    layers.push_back(dense(hidden, hidden, true));
    layers.push_back(dense(hidden, kClasses, false));
  } else if (model == "cnn") {
    constexpr size_t kSide = 8, kFirst = 16, kSecond = 32;
    layers.push_back(convolution({kSide, kSide, 1, 1}, kFirst));
    layers.push_back(convolution({kSide, kSide, kFirst, 2}, kSecond));
    layers.push_back(dense(kSide / 2 * kSide / 2 * kSecond, kClasses, false));
  } else {
    layers.push_back(dense(kPixels, kClasses, false));
  }
  return layers;
}

void run(int argc, char** argv) {
  TrainingOptions options;
  options.worker = options_from_environment();
  if (options.worker.spec.name.empty()) options.worker.spec.name = "geeps-digits";
  options.lr = 0.2;
  std::string model = "mlp", data_path = "build/data/digits.csv";
  size_t hidden = 128;
  CLI::App app("Trains a network on handwritten digits, with its data in a GeePS cache.");
  app.add_option("--model", model, "mlp, cnn or logreg (logistic regression)")
      ->check(CLI::IsMember({"mlp", "cnn", "logreg"}))
      ->capture_default_str();
  app.add_option("--hidden", hidden, "Units of the mlp's hidden layers")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--data", data_path, "The digits as CSV")->capture_default_str();
  parse(app, options, argc, argv);
  const digits::Dataset data = digits::load(data_path);
  train(options, fmt::format("digits {} {}", model, hidden), [&](const Share& share) {
    return std::make_unique<Network>(layers_of(model, hidden), data, share);
  });
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  return phub::examples::status_of("geeps_digits", [&] { phub::examples::run(argc, argv); });
}
