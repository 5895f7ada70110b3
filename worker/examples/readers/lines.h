// A user's text file, line by line. All readers of this folder read so, and refuse a line in the
// same words: "FILE, line N: what is wrong, and what to do".
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "transport/error.h"

namespace phub::examples {

class Lines {
 public:
  static constexpr size_t kLongest = 1 << 20;  // bytes of a line of links, ratings or numbers

  // Throws Error: kNotFound, there is no such file, or it may not be read; kInvalid, it is a folder
  // or compressed.
  explicit Lines(std::string path, size_t longest = kLongest);

  // The next line without its end, which is "\n", "\r\n" or the file's; valid until the next call.
  // nullopt: the file has no more. Throws Error(kInvalid) if the line has more than `longest` bytes
  // or a zero byte, so that a wrong path such as /dev/zero does not fill the memory.
  std::optional<std::string_view> next();
  // As next(), without lines that are empty or begin with # or %.
  std::optional<std::string_view> next_data();

  const std::string& path() const { return path_; }
  uint64_t number() const { return number_; }  // of the last line, from 1
  uint64_t digest() const { return digest_; }  // of all bytes that were read
  uint64_t bytes() const { return bytes_; }    // that were read

  // Throws Error(kInvalid) about the last line.
  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::kInvalid, "{}, line {}: {}", path_, number_,
         fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  void read_more();

  const std::string path_;
  const size_t longest_;
  std::ifstream file_;
  std::string buffer_;
  size_t begin_ = 0;  // of the next line, in the buffer
  bool ended_ = false;
  uint64_t number_ = 0, digest_ = 0, bytes_ = 0;
};

// The digest of both.
uint64_t digest_of(uint64_t digest, std::string_view bytes);

// Cuts the next word off. Separators in a row count as one.
std::string_view next_word(std::string_view& line, std::string_view separators = " \t");
// Cuts the next field off, up to one separator, and the spaces around it.
std::string_view next_field(std::string_view& line, char separator);
std::string_view trimmed(std::string_view text);

// The number that is all of the word; "nan" and "inf" are numbers. nullopt: it is none.
std::optional<double> number_in(std::string_view word);
std::optional<uint64_t> whole_number_in(std::string_view word);

// What a message shows of a word, which may be a whole file.
std::string shown(std::string_view word);

// "mtx" of "folder/matrix.MTX"; "" without a dot.
std::string extension_of(const std::string& path);

}  // namespace phub::examples
