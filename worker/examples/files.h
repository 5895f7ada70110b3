// Files that are named on a command line.
#pragma once

#include <fstream>
#include <string>

namespace phub::examples {

// Throws Error: kNotFound, there is no such file, or it may not be read; kInvalid, it is a folder.
std::ifstream open_to_read(const std::string& path);

// Before the work whose outcome will be written to this file ("": to none): throws Error(kInvalid)
// if it cannot be. Neither makes nor changes a file.
void check_can_write(const std::string& path);

}  // namespace phub::examples
