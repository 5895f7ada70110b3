// A program's command line, and how it ends.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace phub::examples {

// A command line that is wrong ends the process with status 2, one that asks for help with 0.
void parse_or_exit(CLI::App& app, int argc, char** argv);

// Runs `body`. The status of the process: 0, or 1 if `body` throws, whose message, behind the
// program's name, goes to stderr.
int status_of(const char* program, const std::function<void()>& body);

}  // namespace phub::examples
