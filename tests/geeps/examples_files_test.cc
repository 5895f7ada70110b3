// The applications' checkpoints and texts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "transport/error.h"
#include "worker/examples/geeps/checkpoint.h"
#include "worker/examples/geeps/text.h"

namespace phub::examples {
namespace examples_files_test {

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::kInternal;
}

class CheckpointFile : public ::testing::Test {
 protected:
  CheckpointFile() { save(path_, checkpoint_); }
  ~CheckpointFile() override { std::filesystem::remove(path_); }

  std::string read() const {
    std::ostringstream bytes;
    bytes << std::ifstream(path_, std::ios::binary).rdbuf();
    return bytes.str();
  }
  void write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }

  const std::string path_ = ::testing::TempDir() + "phub_examples_checkpoint_" +
                            std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
                            std::to_string(::getpid());
  const Checkpoint checkpoint_{.of = "a model",
                               .clock = 17,
                               .parameters = {1.5f, -0.0f, 1e-40f},
                               .state = {3},
                               .optimizer = {0.5f, 7}};
};

TEST_F(CheckpointFile, HoldsWhatWasSaved) {
  const Checkpoint loaded = load(path_, "a model");
  EXPECT_EQ(loaded.clock, 17u);
  EXPECT_EQ(loaded.parameters, checkpoint_.parameters);
  EXPECT_TRUE(std::signbit(loaded.parameters[1]));
  EXPECT_EQ(loaded.state, checkpoint_.state);
  EXPECT_EQ(loaded.optimizer, checkpoint_.optimizer);
}

TEST_F(CheckpointFile, IsReplacedAsAWhole) {
  save(path_, {.of = "a model", .clock = 18});
  EXPECT_EQ(load(path_, "a model").clock, 18u);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
}

TEST_F(CheckpointFile, OfAnotherModelIsRefused) {
  EXPECT_EQ(code_of([&] { load(path_, "another"); }), ErrorCode::kMismatch);
}

TEST_F(CheckpointFile, EveryFlippedBitIsNoticed) {
  const std::string bytes = read();
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    write(flipped);
    ASSERT_EQ(code_of([&] { load(path_, "a model"); }), ErrorCode::kInvalid) << "bit " << bit;
  }
}

TEST_F(CheckpointFile, EveryMissingEndIsNoticed) {
  const std::string bytes = read();
  for (size_t size = 0; size < bytes.size(); ++size) {
    write(bytes.substr(0, size));
    ASSERT_EQ(code_of([&] { load(path_, "a model"); }), ErrorCode::kInvalid) << size << " bytes";
  }
}

TEST_F(CheckpointFile, ThatIsNotThereIsNotFound) {
  EXPECT_EQ(code_of([&] { load(path_ + ".none", "a model"); }), ErrorCode::kNotFound);
}

TEST(Text, NumbersTheBytesThatOccur) {
  const Text text("\xff\x01zz\x01" + std::string(95, 'z'));
  EXPECT_EQ(text.symbols(), 3u);
  EXPECT_EQ(text.train().size(), 95u);
  EXPECT_EQ(text.test().size(), 5u);
  EXPECT_THAT(std::vector(text.train().begin(), text.train().begin() + 5),
              ::testing::ElementsAre(2, 0, 1, 1, 0));
  EXPECT_EQ(text.entropy(), 0);
}

TEST(Text, EntropyIsThatOfTheFrequencies) {
  std::string bytes;
  for (int i = 0; i < 100; ++i) bytes += "abcd";
  EXPECT_NEAR(Text(bytes).entropy(), std::log(4), 1e-6);
}

// All streams together read every symbol once, in order, and then start again.
TEST(Text, WindowsGoThroughTheText) {
  std::vector<uint8_t> text(203);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<uint8_t>(i);
  constexpr size_t kAll = 4, kSteps = 7;  // streams of 50: seven windows, one symbol is left over
  for (size_t first : {size_t{0}, size_t{2}}) {
    std::set<float> seen;
    for (uint64_t number = 0; number < 7; ++number) {
      const Window w = window(text, kAll, first, 2, kSteps, number);
      EXPECT_EQ(w.at_start, number == 0);
      for (size_t i = 0; i < w.inputs.size(); ++i) {
        const size_t t = i / 2, stream = first + i % 2;
        ASSERT_EQ(w.inputs[i], static_cast<float>(stream * 50 + number * kSteps + t));
        ASSERT_EQ(w.labels[i], w.inputs[i] + 1);
        seen.insert(w.inputs[i]);
      }
    }
    EXPECT_EQ(seen.size(), 2u * 49);
    EXPECT_EQ(window(text, kAll, first, 2, kSteps, 7).inputs,
              window(text, kAll, first, 2, kSteps, 0).inputs);
    EXPECT_TRUE(window(text, kAll, first, 2, kSteps, 7).at_start);
  }
  EXPECT_EQ(code_of([&] { window(text, kAll, 0, 2, 50, 0); }), ErrorCode::kInvalid);
}

}  // namespace examples_files_test
}  // namespace phub::examples
