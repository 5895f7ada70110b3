// What has happened in a simulation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/sim/time.h"

namespace phub {

class SimTrace {
 public:
  explicit SimTrace(const SimTime& time) : time_(time) {}  // `time` outlives this

  // Everything that happens goes into the hash; with keep_text, also into lines for people.
  void trace(std::string_view what, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0);
  void trace_bytes(std::span<const std::byte> bytes);  // hash only
  uint64_t trace_hash() const { return hash_; }
  void keep_text(bool keep) { keep_text_ = keep; }
  const std::vector<std::string>& text() const { return text_; }

 private:
  const SimTime& time_;
  uint64_t hash_ = 0xcbf29ce484222325ull;
  bool keep_text_ = false;
  std::vector<std::string> text_;
};

}  // namespace phub
