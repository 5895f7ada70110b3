// `phub plan`: shows how a box would share out a model, before it is bought or started.
#pragma once

namespace CLI {
class App;
}

namespace phub {

// Adds the subcommand to `app`. Parsing it prints the plan to stdout and throws Error when an
// argument is wrong: a model, topology or option that is not there or cannot be met.
void add_plan_command(CLI::App& app);

}  // namespace phub
