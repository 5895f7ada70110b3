// A folder in place of the root, with what the kernel would have there.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/temporary_directory.h"

namespace phub::testing {

// A made-up /sys, /proc and /dev.
class Tree {
 public:
  void put(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << '\n';
  }
  void link(const std::string& path, const std::string& target) const {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::filesystem::create_symlink(target, file);
  }
  const std::string& root() const { return folder_.path(); }

 private:
  const TemporaryDirectory folder_;
};

}  // namespace phub::testing
