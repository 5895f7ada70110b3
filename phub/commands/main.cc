// The phub binary. Exit status: 0, 1 for an error at run time, 2 for a wrong command line.
#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <system_error>

#include "phub/commands/commands.h"
#include "transport/error.h"
#include "transport/text.h"

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error, as a full disk is
  CLI::App app("phub sums the gradients of training processes and applies the optimizer.", "phub");
  app.require_subcommand(1);
  app.set_version_flag("--version", "phub " PHUB_VERSION);
  app.footer(
      "Start 'phub serve' on the box, and the workers with PHUB_SERVER=HOST:PORT.\n"
      "'phub COMMAND --help' explains each command. 'phub run', which starts a training, and\n"
      "'phub tune', which finds its hyperparameters, are the Python package's.");
  phub::add_serve_command(app);
  phub::add_plan_command(app);
  phub::add_status_command(app);
  phub::add_doctor_command(app);
  phub::add_checkpoint_command(app);
  phub::add_token_command(app);
  phub::add_switch_command(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "phub: %s; see 'phub --help'\n", phub::escaped(error.what()).c_str());
    return 2;
  } catch (const std::system_error& error) {
    // What a thread says that cannot be started; all others are phub::Error.
    std::fprintf(
        stderr,
        "phub: starting a thread: %s; raise ulimit -u, the cgroup's pids.max or the unit's "
        "TasksMax, or lower ulimit -s\n",
        phub::escaped(error.what()).c_str());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "phub: %s\n", phub::escaped(error.what()).c_str());
    return 1;
  }
}
