// Files that are named on a command line.
#pragma once

#include <fstream>
#include <string>
#include <string_view>

namespace phub::examples {

// Throws Error: kNotFound, there is no such file, or it may not be read; kInvalid, it is a folder.
std::ifstream open_to_read(const std::string& path);

// Called before the work whose outcome will be written to this file ("": to none): throws
// Error(kInvalid) if it cannot be written. It neither makes nor changes a file.
void check_can_write(const std::string& path);

// Throws Error(kInternal) unless all of it is written. A path of "": writes nothing.
void write_file(const std::string& path, std::string_view bytes);

}  // namespace phub::examples
