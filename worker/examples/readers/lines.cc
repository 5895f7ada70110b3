#include "worker/examples/readers/lines.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "worker/examples/files.h"

namespace phub::examples {
namespace {

constexpr size_t kBlock = 1 << 18;

// The program that unpacks a file that begins so; nullptr: it is not compressed.
const char* unpacker_of(std::string_view begin) {
  using namespace std::string_view_literals;
  if (begin.starts_with("\x1f\x8b"sv)) return "gunzip";
  if (begin.starts_with("BZh"sv) && begin.substr(4).starts_with("1AY&SY"sv)) return "bunzip2";
  if (begin.starts_with("\xfd"
                        "7zXZ"sv)) {
    return "unxz";
  }
  if (begin.starts_with("\x28\xb5\x2f\xfd"sv)) return "unzstd";
  if (begin.starts_with("PK\x03\x04"sv)) return "unzip";
  return nullptr;
}

template <typename Number>
std::optional<Number> parsed(std::string_view word) {
  Number value{};
  if (word.starts_with('+')) word.remove_prefix(1);
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return value;
}

}  // namespace

Lines::Lines(std::string path, size_t longest)
    : path_(std::move(path)), longest_(longest), file_(open_to_read(path_)) {
  read_more();
  if (const char* unpacker = unpacker_of(buffer_)) {
    fail(ErrorCode::kInvalid, "{} is compressed: unpack it before, with {}", path_, unpacker);
  }
  if (buffer_.starts_with("\xef\xbb\xbf")) begin_ = 3;  // a mark that some editors write
}

void Lines::read_more() {
  buffer_.erase(0, std::exchange(begin_, 0));
  const size_t before = buffer_.size();
  buffer_.resize(before + kBlock);
  file_.read(buffer_.data() + before, kBlock);
  if (file_.bad()) fail(ErrorCode::kInvalid, "{}: {}", path_, std::strerror(errno));
  buffer_.resize(before + static_cast<size_t>(file_.gcount()));
  ended_ = file_.eof();
  bytes_ += static_cast<uint64_t>(file_.gcount());
  digest_ = digest_of(digest_, std::string_view(buffer_).substr(before));
}

std::optional<std::string_view> Lines::next() {
  ++number_;
  size_t end = buffer_.find('\n', begin_);
  while (end == std::string::npos && !ended_) {
    const size_t searched = buffer_.size() - begin_;
    if (searched > longest_) break;
    read_more();
    end = buffer_.find('\n', searched);
  }
  const size_t bytes = std::min(end, buffer_.size()) - begin_;
  if (bytes > longest_) {
    refuse("it has more than {} bytes: is this the file that you mean?", longest_);
  }
  if (end == std::string::npos && bytes == 0) return std::nullopt;
  std::string_view line(buffer_.data() + begin_, bytes);
  begin_ = std::min(end, buffer_.size() - 1) + 1;
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (line.find('\0') != line.npos) refuse("it has a zero byte: the file is no text");
  return line;
}

std::optional<std::string_view> Lines::next_data() {
  for (;;) {
    const std::optional<std::string_view> line = next();
    if (!line) return line;
    const std::string_view data = trimmed(*line);
    if (!data.empty() && data.front() != '#' && data.front() != '%') return data;
  }
}

uint64_t digest_of(uint64_t digest, std::string_view bytes) {
  uint64_t h = digest ^ 0xcbf29ce484222325;
  for (const char c : bytes) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return h;
}

std::string_view next_word(std::string_view& line, std::string_view separators) {
  line.remove_prefix(std::min(line.find_first_not_of(separators), line.size()));
  const std::string_view word = line.substr(0, line.find_first_of(separators));
  line.remove_prefix(word.size());
  return word;
}

std::string_view next_field(std::string_view& line, char separator) {
  const std::string_view field = line.substr(0, line.find(separator));
  line.remove_prefix(std::min(field.size() + 1, line.size()));
  return trimmed(field);
}

std::string_view trimmed(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  return text.substr(0, text.find_last_not_of(" \t") + 1);
}

std::optional<double> number_in(std::string_view word) { return parsed<double>(word); }
std::optional<uint64_t> whole_number_in(std::string_view word) { return parsed<uint64_t>(word); }

std::string shown(std::string_view word) {
  constexpr size_t kMost = 40;
  std::string text(word.substr(0, kMost));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return word.size() > kMost ? text + "…" : text;
}

std::string extension_of(const std::string& path) {
  std::string extension = std::filesystem::path(path).extension().string();
  if (!extension.empty()) extension.erase(0, 1);
  for (char& c : extension) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c | 0x20 : c);
  return extension;
}

}  // namespace phub::examples
