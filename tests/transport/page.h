// The tables of transport/README.md: what another language joins by.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <string>

namespace phub {

class Page {
 public:
  // Rows of the form | `name` | value | … of the sources' page.
  explicit Page(const std::string& source_dir) {
    std::ifstream page(source_dir + "/transport/README.md");
    EXPECT_TRUE(page.is_open());
    for (std::string line; std::getline(page, line);) {
      if (!line.starts_with("| `")) continue;
      const size_t name_end = line.find('`', 3);
      const size_t value = line.find("| ", name_end) + 2;
      rows_[line.substr(3, name_end - 3)] = line.substr(value, line.find(" |", value) - value);
    }
  }

  void expect(const std::string& name, uint64_t value) {
    ASSERT_TRUE(rows_.contains(name)) << name << " is not on the page";
    EXPECT_EQ(std::stoull(rows_[name], nullptr, 0), value) << name;
  }

 private:
  std::map<std::string, std::string> rows_;
};

}  // namespace phub
