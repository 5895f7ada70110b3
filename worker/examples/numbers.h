// Checks of an option's number, for CLI11: a value that is not finite passes none of them.
#pragma once

#include <CLI/CLI.hpp>

namespace phub::examples {

CLI::Validator between(double least, double most);
CLI::Validator positive();
CLI::Validator not_negative();

}  // namespace phub::examples
