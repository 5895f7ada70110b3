// The program itself, small: against its own server, and with what it must refuse.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/whole_key.h"

namespace phub {
namespace zerocompute_test {

using ::testing::Contains;
using ::testing::HasSubstr;

struct Outcome {
  int status = -1;
  std::string output;  // stdout and stderr
};

Outcome shell(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> text;
  while (const size_t n = fread(text.data(), 1, text.size(), pipe)) {
    outcome.output.append(text.data(), n);
  }
  outcome.status = WEXITSTATUS(pclose(pipe));
  return outcome;
}

Outcome zerocompute(const std::string& arguments) {
  return shell(std::string(PHUB_ZEROCOMPUTE) + " " + arguments);
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& suffix)
      : path_(::testing::TempDir() + "zerocompute_test_" + std::to_string(getpid()) + suffix) {}
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

size_t count_of(const std::string& text, const std::string& what) {
  size_t count = 0;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++count;
  return count;
}

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

TEST(ZerocomputeTest, FormatsOfGradients) {
  // Keys of 1 to 70000 elements, in chunks of 8192 and less; residuals grow over the rounds.
  const std::map<std::string, double> bytes_per_element = {
      {"bf16", 2}, {"fp8-e4m3", 1}, {"fp8-e5m2", 1}, {"int32", 4},
      {"int8", 1}, {"int4", 0.5},   {"topk", 0.125}, {"topk-10-int2", 0.225}};
  for (const auto& [format, expected] : bytes_per_element) {
    const TemporaryFile json(".json");
    const Outcome outcome = zerocompute("-b 4 -e 280K -f 265 --workers 1,3 -w 2 -n 5 --dtype " +
                                        std::string(format == "int8" ? "bf16" : "f32") +
                                        " --format " + format + " --json " + json.path());
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    for (const nlohmann::json& row : rows_of(json)) {
      EXPECT_EQ(row["wrong"], 0u) << outcome.output;
      EXPECT_EQ(row["format"], format);
      EXPECT_GE(row["checked"], 7 * row["elements"].get<uint64_t>());
      const auto elements = row["elements"].get<double>();
      const auto chunks = row["chunks"].get<double>();
      EXPECT_NEAR(row["bytes"].get<double>(), expected * elements, 12 * chunks) << format;
    }
  }
}

TEST(ZerocomputeTest, ResultsAsDifferences) {
  const std::map<std::string, double> bytes_per_element = {
      {"fp8-e4m3", 1}, {"fp8-e5m2", 1}, {"int8", 1}, {"int4", 0.5}};
  for (const char* transport : {"shm", "tcp"}) {
    for (const auto& [results, expected] : bytes_per_element) {
      const TemporaryFile json(".json");
      const Outcome outcome =
          zerocompute("-b 4 -e 280K -f 265 --workers 1,3 -w 2 -n 5 --transport " +
                      std::string(transport) + " --results " + results +
                      (results == "int8" ? " --format int4" : "") + " --json " + json.path());
      ASSERT_EQ(outcome.status, 0) << outcome.output;
      for (const nlohmann::json& row : rows_of(json)) {
        EXPECT_EQ(row["wrong"], 0u) << outcome.output;
        EXPECT_EQ(row["dtype"], results);
        EXPECT_GE(row["checked"], 7 * row["elements"].get<uint64_t>());
        const auto elements = row["elements"].get<double>();
        const auto chunks = row["chunks"].get<double>();
        EXPECT_NEAR(row["result_bytes"].get<double>(), expected * elements, 8 * chunks);
      }
    }
  }
}

// Matrices of odd sizes and others beside them; the bytes are those that a rank sends.
TEST(ZerocomputeTest, FactorsAndRows) {
  const TemporaryFile model(".model.json");
  std::ofstream(model.path()) << R"({"name": "some", "keys": [
    {"name": "emb", "elements": 9000, "shape": [300, 30]}, {"name": "bias", "elements": 8193},
    {"name": "fc", "elements": 13467, "shape": [67, 201]},
    {"name": "fc2", "elements": 33000, "shape": [1000, 33]}]})";
  for (const char* more : {"--transport shm", "--transport tcp --dtype bf16",
                           "--format int8 --results int8 --groups '(1,1),1'",
                           "--format int4 --optimizer adam --copy=all",
                           "--no-optimize --groups 2,1", "--no-sum", "--chunk-sizes 512,64K"}) {
    const TemporaryFile json(".json");
    const Outcome outcome = zerocompute("--workers 3 -w 1 -n 4 --factors 5 --rows 40 --model " +
                                        model.path() + " " + more + " --json " + json.path());
    ASSERT_EQ(outcome.status, 0) << more << ": " << outcome.output;
    for (const nlohmann::json& row : rows_of(json)) {
      EXPECT_EQ(row["wrong"], 0u) << outcome.output;
      EXPECT_EQ(row["factors"], "5");
      EXPECT_EQ(row["rows"], "40");
      EXPECT_GE(row["checked"], 5 * row["elements"].get<uint64_t>());
      EXPECT_FALSE(row.contains("limit_us"));
    }
  }
  // One chunk of each matrix that is sent as factors: K · (M + N) numbers and their number.
  const TemporaryFile json(".json");
  const Outcome outcome = zerocompute(
      "--workers 2 -n 2 --factors fc=5 --rows emb=300 --chunk-elements 32 --serve-args '--cores 1' "
      "--model " +
      model.path() + " --json " + json.path());
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json row = rows_of(json)[0];
  const uint64_t chunks_of_rows = 300 / 16;  // of 16 rows, so that elements are a multiple of 32
  EXPECT_EQ(row["bytes"],
            4 * (8193 + 33000 + 5 * (67 + 201) + 1) + 4 * 300 * 31 + 4 * (chunks_of_rows + 1));
  EXPECT_EQ(row["chunks"], 257 + 1032 + 1 + chunks_of_rows + 1);
}

// Of more bytes than are kept in caches, too, which are copied past them.
TEST(ZerocomputeTest, MemoryOfTheWorkersOwn) {
  for (const char* more : {"-b 300K --copy=all", "-b 6000004 --copy=all", "-b 6000004 --copy",
                           "-b 3M --dtype bf16 "
                           "--copy=all",
                           "-b 6M --format int8 --results int8 --copy=all --transport tcp"}) {
    const TemporaryFile json(".json");
    const Outcome outcome =
        zerocompute(std::string("--workers 3 -w 1 -n 4 ") + more + " --json " + json.path());
    ASSERT_EQ(outcome.status, 0) << more << ": " << outcome.output;
    const nlohmann::json row = rows_of(json)[0];
    EXPECT_EQ(row["wrong"], 0u) << outcome.output;
    EXPECT_GE(row["bytes_copied"], 15 * row["result_bytes"].get<uint64_t>() / 2);
  }
}

TEST(ZerocomputeTest, GroupsOfCodedGradients) {
  for (const char* format : {"int8", "int4", "fp8-e5m2", "topk", "topk-int2", "int32"}) {
    const Outcome outcome = zerocompute(
        std::string(
            "-b 300K --workers 5 --groups '(1,2),(1,1)' -w 1 -n 4 --no-optimize --format ") +
        format);
    EXPECT_EQ(outcome.status, 0) << format << ": " << outcome.output;
  }
}

TEST(ZerocomputeTest, EveryOptimizerIsRight) {
  for (const std::string_view optimizer : kernels::optimizer_names()) {
    const Outcome outcome = zerocompute(
        fmt::format("-b 80K --workers 2 -w 1 -n 5 --no-limit --optimizer {}", optimizer));
    const bool is_refused = kernels::takes_whole_keys(*kernels::parse_optimizer(optimizer));
    EXPECT_EQ(outcome.status == 0, !is_refused) << outcome.output;
  }
}

TEST(ZerocomputeTest, Groups) {
  const TemporaryFile json(".json");
  const Outcome outcome = zerocompute(
      "-b 1M --workers 4 --groups '(1,2),(1)' -w 1 -n 5 --no-limit --json " + json.path());
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_EQ(rows_of(json)[0]["groups"], "(1,2),(1)");
}

TEST(ZerocomputeTest, SwitchesAndCopy) {
  for (const char* switches : {"--no-sum", "--no-optimize", "--copy", "-D 0.2"}) {
    const Outcome outcome =
        zerocompute(std::string("-b 1M --workers 2 -w 1 ") +
                    (std::string(switches) == "-D 0.2" ? "" : "-n 5 ") + switches);
    EXPECT_EQ(outcome.status, 0) << switches << ": " << outcome.output;
  }
}

TEST(ZerocomputeTest, ChunkSizes) {
  const TemporaryFile json(".json");
  const Outcome outcome = zerocompute(
      "-b 1M --workers 3 --chunk-sizes 4K,128K,1M --dtype bf16 -w 1 -n 6 --json " + json.path());
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json rows = rows_of(json);
  ASSERT_EQ(rows.size(), 3u);
  const uint64_t sizes[] = {4096, 131072, 1048576};
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["chunk_bytes"], sizes[i]);
    EXPECT_EQ(rows[i]["chunk_elements"], sizes[i] / 2);
    EXPECT_EQ(rows[i]["chunks"], 1048576 / sizes[i]);
    EXPECT_EQ(rows[i]["wrong"], 0u);
  }
}

// What the verdict is made of was measured, and means what it says.
TEST(ZerocomputeTest, Verdict) {
  const TemporaryFile json(".json");
  const Outcome outcome = zerocompute(
      "-b 8M --workers 3 -w 1 -n 12 --link-gbps 0.001 --serve-args '--cores 1' --json " +
      json.path());
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json row = rows_of(json)[0];
  ASSERT_EQ(row["core_busy"].size(), 1u);
  EXPECT_GT(row["core_busy"][0], 0.0);
  EXPECT_GT(row["machine_busy"], 0.0);
  EXPECT_GE(row["wakeups"], 1.0);
  EXPECT_GT(row["wakeup_us"], 0.0);
  ASSERT_EQ(row["done_us"].size(), 3u);
  for (size_t r = 0; r < 3; ++r) {
    EXPECT_GT(row["done_us"][r], row["pushed_us"][r]);
    EXPECT_LE(row["done_us"][r], row["max_us"]);
  }
  // A link of 1 Mbit/s would need a minute: the network binds, unless a rank is so late, or memory
  // so busy, that they are named before it.
  const nlohmann::json shares = row["verdict"]["shares"];
  EXPECT_EQ(shares["network"], 1.0);
  std::vector<std::string> may_bind;
  if (shares["straggler"] >= 0.25) may_bind.push_back("straggler");
  may_bind.push_back(shares["memory"] >= 0.65 ? "memory" : "network");
  EXPECT_THAT(may_bind, Contains(row["verdict"]["bound"].get<std::string>())) << shares;
  EXPECT_THAT(outcome.output, HasSubstr(row["verdict"]["because"].get<std::string>()));
  EXPECT_THAT(outcome.output, HasSubstr(row["verdict"]["advice"].get<std::string>()));
  const nlohmann::json all = nlohmann::json::parse(std::ifstream(json.path()));
  EXPECT_GE(all["machine"]["cpus"], 1u);
  EXPECT_EQ(all["server"]["cores"], 1u);
}

// Of two ranks none is a straggler, and memory was not measured: nothing is named before the
// network.
TEST(ZerocomputeTest, ASlowLinkBinds) {
  for (const bool slow : {true, false}) {
    const TemporaryFile json(".json");
    const Outcome outcome =
        zerocompute("-b 1M --workers 2 -w 1 -n 5 --no-limit --json " + json.path() +
                    (slow ? " --link-gbps 0.001" : " --link-gbps 1000000"));
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    const nlohmann::json verdict = rows_of(json)[0]["verdict"];
    EXPECT_EQ(verdict["bound"] == "network", slow) << verdict;
    EXPECT_EQ(verdict["shares"]["network"] == 1.0, slow) << verdict;
    EXPECT_FALSE(verdict["shares"].contains("memory")) << verdict;
    EXPECT_FALSE(verdict["shares"].contains("straggler")) << verdict;
  }
}

TEST(ZerocomputeTest, JobsBesideEachOther) {
  const TemporaryFile json(".json");
  const Outcome outcome =
      zerocompute("-b 300K --workers 2 --jobs 3 -w 1 -n 7 --json " + json.path());
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json rows = rows_of(json);
  ASSERT_EQ(rows.size(), 3u);
  for (size_t j = 0; j < rows.size(); ++j) {
    EXPECT_EQ(rows[j]["job"], j);
    EXPECT_EQ(rows[j]["jobs"], 3u);
    EXPECT_EQ(rows[j]["rounds"], 7u);
    EXPECT_EQ(rows[j]["wrong"], 0u);
    EXPECT_GE(rows[j]["checked"], 8 * rows[j]["elements"].get<uint64_t>());
  }
}

// As a launcher would: a server, and a process per rank that knows only its environment.
TEST(ZerocomputeTest, OneRankPerProcess) {
  const TemporaryFile json(".json"), log(".log");
  const std::string binary = PHUB_ZEROCOMPUTE;
  const std::string phub = binary.substr(0, binary.rfind('/')) + "/phub";
  const std::string options = " --one-rank -b 100K -e 200K -w 1 -n 6 --copy --json " + json.path();
  std::ofstream script(log.path() + ".sh");
  script << phub << " serve --listen 127.0.0.1:0 >" << log.path() << " 2>&1 & server=$!\n"
         << "until grep -q 'listening on' " << log.path() << "; do sleep 0.02; done\n"
         << "export WORLD_SIZE=3 PHUB_SERVER=$(sed -n 's/^listening on //p' " << log.path() << ")\n"
         << "ranks=; for r in 0 1 2; do RANK=$r " << binary << options << " & ranks=\"$ranks $!\"; "
         << "done\nstatus=0; for rank in $ranks; do wait $rank || status=$?; done\n"
         << "kill $server; exit $status\n";
  script.close();
  const Outcome outcome = shell("sh " + log.path() + ".sh");
  std::remove((log.path() + ".sh").c_str());
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json rows = rows_of(json);
  ASSERT_EQ(rows.size(), 2u);
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["workers"], 3u);
    EXPECT_EQ(row["rounds"], 6u);
    EXPECT_EQ(row["wrong"], 0u);
    EXPECT_EQ(row["checked"], 7 * row["elements"].get<uint64_t>());  // all of them, on every rank
  }
  // One report, rank 0's.
  EXPECT_EQ(count_of(outcome.output, "rounds/s"), 1u) << outcome.output;
  EXPECT_EQ(count_of(outcome.output, "What binds"), 1u) << outcome.output;
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
      {"--chunk-sizes 100", 2},
      {"--chunk-sizes 4K,x", 2},
      {"--chunk-sizes 1G", 2},
      {"--chunk-sizes 4K --chunk-elements 32", 2},
      {"--link-gbps -1", 2},
      {"-b 4K --factors 2", 2},
      {"--model bert-base --rows 0", 2},
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

}  // namespace zerocompute_test
}  // namespace phub
