// A text as a sequence of symbols, read as parallel streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace phub::examples {

class Text {
 public:
  // Every file of the folder by name, or the one file. The last twentieth is held out. Throws
  // Error(kNotFound, kInvalid).
  static Text load(const std::string& path);
  explicit Text(const std::string& bytes);

  size_t symbols() const { return bytes_.size(); }  // those that occur; numbered from 0 on
  std::span<const uint8_t> train() const { return std::span(text_).first(held_out_); }
  std::span<const uint8_t> test() const { return std::span(text_).subspan(held_out_); }
  double entropy() const;  // per symbol of the held-out text, by their frequencies, in nats

 private:
  std::string bytes_;
  std::vector<uint8_t> text_;
  size_t held_out_;
};

// `steps` symbols for each of so many streams that share the text in equal parts: of step t and
// stream s, inputs[t · streams + s], and the symbol after it as its label.
struct Window {
  std::vector<float> inputs, labels;
  bool at_start = false;  // the text begins anew
};
// The number-th window. At the end of the text it starts again. `first` … first + streams − 1 of
// `all` streams. Throws Error(kInvalid) if the text is too short for one window.
Window window(std::span<const uint8_t> text, size_t all, size_t first, size_t streams, size_t steps,
              uint64_t number);

}  // namespace phub::examples
