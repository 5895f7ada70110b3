#include "worker/examples/files.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "transport/error.h"

namespace phub::examples {
namespace {

bool is_folder(const std::string& path) {
  std::error_code unknown;
  return std::filesystem::is_directory(path, unknown);
}

}  // namespace

std::ifstream open_to_read(const std::string& path) {
  if (is_folder(path)) fail(ErrorCode::kInvalid, "{}: {}", path, std::strerror(EISDIR));
  std::ifstream file(path);
  if (!file) fail(ErrorCode::kNotFound, "{}: {}", path, std::strerror(errno));
  return file;
}

void check_can_write(const std::string& path) {
  if (path.empty()) return;
  int error = 0;
  if (is_folder(path)) {
    error = EISDIR;
  } else if (::access(path.c_str(), W_OK) != 0) {
    error = errno;
    const std::string folder = std::filesystem::absolute(path).parent_path().string() + "/.";
    if (error == ENOENT) error = ::access(folder.c_str(), W_OK | X_OK) == 0 ? 0 : errno;
  }
  if (error != 0) {
    fail(ErrorCode::kInvalid, "{}: it cannot be written: {}", path, std::strerror(error));
  }
}

void write_file(const std::string& path, std::string_view bytes) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  if (!file.flush()) fail(ErrorCode::kInternal, "{}: {}", path, std::strerror(errno));
}

}  // namespace phub::examples
