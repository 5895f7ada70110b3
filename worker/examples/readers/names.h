// Names and their numbers, in the order in which they come.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "worker/examples/readers/lines.h"

namespace phub::examples {

class Names {
 public:
  // REQUIRES: `names` lives as long; it has the names by number, each once.
  explicit Names(std::vector<std::string>& names) : names_(names) {
    for (uint32_t n = 0; n < names.size(); ++n) numbers_.emplace(names[n], n);
  }
  // A name that is new gets the next number. `lines`: the file that has it, for the error of too
  // many.
  uint32_t of(std::string_view name, const Lines& lines) {
    if (const auto at = numbers_.find(name); at != numbers_.end()) return at->second;
    constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
    if (names_.size() == kMost) lines.refuse("there are more than {} names", kMost);
    names_.emplace_back(name);
    return numbers_.emplace(name, static_cast<uint32_t>(names_.size() - 1)).first->second;
  }
  const uint32_t* find(std::string_view name) const {  // nullptr: it is not there
    const auto at = numbers_.find(name);
    return at == numbers_.end() ? nullptr : &at->second;
  }

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;  // NOLINT(readability-identifier-naming): the standard's name
  };
  std::vector<std::string>& names_;
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> numbers_;
};

}  // namespace phub::examples
