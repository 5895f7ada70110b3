#include "worker/examples/digits_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "transport/error.h"

namespace phub::digits {
namespace digits_data_test {

using ::testing::HasSubstr;

std::string row(int pixel, int label) {
  std::string line;
  for (int i = 0; i < kPixels; ++i) line += std::to_string(pixel) + ",";
  return line + std::to_string(label) + "\n";
}

class DigitsFile : public ::testing::Test {
 protected:
  std::string write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::string error_of(const std::string& text) {
    try {
      load(write(text));
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }

  const std::string path_ = ::testing::TempDir() + "digits_data_test_" +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST(Digits, RealDataIsAllThere) {
  const Dataset data = load(PHUB_DIGITS_CSV);
  EXPECT_EQ(data.train.size() + data.test.size(), 1797u);
  EXPECT_EQ(data.test.size(), 299u);
  EXPECT_EQ(data.train.images.cols(), 1498);
  EXPECT_EQ(data.train.images.minCoeff(), 0.0f);
  EXPECT_EQ(data.train.images.maxCoeff(), 1.0f);
  // The first three images show 0, 1 and 2; the first pixels of the first are 0 0 5 13.
  EXPECT_THAT(std::vector<int>(data.train.labels.begin(), data.train.labels.begin() + 3),
              ::testing::ElementsAre(0, 1, 2));
  EXPECT_EQ(data.train.images(2, 0), 5.0f / 16);
  EXPECT_EQ(data.train.images(3, 0), 13.0f / 16);
}

TEST_F(DigitsFile, EverySixthImageIsHeldOut) {
  std::string text;
  for (int n = 0; n < 12; ++n) text += row(n, n % 10);
  const Dataset data = load(write(text));
  EXPECT_THAT(data.test.labels, ::testing::ElementsAre(5, 1));
  EXPECT_EQ(data.test.images(63, 1), 11.0f / 16);
  EXPECT_EQ(data.train.size(), 10u);
}

TEST_F(DigitsFile, BadLinesAreNamed) {
  std::string good;
  for (int n = 0; n < 6; ++n) good += row(1, 1);
  EXPECT_EQ(error_of(good), "no error");
  EXPECT_THAT(error_of(good + "1,2,3\n"), HasSubstr(":7: 3 fields"));
  EXPECT_THAT(error_of(row(17, 1) + good), HasSubstr(":1: field 1 is '17'"));
  EXPECT_THAT(error_of(row(1, 10) + good), HasSubstr(":1: field 65 is '10'"));
  std::string letter = row(1, 1);
  letter[2] = 'x';
  EXPECT_THAT(error_of(good + letter), HasSubstr(":7: field 2 is 'x'"));
  EXPECT_THAT(error_of(""), HasSubstr("too few"));
}

TEST(Digits, AMissingFileIsNamed) {
  try {
    load("/nowhere/digits.csv");
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kNotFound);
    EXPECT_THAT(e.what(), HasSubstr("/nowhere/digits.csv: No such file"));
  }
}

// Images that carry their own number.
Samples numbered(size_t count) {
  Samples samples;
  samples.images.resize(kPixels, static_cast<Eigen::Index>(count));
  for (size_t n = 0; n < count; ++n) {
    samples.images.col(n).setConstant(static_cast<float>(n));
    samples.labels.push_back(static_cast<int>(n % 10));
  }
  return samples;
}

TEST(Digits, ShardsAreDisjointAndCoverTheData) {
  const Samples train = numbered(23);
  std::set<int> all;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    std::set<int> seen;
    for (uint64_t round = 1; round <= 50; ++round) {
      const Samples samples = batch(train, 7, rank, 4, round, 8);
      for (size_t n = 0; n < samples.size(); ++n) {
        const int number = static_cast<int>(samples.images(0, n));
        EXPECT_EQ(samples.labels[n], number % 10);
        EXPECT_EQ(number % 4, static_cast<int>(rank));
        seen.insert(number);
      }
    }
    all.insert(seen.begin(), seen.end());
  }
  EXPECT_EQ(all.size(), 23u);
}

TEST(Digits, BatchesDependOnSeedRankAndRoundAndNothingElse) {
  const Samples train = numbered(1000);
  auto images = [&](uint64_t seed, uint32_t rank, uint64_t round) {
    return Eigen::MatrixXf(batch(train, seed, rank, 4, round, 16).images);
  };
  const Eigen::MatrixXf one = images(1, 2, 3);
  EXPECT_EQ(images(1, 2, 3), one);
  EXPECT_NE(images(2, 2, 3), one);
  EXPECT_NE(images(1, 3, 3), one);
  EXPECT_NE(images(1, 2, 4), one);
  EXPECT_NE(images(1, 3, 2), one);
}

}  // namespace digits_data_test
}  // namespace phub::digits
