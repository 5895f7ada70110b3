// Trains an LSTM to say what comes next in a text, over sequences whose local data need not fit in
// device memory:
//
//   bin/geeps_text --standalone --text /usr/share/common-licenses --steps 256 --budget 20%

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "worker/examples/geeps/lstm.h"
#include "worker/examples/geeps/training.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"

namespace phub::examples {
namespace {

void run(int argc, char** argv) {
  TrainingOptions options;
  options.worker = options_from_environment();
  if (options.worker.spec.name.empty()) options.worker.spec.name = "geeps-text";
  options.lr = 4;
  options.share.samples = 8;
  std::string path = "/usr/share/common-licenses";
  size_t hidden = 128, steps = 64;
  CLI::App app("Trains an LSTM on a text, within a GeePS cache's budget.");
  app.add_option("--text", path, "A file, or a folder of files")->capture_default_str();
  app.add_option("--hidden", hidden, "Units of the LSTM")
      ->check(CLI::Range(size_t{1}, size_t{1} << 16))
      ->capture_default_str();
  app.add_option("--steps", steps, "Time steps of a mini-batch")
      ->check(positive())
      ->capture_default_str();
  parse(app, options, argc, argv);
  const Text text = Text::load(path);
  const uint64_t size = text.train().size() + text.test().size();
  const std::string name = fmt::format("text of {} bytes, {} units, {} steps", size, hidden, steps);
  train(options, name,
        [&](const Share& share) { return std::make_unique<Lstm>(text, hidden, steps, share); });
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  return phub::examples::status_of("geeps_text", [&] { phub::examples::run(argc, argv); });
}
