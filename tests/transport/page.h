// The tables of the documents of transport/: what another language joins by.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace phub {

class Page {
 public:
  // Rows of the form | `name` | value | … of the sources' documents.
  explicit Page(const std::string& source_dir) {
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(source_dir + "/transport")) {
      if (entry.path().extension() == ".md") read(entry.path());
    }
  }

  void expect(const std::string& name, uint64_t value) {
    ASSERT_TRUE(rows_.contains(name)) << name << " is not on the page";
    EXPECT_EQ(std::stoull(rows_[name], nullptr, 0), value) << name;
  }

 private:
  void read(const std::filesystem::path& path) {
    std::ifstream page(path);
    for (std::string line; std::getline(page, line);) {
      if (!line.starts_with("| `")) continue;
      const size_t name_end = line.find('`', 3);
      const size_t value = line.find("| ", name_end) + 2;
      rows_[line.substr(3, name_end - 3)] = line.substr(value, line.find(" |", value) - value);
    }
  }

  std::map<std::string, std::string> rows_;
};

}  // namespace phub
