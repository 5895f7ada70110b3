// Tables and sizes as text, for people.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/error.h"
#include "transport/text.h"

namespace phub {

// Columns are as wide as their longest cell, and right-aligned: all but the first ones that `left`
// counts, and, with `text_last`, the last.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head, bool text_last = false, size_t left = 0)
      : rows_{std::move(head)}, text_last_(text_last), left_(left) {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool is_empty() const { return rows_.size() == 1; }

  std::string text() const {
    std::vector<size_t> width(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (size_t i = 0; i < row.size(); i++) width[i] = std::max(width[i], row[i].size());
    }
    if (text_last_) width.back() = 0;
    std::string text;
    for (const auto& row : rows_) {
      for (size_t i = 0; i < row.size(); i++) {
        text += i < left_ ? fmt::format("  {:<{}}", row[i], width[i])
                          : fmt::format("  {:>{}}", row[i], width[i]);
      }
      text += '\n';
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
  bool text_last_;
  size_t left_;
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

// "64G", "512M", "1048576", "1.5T". Throws Error(kInvalid).
inline uint64_t parse_bytes(std::string_view text) {
  double number = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  const std::string_view suffix = text.substr(static_cast<size_t>(end - text.data()));
  const size_t power = suffix.empty() ? 0 : std::string_view("KMGT").find(suffix) + 1;
  const double bytes = number * std::pow(1024.0, static_cast<double>(power));
  const bool known_suffix = suffix.empty() || (suffix.size() == 1 && power != 0);
  if (error != std::errc() || !known_suffix || !(bytes >= 1) || !(bytes < 0x1p62)) {
    fail(ErrorCode::kInvalid, "must be a number of bytes such as 512M or 64G, got '{}'",
         printable(text));
  }
  return static_cast<uint64_t>(bytes);
}
inline uint64_t parse_bytes_or_0(std::string_view text) {
  return text == "0" ? 0 : parse_bytes(text);
}

}  // namespace phub
