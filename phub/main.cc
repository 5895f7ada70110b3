// The phub binary. Exit codes: 0, 1 for errors while it runs, 2 for a wrong command line.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "phub/doctor_command.h"
#include "phub/plan_command.h"
#include "phub/serve_command.h"
#include "phub/status_command.h"
#include "transport/error.h"

int main(int argc, char** argv) {
  CLI::App app("phub sums the gradients of training processes and applies the optimizer.", "phub");
  app.require_subcommand(1);
  app.footer(
      "Start with 'phub serve' on the box, and give PHUB_SERVER=HOST:PORT to the workers.\n"
      "'phub COMMAND --help' says more about each.");
  phub::add_serve_command(app);
  phub::add_plan_command(app);
  phub::add_status_command(app);
  phub::add_doctor_command(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "phub: %s; 'phub --help' shows what there is\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "phub: %s\n", error.what());
    return 1;
  }
}
