// A folder in place of the root, with what the kernel would have there.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace phub::testing {

// A made-up /sys, /proc and /dev.
class Tree {
 public:
  Tree() {
    root_ = (std::filesystem::temp_directory_path() / "phub-tree-XXXXXX").string();
    if (mkdtemp(root_.data()) == nullptr) throw std::runtime_error("mkdtemp of " + root_);
  }
  ~Tree() { std::filesystem::remove_all(root_); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  void put(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << '\n';
  }
  void link(const std::string& path, const std::string& target) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::filesystem::create_symlink(target, file);
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

}  // namespace phub::testing
