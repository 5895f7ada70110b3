// `phub serve`: the server as a process.
#pragma once

namespace CLI {
class App;
}

namespace phub {

// Adds the subcommand to `app`. Parsing it prints the topology and the addresses to stdout and
// serves until SIGTERM or SIGINT; throws Error when it cannot start.
void add_serve_command(CLI::App& app);

}  // namespace phub
