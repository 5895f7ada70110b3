#include "worker/examples/digits_data.h"

#include <charconv>
#include <cstring>
#include <fstream>
#include <string_view>

#include "transport/error.h"

namespace phub::digits {
namespace {

constexpr int kMaxPixel = 16;
constexpr size_t kTestEvery = 6;

struct Row {
  std::array<int, kPixels> pixels;
  int label;
};

// Takes the number up to the next comma off the front of `line`.
int take_number(std::string_view& line, int max, const std::string& path, size_t line_number,
                int field) {
  const size_t comma = std::min(line.find(','), line.size());
  const std::string_view text = line.substr(0, comma);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > max) {
    fail(ErrorCode::kInvalid, "{}:{}: field {} is '{}', not a number from 0 to {}", path,
         line_number, field + 1, text, max);
  }
  line.remove_prefix(std::min(comma + 1, line.size()));
  return value;
}

Row parse_row(std::string_view line, const std::string& path, size_t line_number) {
  const auto commas = std::count(line.begin(), line.end(), ',');
  if (commas != kPixels) {
    fail(ErrorCode::kInvalid, "{}:{}: {} fields, not {} pixels and a label", path, line_number,
         commas + 1, kPixels);
  }
  Row row;
  for (int i = 0; i < kPixels; ++i) {
    row.pixels[i] = take_number(line, kMaxPixel, path, line_number, i);
  }
  row.label = take_number(line, kClasses - 1, path, line_number, kPixels);
  return row;
}

Samples samples_of(const std::vector<Row>& rows) {
  Samples samples;
  samples.images.resize(kPixels, static_cast<Eigen::Index>(rows.size()));
  for (size_t n = 0; n < rows.size(); ++n) {
    for (int i = 0; i < kPixels; ++i) {
      samples.images(i, n) = static_cast<float>(rows[n].pixels[i]) / kMaxPixel;
    }
    samples.labels.push_back(rows[n].label);
  }
  return samples;
}

}  // namespace

Dataset load(const std::string& csv_path) {
  std::ifstream file(csv_path);
  if (!file) {
    fail(ErrorCode::kNotFound, "{}: {}; scripts/setup fetches the digits into build/data", csv_path,
         std::strerror(errno));
  }
  std::vector<Row> train;
  std::vector<Row> test;
  std::string line;
  for (size_t n = 0; std::getline(file, line); ++n) {
    auto& part = n % kTestEvery == kTestEvery - 1 ? test : train;
    part.push_back(parse_row(line, csv_path, n + 1));
  }
  if (test.empty()) {
    fail(ErrorCode::kInvalid, "{}: {} images are too few to train with and to test with", csv_path,
         train.size());
  }
  return {samples_of(train), samples_of(test)};
}

Samples batch(const Samples& train, uint64_t seed, uint32_t rank, uint32_t world, uint64_t round,
              size_t size) {
  const size_t own = (train.size() - rank + world - 1) / world;
  // Hashing one after the other keeps (rank 1, round 2) and (rank 2, round 1) apart.
  Random random(Random(Random(seed).next() + rank).next() + round);
  Samples batch;
  batch.images.resize(kPixels, static_cast<Eigen::Index>(size));
  for (size_t n = 0; n < size; ++n) {
    const size_t sample = rank + random.next() % own * world;
    batch.images.col(n) = train.images.col(sample);
    batch.labels.push_back(train.labels[sample]);
  }
  return batch;
}

uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

float Random::uniform() {
  constexpr int kMantissaBits = 24;
  return static_cast<float>(next() >> (64 - kMantissaBits)) / (1u << kMantissaBits);
}

}  // namespace phub::digits
