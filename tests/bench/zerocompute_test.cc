// The program itself, small: against its own server, and with what it must refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace phub {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  int status = -1;
  std::string output;  // stdout and stderr
};

Outcome zerocompute(const std::string& arguments) {
  const std::string command = std::string(PHUB_ZEROCOMPUTE) + " " + arguments + " 2>&1";
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> text;
  while (const size_t n = fread(text.data(), 1, text.size(), pipe)) {
    outcome.output.append(text.data(), n);
  }
  outcome.status = WEXITSTATUS(pclose(pipe));
  return outcome;
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& suffix)
      : path_(testing::TempDir() + "zerocompute_test_" + std::to_string(getpid()) + suffix) {}
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

nlohmann::json rows_of(const TemporaryFile& file) {
  return nlohmann::json::parse(std::ifstream(file.path()))["rows"];
}

TEST(ZerocomputeTest, SweepIsRightInEveryFormat) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const TemporaryFile json(".json");
    const Outcome outcome =
        zerocompute(std::string("-b 100 -e 200K -f 40 --workers 1,3 -w 2 -n 9 --dtype ") + dtype +
                    " --json " + json.path());
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    const nlohmann::json rows = rows_of(json);
    ASSERT_EQ(rows.size(), 6u);
    for (const nlohmann::json& row : rows) {
      EXPECT_EQ(row["wrong"], 0u);
      EXPECT_EQ(row["rounds"], 9u);
      // Everything once per round (11 with the warm-up), and the chunks' edges on every worker.
      EXPECT_GE(row["checked"], 11 * row["elements"].get<uint64_t>());
      EXPECT_GT(row["limit_us"], 0.0);
      EXPECT_EQ(row["bytes_copied"], 0u);
    }
  }
}

TEST(ZerocomputeTest, EveryOptimizerIsRight) {
  for (const char* optimizer : {"none", "sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop"}) {
    const Outcome outcome = zerocompute(
        std::string("-b 80K --workers 2 -w 1 -n 5 --no-limit --optimizer ") + optimizer);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
  }
}

TEST(ZerocomputeTest, SwitchesAndCopy) {
  for (const char* switches : {"--no-sum", "--no-optimize", "--copy", "-D 0.2"}) {
    const Outcome outcome =
        zerocompute(std::string("-b 1M --workers 2 -w 1 ") +
                    (std::string(switches) == "-D 0.2" ? "" : "-n 5 ") + switches);
    EXPECT_EQ(outcome.status, 0) << switches << ": " << outcome.output;
  }
}

TEST(ZerocomputeTest, KeyTableFromAFile) {
  const TemporaryFile model(".json");
  std::ofstream(model.path()) << R"({"name": "tiny", "keys": [{"name": "a", "elements": 1},
    {"name": "b", "elements": 8193}, {"name": "c", "elements": 33}]})";
  const Outcome outcome = zerocompute("--workers 3 -n 6 --model " + model.path());
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("tiny"));
}

TEST(ZerocomputeTest, BadInputIsOneLine) {
  const TemporaryFile broken(".json");
  std::ofstream(broken.path()) << R"({"name": "x", "keys": [)";
  const std::pair<std::string, int> cases[] = {
      {"--model lenet9000", 2},
      {"--model " + broken.path(), 2},
      {"--model /no/such/file.json", 2},
      {"--dtype f64", 2},
      {"--workers 0", 2},
      {"-b 4K --server 127.0.0.1:1 -n 1", 1},
      {"-b 4K --transport pigeon -n 1", 1},
  };
  for (const auto& [arguments, status] : cases) {
    const Outcome outcome = zerocompute("--quiet --no-limit " + arguments);
    const std::string& text = outcome.output;
    EXPECT_EQ(outcome.status, status) << arguments << ": " << text;
    EXPECT_THAT(text, HasSubstr("zerocompute: ")) << arguments;
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << arguments << ": " << text;
  }
}

TEST(ZerocomputeTest, HelpHasExamples) {
  const Outcome outcome = zerocompute("--help");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.output, HasSubstr("Examples:"));
  EXPECT_THAT(outcome.output, HasSubstr("resnet50"));
}

}  // namespace
}  // namespace phub
