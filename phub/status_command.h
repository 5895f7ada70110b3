// `phub status`: what a running server is doing.
#pragma once

#include <string>

#include "transport/messages.h"

namespace CLI {
class App;
}

namespace phub {

// Adds the subcommand to `app`. Parsing it asks the server and prints to stdout; throws Error when
// there is none.
void add_status_command(CLI::App& app);

// A table of jobs and, below each, of the ranks that are not as they should be.
std::string describe(const ServerStatus& status);

}  // namespace phub
