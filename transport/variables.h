// The variables of the environment that phub reads, PHUB_….
#pragma once

#include <string>
#include <vector>

namespace phub {

// A line for each variable of the environment ("NAME=value" …, the last null) that nothing reads
// and that has nearly the name of one that is read, such as PHUB_WORLDSIZE: "PHUB_WORLDSIZE is
// set, and phub does not read it: PHUB_WORLD_SIZE?". Others that begin with PHUB_ are the user's.
std::vector<std::string> misspelt_variables(const char* const* environment);

// Writes these lines of the process's environment to stderr, each once.
void say_misspelt_variables();

}  // namespace phub
