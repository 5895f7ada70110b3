#include "phub/plan/models.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <set>

#include "tests/worker/expect_error.h"

namespace phub {
namespace models_test {

using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& body) {
  return testing::error_of(ErrorCode::kInvalid, body);
}

uint64_t elements_of(const KeyTable& table, std::string_view name) {
  for (const KeySpec& key : table.keys) {
    if (key.name == name) return key.elements;
  }
  ADD_FAILURE() << table.name << " has no key " << name;
  return 0;
}

// The totals that the libraries themselves publish: torchvision's `num_params` of the weights that
// come with each network (docs.pytorch.org/vision, models), the numbers of parameters of
// bert-base-uncased and bert-large-uncased (with pooler) and of gpt2 and gpt2-xl (head tied to the
// word embedding) at Hugging Face and in Keras' hub of models.
TEST(Models, HaveThePublishedTotals) {
  const struct {
    std::string_view name;
    size_t keys;
    uint64_t elements;
  } expected[] = {
      {"alexnet", 16, 61'100'840},     {"vgg11", 22, 132'863'336},
      {"vgg16", 32, 138'357'544},      {"vgg19", 38, 143'667'240},
      {"googlenet", 173, 6'624'904},   {"inception_v3", 292, 27'161'264},
      {"resnet18", 62, 11'689'512},    {"resnet50", 161, 25'557'032},
      {"resnet101", 314, 44'549'160},  {"resnext101_32x8d", 314, 88'791'336},
      {"bert-base", 199, 109'482'240}, {"bert-large", 391, 335'141'888},
      {"gpt2", 148, 124'439'808},      {"gpt2-xl", 580, 1'557'611'200},
  };
  EXPECT_EQ(model_names().size(), std::size(expected) + 2) << "and those of 269 layers";
  for (const auto& [name, keys, elements] : expected) {
    const KeyTable table = model(name);
    EXPECT_EQ(table.name, name);
    EXPECT_EQ(table.keys.size(), keys) << name;
    EXPECT_EQ(total_elements(table), elements) << name;
  }
}

// torchvision has neither, so nobody publishes their totals: they were counted apart from the code,
// by the formula of a bottleneck block, for stages of 3, 30, 48 and 8 blocks. Three convolutions
// per block, the stem and the last layer are the 269.
TEST(Models, Those269HaveTheLayersOfTheirNames) {
  const struct {
    std::string_view name;
    uint64_t elements;
  } expected[] = {{"resnet269", 102'073'384}, {"resnext269_32x4d", 102'172'968}};
  for (const auto& [name, elements] : expected) {
    const KeyTable table = model(name);
    const auto layers = std::count_if(table.keys.begin(), table.keys.end(), [](const KeySpec& key) {
      return (key.name.find("conv") != std::string::npos && key.name.ends_with(".weight")) ||
             key.name == "fc.weight";
    });
    EXPECT_EQ(layers, 269) << name;
    EXPECT_EQ(total_elements(table), elements) << name;
  }
}

TEST(Models, HaveDistinctKeysOfSomeSize) {
  for (std::string_view name : model_names()) {
    std::set<std::string> names;
    for (const KeySpec& key : model(name).keys) {
      EXPECT_TRUE(names.insert(key.name).second) << name << " " << key.name;
      EXPECT_GT(key.elements, 0u) << name << " " << key.name;
    }
  }
}

// As torchvision's and Hugging Face's named_parameters() have them.
TEST(Models, HaveTheNamesOfTheLibraries) {
  const KeyTable resnet = model("resnet50");
  EXPECT_EQ(resnet.keys[0].name, "conv1.weight");
  EXPECT_EQ(resnet.keys[12].name, "layer1.0.downsample.0.weight");
  EXPECT_EQ(resnet.keys.back().name, "fc.bias");
  EXPECT_EQ(elements_of(resnet, "conv1.weight"), 64u * 3 * 7 * 7);
  EXPECT_EQ(elements_of(resnet, "layer3.5.bn3.bias"), 1024u);
  EXPECT_EQ(elements_of(resnet, "layer4.0.conv2.weight"), 512u * 512 * 3 * 3);
  EXPECT_EQ(elements_of(resnet, "layer4.0.downsample.0.weight"), 2048u * 1024);
  EXPECT_EQ(elements_of(resnet, "fc.weight"), 2048u * 1000);

  EXPECT_EQ(elements_of(model("alexnet"), "features.10.weight"), 256u * 256 * 3 * 3);
  EXPECT_EQ(elements_of(model("alexnet"), "classifier.1.weight"), 9216u * 4096);
  EXPECT_EQ(elements_of(model("vgg19"), "features.34.weight"), 512u * 512 * 3 * 3);
  EXPECT_EQ(elements_of(model("vgg19"), "features.10.weight"), 256u * 128 * 3 * 3);
  EXPECT_EQ(elements_of(model("vgg19"), "classifier.0.weight"), 25088u * 4096);

  // Groups divide what a kernel sees: 32 groups of 8 channels in the first stage, of 64 in the
  // last.
  EXPECT_EQ(elements_of(model("resnext101_32x8d"), "layer1.0.conv2.weight"), 256u * 8 * 9);
  EXPECT_EQ(elements_of(model("resnext101_32x8d"), "layer4.2.conv2.weight"), 2048u * 64 * 9);
  EXPECT_EQ(elements_of(model("resnext269_32x4d"), "layer1.0.conv2.weight"), 128u * 4 * 9);
  EXPECT_EQ(elements_of(model("resnet18"), "layer2.0.downsample.0.weight"), 128u * 64);
  EXPECT_EQ(elements_of(model("googlenet"), "inception4a.branch3.1.conv.weight"), 48u * 16 * 9);
  EXPECT_EQ(elements_of(model("inception_v3"), "Mixed_6c.branch7x7dbl_2.conv.weight"),
            160u * 160 * 7);
  EXPECT_EQ(elements_of(model("inception_v3"), "AuxLogits.conv1.conv.weight"), 768u * 128 * 25);
  EXPECT_EQ(elements_of(model("gpt2"), "transformer.h.11.attn.c_attn.weight"), 768u * 2304);
  EXPECT_EQ(elements_of(model("gpt2-xl"), "transformer.h.47.mlp.c_proj.weight"), 6400u * 1600);

  const KeyTable bert = model("bert-base");
  EXPECT_EQ(elements_of(bert, "embeddings.word_embeddings.weight"), 30522u * 768);
  EXPECT_EQ(elements_of(bert, "encoder.layer.11.intermediate.dense.weight"), 3072u * 768);
  EXPECT_EQ(elements_of(bert, "encoder.layer.0.attention.output.LayerNorm.bias"), 768u);
  EXPECT_EQ(bert.keys.back().name, "pooler.dense.bias");
}

TEST(Models, KeysHaveTheirLayersShapes) {
  for (const KeySpec& key : model("resnet50").keys) {
    EXPECT_EQ(elements_in(key.shape), key.elements) << key.name;
  }
  EXPECT_EQ(model("resnet50").keys[0].shape, (std::vector<uint64_t>{64, 3, 7, 7}));
}

TEST(Models, AnUnknownOneListsTheNames) {
  const std::string message = message_of([] { model("resnet5O"); });
  EXPECT_THAT(message, HasSubstr("unknown model 'resnet5O'"));
  EXPECT_THAT(message, HasSubstr("did you mean 'resnet50'"));
  EXPECT_THAT(message, HasSubstr("alexnet, vgg11, vgg16"));
}

TEST(KeyTable, IsParsedInAnyFieldOrder) {
  const KeyTable table = parse_key_table(
      R"({"keys": [{"elements": 12, "shape": [3, 4], "name": "é 1"},
                   {"name": "b", "elements": 1099511627764}],
          "name": "mine"})",
      "test.json");
  EXPECT_EQ(table.name, "mine");
  ASSERT_EQ(table.keys.size(), 2u);
  EXPECT_EQ(table.keys[0], (KeySpec{.name = "é 1", .elements = 12, .shape = {3, 4}}));
  EXPECT_EQ(table.keys[1].elements, kMaxElements - 12);
}

TEST(KeyTable, BadInputIsNamed) {
  const auto with_keys = [](std::string_view keys) {
    return fmt::format(R"({{"name": "m", "keys": {}}})", keys);
  };
  const struct {
    std::string json, message;
  } cases[] = {
      {"", "parse error at line 1, column 1"},
      {"{\"name\": \"m\",\n  \"keys\": [}", "line 2, column 12"},
      {with_keys(R"([{"name": "a", "elements": 1}])") + "x", "parse error"},
      {"\xff", "parse error"},
      {"[]", "must be an object, got a list"},
      {"17", "must be an object, got 17"},
      {"null", "must be an object, got null"},
      {R"({"keys": [{"name": "a", "elements": 1}]})", "\"name\" is missing"},
      {R"({"name": "m"})", "\"keys\" is missing"},
      {R"({"name": "m", "name": "n", "keys": []})", "\"name\" is given twice"},
      {R"({"name": "", "keys": []})", "name: must be a string of 1 to 255 bytes, got \"\""},
      {R"({"name": "a\nb", "keys": [{"name": "a", "elements": 1}]})", "control characters"},
      {R"({"name": 3, "keys": []})", "name: must be a string of 1 to 255 bytes, got 3"},
      {R"({"name": "m", "key": []})", "unknown field \"key\""},
      {with_keys("[]"), "keys: must have at least 1 entries"},
      {with_keys("{}"), "keys: must be a list, got an object"},
      {with_keys("7"), "keys: must be a list, got 7"},
      {with_keys("[3]"), "keys[0]: must be an object"},
      {with_keys("[[]]"), "keys[0]: must be an object"},
      {with_keys(R"([{"name": "a", "elements": 1}, {"name": "b"}])"),
       "keys[1]: field \"elements\" is missing"},
      {with_keys(R"([{"elements": 1}])"), "keys[0]: field \"name\" is missing"},
      {with_keys(R"([{"name": "", "elements": 1}])"),
       "keys[0].name: must be a string of 1 to 255 bytes, got \"\""},
      {with_keys(R"([{"name": "a\n", "elements": 1}])"),
       "keys[0].name: must not hold control characters"},
      {with_keys(fmt::format(R"([{{"name": "{}", "elements": 1}}])", std::string(256, 'n'))),
       "keys[0].name: must be a string of 1 to 255 bytes"},
      {with_keys(R"([{"name": "a", "elements": 1, "elements": 2}])"),
       "keys[0]: field \"elements\" is given twice"},
      {with_keys(R"([{"name": "a", "elements": 1}, {"name": "a", "elements": 1}])"),
       "keys[1].name: 'a' is there twice"},
      {with_keys(R"([{"name": "a", "elements": 0}])"),
       "keys[0].elements: must be a positive integer, got 0"},
      {with_keys(R"([{"name": "a", "elements": 12, "shape": [3, 5]}])"),
       "keys[0].shape: the product of [3, 5]"},
      {with_keys(R"([{"name": "a", "elements": -1}])"), "positive integer, got -1"},
      {with_keys(R"([{"name": "a", "elements": 1.5}])"), "positive integer, got 1.5"},
      {with_keys(R"([{"name": "a", "elements": 1e6}])"), "positive integer, got 1000000"},
      {with_keys(R"([{"name": "a", "elements": "1"}])"), "positive integer, got \"1\""},
      {with_keys(R"([{"name": "a", "elements": null}])"), "positive integer, got null"},
      {with_keys(R"([{"name": "a", "elements": true}])"), "positive integer, got true"},
      {with_keys(R"([{"name": "a", "elements": {}}])"), "positive integer, got an object"},
      {with_keys(R"([{"name": "a", "elements": 1099511627777}])"),
       "keys[0].elements: must be a positive integer, got 1099511627777"},
      {with_keys(R"([{"name": "a", "elements": 18446744073709551616}])"),
       "keys[0].elements: must be a positive integer"},
      {with_keys(R"([{"name": "a", "elements": 1e999}])"), "number overflow"},
      {with_keys(R"([{"name": "a", "elements": 9}, {"name": "b", "elements": 1099511627770}])"),
       "keys[1].elements: 1099511627770 brings the job over 1099511627776 elements"},
      {std::string(1'000'000, '['), "must be an object, got a list"},
      {with_keys("[" + std::string(1'000'000, '{')), "parse error"},
  };
  for (const auto& [json, message] : cases) {
    const std::string error = message_of([&text = json] { parse_key_table(text, "test.json"); });
    EXPECT_THAT(error, HasSubstr(message)) << json.substr(0, 200);
    EXPECT_THAT(error, HasSubstr("test.json: ")) << json.substr(0, 200);
    EXPECT_LT(error.size(), 600u) << "not the whole file";
  }
}

TEST(KeyTable, HasALimitedNumberOfKeys) {
  std::string json = R"({"name": "m", "keys": [)";
  for (size_t i = 0; i <= kMaxKeys; i++) {
    json += fmt::format(R"({}{{"name":"{}","elements":1}})", i == 0 ? "" : ",", i);
  }
  EXPECT_THAT(message_of([&] { parse_key_table(json + "]}", "test.json"); }),
              HasSubstr("more than 1048576 entries"));
}

TEST(KeyTable, ComesFromAFileWhenTheArgumentLooksLikeOne) {
  const std::string path = ::testing::TempDir() + "models_test_keys.json";
  std::ofstream(path) << R"({"name": "mine", "keys": [{"name": "a", "elements": 5}]})";
  EXPECT_EQ(model_or_file(path).name, "mine");
  EXPECT_EQ(model_or_file("vgg19").name, "vgg19");
  EXPECT_THAT(message_of([] { model_or_file("nowhere.json"); }),
              HasSubstr("nowhere.json: No such file"));
  EXPECT_THAT(message_of([] { model_or_file("./nowhere"); }), HasSubstr("./nowhere"));
  EXPECT_THAT(message_of([] { model_or_file(::testing::TempDir()); }), HasSubstr("directory"));
  EXPECT_THAT(message_of([] { model_or_file("nowhere"); }), HasSubstr("unknown model 'nowhere'"));
  std::remove(path.c_str());
}

}  // namespace models_test
}  // namespace phub
