// Tables and sizes as text, for people.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace phub {

// Columns are as wide as their longest cell, and right-aligned; `text_last` aligns the last left.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head, bool text_last = false)
      : rows_{std::move(head)}, text_last_(text_last) {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  std::string text() const {
    std::vector<size_t> width(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (size_t i = 0; i < row.size(); i++) width[i] = std::max(width[i], row[i].size());
    }
    if (text_last_) width.back() = 0;
    std::string text;
    for (const auto& row : rows_) {
      for (size_t i = 0; i < row.size(); i++) text += fmt::format("  {:>{}}", row[i], width[i]);
      text += '\n';
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
  bool text_last_;
};

// "97.49 MiB"; "-" for 0.
inline std::string human_bytes(uint64_t bytes) {
  if (bytes == 0) return "-";
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < std::size(kUnits)) value /= 1024, unit++;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace phub
