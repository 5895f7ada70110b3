#include "worker/examples/program.h"

#include <fmt/format.h>

#include <cstdlib>
#include <exception>

namespace phub::examples {

void parse_or_exit(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e) == 0 ? 0 : 2);
  }
}

int status_of(const char* program, const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: {}\n", program, error.what());
    return 1;
  }
}

}  // namespace phub::examples
