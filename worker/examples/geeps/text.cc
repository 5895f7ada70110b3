#include "worker/examples/geeps/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "transport/error.h"
#include "worker/examples/files.h"

namespace phub::examples {
namespace {

constexpr size_t kHeldOut = 20;

std::string read(const std::filesystem::path& path) {
  std::ifstream file = open_to_read(path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

std::array<double, 256> frequencies(std::span<const uint8_t> text) {
  std::array<double, 256> frequencies{};
  for (const uint8_t symbol : text) frequencies[symbol] += 1.0 / static_cast<double>(text.size());
  return frequencies;
}

}  // namespace

Text Text::load(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return Text(read(path));
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  std::string bytes;
  for (const auto& file : files) bytes += read(file);
  return Text(bytes);
}

Text::Text(const std::string& bytes) : bytes_(bytes) {
  if (bytes.size() < 2 * kHeldOut) {
    fail(ErrorCode::kInvalid, "a text of {} bytes is too short", bytes.size());
  }
  const auto by_value = [](char a, char b) {
    return static_cast<unsigned char>(a) < static_cast<unsigned char>(b);
  };
  std::ranges::sort(bytes_, by_value);
  bytes_.erase(std::unique(bytes_.begin(), bytes_.end()), bytes_.end());
  for (const char byte : bytes) {
    const auto at = std::ranges::lower_bound(bytes_, byte, by_value) - bytes_.begin();
    text_.push_back(static_cast<uint8_t>(at));
  }
  held_out_ = text_.size() - text_.size() / kHeldOut;
}

double Text::entropy() const {
  double entropy = 0;
  for (const double p : frequencies(test())) entropy -= p > 0 ? p * std::log(p) : 0;
  return entropy;
}

Window window(std::span<const uint8_t> text, size_t all, size_t first, size_t streams, size_t steps,
              uint64_t number) {
  const size_t stream = text.size() / all;
  if (stream <= steps) {
    fail(ErrorCode::kInvalid, "{} streams of {} symbols, with the one after them, need {}, not {}",
         all, steps, all * (steps + 1), text.size());
  }
  const uint64_t windows = (stream - 1) / steps;
  const size_t begin = number % windows * steps;
  Window window{.at_start = begin == 0};
  for (size_t t = 0; t < steps; ++t) {
    for (size_t s = first; s < first + streams; ++s) {
      const size_t at = s * stream + begin + t;
      window.inputs.push_back(text[at]);
      window.labels.push_back(text[at + 1]);
    }
  }
  return window;
}

}  // namespace phub::examples
