#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/zerocompute/options.h"
#include "transport/error.h"

namespace phub {
namespace zerocompute_options_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ZerocomputeOptions parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "zerocompute");
  return *parse_zerocompute_options(static_cast<int>(arguments.size()), arguments.data());
}

std::string refusal(std::vector<const char*> arguments) {
  try {
    parse(std::move(arguments));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalid);
    return error.what();
  }
  return "accepted";
}

TEST(OptionsTest, Sizes) {
  EXPECT_EQ(parse_size("4096"), 4096u);
  EXPECT_EQ(parse_size("4K"), 4096u);
  EXPECT_EQ(parse_size("1.5M"), 1572864u);
  EXPECT_EQ(parse_size("2GiB"), 2ull << 30);
  EXPECT_EQ(parse_size("16KB"), 16384u);
  for (const char* bad : {"", "K", "4X", "-1", "0", "4 K", "1e99", "0.3", "nan", "4KK"}) {
    EXPECT_THROW(parse_size(bad), Error) << bad;
  }
}

TEST(OptionsTest, Sweep) {
  EXPECT_THAT(sweep_sizes(4, 64, 4), ElementsAre(4, 16, 64));
  EXPECT_THAT(sweep_sizes(8, 40, 2), ElementsAre(8, 16, 32));
  EXPECT_THAT(sweep_sizes(8, 8, 2), ElementsAre(8));
  // Whole elements, and always further on.
  EXPECT_THAT(sweep_sizes(4, 20, 1.5), ElementsAre(4, 8, 12, 16));
  EXPECT_THROW(sweep_sizes(8, 4, 2), Error);
  EXPECT_THROW(sweep_sizes(4, 8, 1), Error);
  EXPECT_THROW(sweep_sizes(4, 1ull << 40, 1.0000001), Error);
}

TEST(OptionsTest, SweepMakesModelsOfThatManyBytes) {
  const ZerocomputeOptions options = parse({"-b", "4K", "-e", "16K", "-f", "2", "--dtype", "bf16"});
  ASSERT_EQ(options.models.size(), 3u);
  EXPECT_EQ(options.models[0].name, "4 KiB");
  EXPECT_EQ(total_elements(options.models[0]), 2048u);
  EXPECT_EQ(total_elements(options.models[2]), 8192u);
}

TEST(OptionsTest, ListsOfModelsAndWorkers) {
  const ZerocomputeOptions options =
      parse({"--model", "resnet50,vgg19", "--model", "alexnet", "--workers", "2,8"});
  ASSERT_EQ(options.models.size(), 3u);
  EXPECT_EQ(options.models[1].name, "vgg19");
  EXPECT_THAT(options.workers, ElementsAre(2, 8));
}

TEST(OptionsTest, Defaults) {
  const ZerocomputeOptions options = parse({});
  ASSERT_EQ(options.models.size(), 1u);
  EXPECT_EQ(options.models[0].name, "resnet50");
  EXPECT_THAT(options.workers, ElementsAre(4));
  EXPECT_EQ(options.optimizer, kernels::Optimizer::kNesterov);
  EXPECT_TRUE(options.sum && options.optimize && options.limit && options.copy.empty());
}

TEST(OptionsTest, WithoutTheSumThereIsNothingToOptimize) {
  EXPECT_FALSE(parse({"--no-sum"}).optimize);
  EXPECT_FALSE(parse({"--no-sum"}).sum);
  EXPECT_TRUE(parse({"--no-optimize"}).sum);
}

TEST(OptionsTest, MatricesAreSentAsFactorsOrRows) {
  const ZerocomputeOptions options =
      parse({"--model", "alexnet", "--factors", "7", "--rows", "classifier.6*=5,*4.weight=99999"});
  EXPECT_EQ(options.factors, "7");
  EXPECT_EQ(options.rows, "classifier.6*=5,*4.weight=99999");
  EXPECT_FALSE(options.limit);
  for (const KeySpec& key : options.models[0].keys) {
    const bool has_rows = key.name == "classifier.6.weight" || key.name == "classifier.4.weight";
    const bool has_factors = key.name == "classifier.1.weight";
    EXPECT_EQ(is_rows(key), has_rows) << key.name;
    EXPECT_EQ(is_factors(key), has_factors) << key.name;
    EXPECT_EQ(key.rank_limit, has_factors ? 7u : 0u) << key.name;
    if (has_rows) EXPECT_EQ(key.rows_limit, key.name[11] == '6' ? 5u : 4096u) << "of all its rows";
  }
}

TEST(OptionsTest, EmbeddingsAreFoundByTheirNames) {
  const ZerocomputeOptions options =
      parse({"--model", "bert-base,gpt2", "--factors", "8", "--rows", "600"});
  size_t rows = 0;
  for (const KeyTable& table : options.models) {
    for (const KeySpec& key : table.keys) {
      if (key.shape.size() != 2) {
        EXPECT_FALSE(is_compact(key)) << key.name;
        continue;
      }
      EXPECT_TRUE(is_compact(key)) << key.name;
      EXPECT_EQ(key.rank_limit, is_rows(key) ? 0u : 8u) << key.name;
      EXPECT_EQ(key.rows_limit, is_rows(key) ? std::min<uint64_t>(600, key.shape[0]) : 0u);
      rows += is_rows(key) ? 1 : 0;
    }
  }
  EXPECT_EQ(rows, 5u);  // words, positions and types of BERT's; words and positions of GPT-2's
}

// What a launcher puts into the environment, for the time of one test.
class LauncherTest : public ::testing::Test {
 protected:
  void set(const char* name, const char* value) { setenv(name, value, 1); }
  void SetUp() override { TearDown(); }
  void TearDown() override {
    for (const char* name : {"RANK", "WORLD_SIZE", "PHUB_SERVER", "PHUB_JOB", "SLURM_PROCID",
                             "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}) {
      unsetenv(name);
    }
  }
};

TEST_F(LauncherTest, OneRankIsTheEnvironments) {
  set("RANK", "2");
  set("WORLD_SIZE", "5");
  set("PHUB_SERVER", "box:1");
  const ZerocomputeOptions options = parse({"--one-rank"});
  EXPECT_TRUE(options.one_rank);
  EXPECT_EQ(options.rank, 2u);
  EXPECT_THAT(options.workers, ElementsAre(5));
  EXPECT_EQ(options.server, "box:1");
  EXPECT_EQ(options.job, "zerocompute");
  EXPECT_GT(options.rounds, 0u);
  EXPECT_FALSE(options.limit);
  set("PHUB_JOB", "tuesday");
  EXPECT_EQ(parse({"--one-rank", "--server", "other:2"}).server, "other:2");
  EXPECT_EQ(parse({"--one-rank"}).job, "tuesday");
}

TEST_F(LauncherTest, OneRankRefusesWhatItCannotKnow) {
  EXPECT_THAT(refusal({"--one-rank", "--server", "a:1"}), HasSubstr("RANK and WORLD_SIZE"));
  set("RANK", "5");
  set("WORLD_SIZE", "5");
  EXPECT_THAT(refusal({"--one-rank", "--server", "a:1"}), HasSubstr("RANK=5"));
  set("RANK", "4");
  EXPECT_THAT(refusal({"--one-rank"}), HasSubstr("--server HOST:PORT or PHUB_SERVER"));
  EXPECT_THAT(refusal({"--one-rank", "--server", "a:1", "-D", "3"}), HasSubstr("-D"));
  EXPECT_THAT(refusal({"--one-rank", "--server", "a:1", "--workers", "5"}), HasSubstr("--workers"));
  EXPECT_THAT(refusal({"--one-rank", "--server", "a:1", "--jobs", "2"}), HasSubstr("--jobs"));
}

TEST(OptionsTest, BadInputIsNamed) {
  EXPECT_THAT(refusal({"--model", "resnet5000"}), HasSubstr("resnet5000"));
  EXPECT_THAT(refusal({"--model", "/no/such.json"}), HasSubstr("/no/such.json"));
  EXPECT_THAT(refusal({"--dtype", "f64"}), HasSubstr("'f64' is not f32, bf16 or f16"));
  EXPECT_THAT(refusal({"--dtype", "int8"}), HasSubstr("'int8' is not f32, bf16 or f16"));
  EXPECT_THAT(refusal({"--format", "f64"}), HasSubstr("'f64' is not one of f32, bf16"));
  EXPECT_THAT(refusal({"--results", "bf16"}), HasSubstr("'bf16' is not one of fp8-e4m3"));
  EXPECT_THAT(refusal({"--results", "int8", "--dtype", "bf16"}), HasSubstr("added in f32"));
  EXPECT_THAT(refusal({"--results", "int8", "--no-optimize"}), HasSubstr("--no-optimize"));
  EXPECT_THAT(refusal({"--results", "int8", "--optimizer", "none"}), HasSubstr("optimizer"));
  EXPECT_THAT(refusal({"--factors", "0"}), HasSubstr("--factors: 0 is not between 1 and 1048575"));
  EXPECT_THAT(refusal({"--rows", "fc*=x"}), HasSubstr("'x' is not a number"));
  EXPECT_THAT(refusal({"--rows", "10"}),
              HasSubstr("--rows: model 'resnet50' has no matrix that is not sent otherwise whose "
                        "name is as *emb* or *wte* or *wpe*"));
  EXPECT_THAT(refusal({"--factors", "conv1*=3"}), HasSubstr("whose name is as conv1*"));
  EXPECT_THAT(refusal({"-b", "4K", "--factors", "3"}), HasSubstr("model '4 KiB' has no matrix"));
  EXPECT_THAT(refusal({"--factors", "65537", "--workers", "2,4"}),
              HasSubstr("65537 of each of 4 workers are more than 262144"));
  EXPECT_THAT(refusal({"--optimizer", "magic"}), HasSubstr("magic"));
  EXPECT_THAT(refusal({"--workers", "0"}), HasSubstr("--workers: 0"));
  EXPECT_THAT(refusal({"--workers", "4x"}), HasSubstr("'4x' is not a number"));
  EXPECT_THAT(refusal({"--workers", "-1"}), HasSubstr("-1"));
  EXPECT_THAT(refusal({"--jobs", "0"}), HasSubstr("--jobs: 0"));
  EXPECT_THAT(refusal({"-D", "0"}), HasSubstr("-D"));
  EXPECT_THAT(refusal({"--workers", "4,5", "--groups", "2,2"}), HasSubstr("groups"));
  EXPECT_THAT(refusal({"--groups", "2,x"}), HasSubstr("groups"));
  EXPECT_THAT(refusal({"-n", "many"}), HasSubstr("many"));
  EXPECT_THAT(refusal({"-w", "-1"}), HasSubstr("-w"));
  EXPECT_THAT(refusal({"-n", "-1"}), HasSubstr("-n"));
  EXPECT_THAT(refusal({"-n", "5", "-D", "1"}), HasSubstr("excludes"));
  EXPECT_THAT(refusal({"-e", "4K"}), HasSubstr("-b"));
  EXPECT_THAT(refusal({"-b", "6", "--dtype", "f32"}), HasSubstr("6 bytes"));
  EXPECT_THAT(refusal({"-b", "4K", "-f", "x"}), HasSubstr("'x' is not a number"));
  EXPECT_THAT(refusal({"--colour"}), HasSubstr("--colour"));
  EXPECT_THAT(refusal({"--server", "a:1", "--serve-args", "x"}), HasSubstr("--serve-args"));
  EXPECT_THAT(refusal({"--serve-args", "--cores '1"}), HasSubstr("--serve-args: the quote ' does"));
}

// As /bin/sh parts them.
TEST(OptionsTest, ArgumentsOfTheServerAreWordsOfAShell) {
  const auto words = [](const std::string& text) { return shell_words(text, "--serve-args"); };
  EXPECT_THAT(words("  "), ElementsAre());
  EXPECT_THAT(words(" --cores  1\t--pin\nfalse "), ElementsAre("--cores", "1", "--pin", "false"));
  EXPECT_THAT(words("--tls-cert '/my box/a.pem'"), ElementsAre("--tls-cert", "/my box/a.pem"));
  EXPECT_THAT(words("--a=\"x y\"z --b ''"), ElementsAre("--a=x yz", "--b", ""));
  EXPECT_THAT(words(R"(x\ y "it's" 'a"b' "a\"b\\c\d" 'a\b' \\)"),
              ElementsAre("x y", "it's", "a\"b", "a\"b\\c\\d", "a\\b", "\\"));
  for (const std::string text : {"'a", "a \"b", "'a\""}) {
    EXPECT_THROW(words(text), Error) << text;
  }
}

}  // namespace zerocompute_options_test
}  // namespace phub
