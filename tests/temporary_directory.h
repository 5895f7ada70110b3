// A directory that a test has for itself.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace phub {

// A directory that lives as long as this.
class TemporaryDirectory {
 public:
  TemporaryDirectory() : TemporaryDirectory(std::filesystem::temp_directory_path()) {}
  explicit TemporaryDirectory(const std::filesystem::path& in) : path_(in / "phub-test-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  // For checkpoints: a disk that others use may hold up a sync for longer than a server saves at
  // its end. Where memory has less room than this, it is on the disk.
  static TemporaryDirectory in_memory(uint64_t room_bytes = uint64_t{256} << 20) {
    std::error_code error;
    const std::filesystem::path memory = "/dev/shm";
    const auto space = std::filesystem::space(memory, error);
    return error || space.available < room_bytes ? TemporaryDirectory()
                                                 : TemporaryDirectory(memory);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace phub
