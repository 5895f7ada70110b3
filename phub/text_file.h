// Files of options and tables, read whole.
#pragma once

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "transport/error.h"

namespace phub {

// Throws Error(kInvalid) that names the file: it cannot be read, or has more than `most` bytes. So
// a wrong path such as /dev/zero does not fill the memory.
inline std::string read_file(const std::string& path, size_t most) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  char block[64 << 10];
  while (text.size() <= most && (file.read(block, sizeof block), file.gcount() > 0)) {
    text.append(block, static_cast<size_t>(file.gcount()));
  }
  if (text.size() > most) fail(ErrorCode::kInvalid, "{}: is larger than {} bytes", path, most);
  if (!file.eof()) fail(ErrorCode::kInvalid, "{}: {}", path, std::strerror(errno));
  return text;
}

}  // namespace phub
