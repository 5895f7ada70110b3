// Names, safetensors headers, manifests, checksums: what is written, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "phub/checkpoint/crc32c.h"
#include "tests/phub/checkpoint_rig.h"
#include "tests/seeds.h"

namespace phub::testing {
namespace checkpoint_format_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class F>
std::string error_of(F&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::kInvalid || error.code() == ErrorCode::kFull);
    return error.what();
  }
  return "no error";
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// A bit at a time, as the definition has it.
uint32_t crc_by_bits(std::span<const std::byte> bytes) {
  uint32_t state = ~0u;
  for (const std::byte byte : bytes) {
    state ^= std::to_integer<uint32_t>(byte);
    for (int i = 0; i < 8; ++i) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82f63b78 : 0);
  }
  return ~state;
}

TEST(Crc32c, KnowsTheTestVectors) {
  EXPECT_EQ(crc32c(0, as_bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c(0, {}), 0u);
  EXPECT_EQ(crc32c(0, std::vector<std::byte>(32)), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(0, std::vector<std::byte>(32, std::byte{0xff})), 0x62a8ab43u);
}

TEST(Crc32c, IsTheSameInEveryWay) {
  const Seeds seeds = fresh_seeds(40);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(fmt::format("PHUB_SEED={}", seed));
    std::mt19937_64 random(seed);
    const std::vector<std::byte> bytes = bytes_for(seed, random() % 40'000);
    const std::span<const std::byte> some =
        std::span(bytes).subspan(bytes.size() / 40'000 + random() % 8 % (bytes.size() + 1));
    const uint32_t expected = crc_by_bits(some);
    EXPECT_EQ(crc32c(0, some), expected);
    EXPECT_EQ(crc32c_by_table(0, some), expected);
    const size_t cut = random() % (some.size() + 1);
    EXPECT_EQ(crc32c(crc32c(0, some.first(cut)), some.subspan(cut)), expected);
  }
}

TEST(CheckpointNames, EncodeWhatFoldersCannotBe) {
  EXPECT_EQ(encode_name("Resnet-50_v2"), "Resnet-50_v2");
  EXPECT_EQ(encode_name("."), "%2E");
  EXPECT_EQ(encode_name(".."), "%2E%2E");
  EXPECT_EQ(encode_name("../../etc/passwd"), "%2E%2E%2F%2E%2E%2Fetc%2Fpasswd");
  EXPECT_EQ(encode_name(std::string("a\0\n\x7f%", 5)), "a%00%0A%7F%25");
  EXPECT_EQ(encode_name("ü"), "%C3%BC");
  EXPECT_EQ(encode_name(std::string(255, 'a')).size(), 255u);
  EXPECT_THAT(error_of([] { encode_name(std::string(256, 'a')); }), HasSubstr("too long"));
  EXPECT_THAT(error_of([] { encode_name(std::string(86, '.')); }), HasSubstr("too long"));
  EXPECT_THAT(error_of([] { encode_name(""); }), HasSubstr("empty"));
}

TEST(CheckpointNames, AreDecodedOnlyInTheirOwnForm) {
  for (const std::string name : {".", "..", "a/b", "%", "%2E", "ü", "a b"}) {
    EXPECT_EQ(decode_name(encode_name(name)), name);
  }
  for (const std::string encoded :
       {"", ".", "..", "a.b", "%", "%2", "%2e", "%zz", "%-1", "%41", "a/b", "%2E%", "a b"}) {
    EXPECT_EQ(decode_name(encoded), std::nullopt) << encoded;
  }
  EXPECT_EQ(decode_name(std::string(255, '.')), std::nullopt);
  EXPECT_EQ(decode_name(std::string(256, 'a')), std::nullopt);
}

TEST(CheckpointNames, OfFoldersAndParts) {
  EXPECT_EQ(folder_name({.epoch = 4, .round = 123}), "round-000000000123.epoch-4");
  const CheckpointId last{.epoch = ~uint64_t{0}, .round = ~uint64_t{0}};
  EXPECT_EQ(parse_folder_name(folder_name(last)), last);
  for (const std::string name :
       {"round-123.epoch-4", "round-000000000123", "round-000000000123.epoch-",
        "round-000000000123.epoch-04", "round-000000000123.epoch-4x", "round--00000000123.epoch-4",
        "writing-round-000000000123.epoch-4"}) {
    EXPECT_EQ(parse_folder_name(name), std::nullopt) << name;
  }
  EXPECT_EQ(part_name(7, "a.b"), "rank-7/a%2Eb");
  EXPECT_EQ(parse_part_name("rank-7/a%2Eb")->name, "a.b");
  for (const std::string name : {"rank-07/a", "rank-7/", "rank-7", "rank-7/..", "rank-99999999/a",
                                 "rank-7/a/b", "/rank-7/a", "rank--1/a"}) {
    EXPECT_EQ(parse_part_name(name), std::nullopt) << name;
  }
  for (const std::string name : {"../x.safetensors", "/x.safetensors", "a/b.safetensors",
                                 "manifest.json", ".safetensors", "x", "..", ""}) {
    EXPECT_THAT(error_of([&] { check_file_name(name); }), HasSubstr("not the name")) << name;
  }
  check_file_name(kParametersFile);
  check_file_name(state_file("exp_avg"));
}

TEST(Safetensors, HeadersAreAsTheFormatSays) {
  const std::string header = make_tensor_header(
      {{"b", TensorType::kF32, {2, 3}}, {"a", TensorType::kBF16, {5}}}, {{"format", "pt"}});
  ASSERT_EQ(header.size() % 8, 0u);
  EXPECT_EQ(tensor_header_bytes(as_bytes(header).first<8>(), 1000), header.size() - 8);
  const auto json = nlohmann::json::parse(header.substr(8));
  EXPECT_EQ(json, nlohmann::json::parse(R"({"__metadata__": {"format": "pt"},
    "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "a": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]}})"));
  const TensorTable table = parse_tensor_header(header.substr(8), header.size() + 34);
  EXPECT_THAT(table.tensors, ElementsAre(TensorInfo{"b", TensorType::kF32, {2, 3}},
                                         TensorInfo{"a", TensorType::kBF16, {5}}));
  EXPECT_THAT(table.offsets, ElementsAre(header.size(), header.size() + 24, header.size() + 34));
}

TEST(Safetensors, RefusesHeadersThatLie) {
  const auto refusal = [](const std::string& header, uint64_t data_bytes) {
    return error_of([&] { parse_tensor_header(header, 8 + header.size() + data_bytes); });
  };
  const auto tensor = [](const std::string& name, const std::string& shape, uint64_t begin,
                         uint64_t end) {
    return fmt::format(R"("{}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}})", name, shape,
                       begin, end);
  };
  const std::string a = tensor("a", "2", 0, 8);
  EXPECT_EQ(refusal("{" + a + "}", 8), "no error");
  EXPECT_EQ(refusal("{" + tensor("b", "1", 8, 12) + "," + a + "}  ", 12), "no error");
  EXPECT_EQ(refusal("{" + tensor("z", "0,99999999999", 0, 0) + "," + a + "}", 8), "no error");
  EXPECT_EQ(refusal("{}", 0), "no error");
  EXPECT_THAT(refusal("{" + a + "}", 9), HasSubstr("1 bytes behind the last"));
  EXPECT_THAT(refusal("{" + a + "}", 7), HasSubstr("ends at byte 8 of 7"));
  EXPECT_THAT(refusal("{}", 1), HasSubstr("behind the last"));
  EXPECT_THAT(refusal("{" + a + "," + tensor("b", "1", 4, 8) + "}", 8),
              HasSubstr("begins at byte 4"));
  EXPECT_THAT(refusal("{" + a + "," + tensor("b", "1", 9, 13) + "}", 13),
              HasSubstr("begins at byte 9"));
  EXPECT_THAT(refusal("{" + a + "," + tensor("a", "1", 8, 12) + "}", 12), HasSubstr("given twice"));
  EXPECT_THAT(refusal("{" + tensor("a", "3", 0, 8) + "}", 8), HasSubstr("take 12"));
  EXPECT_THAT(refusal("{" + tensor("a", "2", 8, 0) + "}", 8), HasSubstr("begins at byte 8"));
  EXPECT_THAT(refusal("{" + tensor("a", "4294967296,4294967296", 0, 0) + "}", 0),
              HasSubstr("too many elements"));
  EXPECT_THAT(refusal("{" + tensor("a", "4611686018427387905", 0, 4) + "}", 4),
              HasSubstr("too many elements"));
  EXPECT_THAT(refusal("{" + tensor("a", "-2", 0, 8) + "}", 8), HasSubstr("shape[0]"));
  EXPECT_THAT(refusal("{" + tensor("", "2", 0, 8) + "}", 8), HasSubstr("name must have"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F31","shape":[],"data_offsets":[0,4]}})", 4),
              HasSubstr("one of BOOL"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4,8]}})", 4),
              HasSubstr("data_offsets"));
  EXPECT_THAT(refusal(R"({"a":{"shape":[],"data_offsets":[0,4]}})", 4), HasSubstr("missing"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"a":1}})", 0), HasSubstr("must be a string"));
  EXPECT_THAT(refusal("{\"\xff\":{}}", 0), HasSubstr("malformed"));
  EXPECT_THAT(refusal(" {}", 0), HasSubstr("must begin"));
  EXPECT_THAT(refusal("[]", 0), HasSubstr("must begin"));
  EXPECT_THAT(refusal("{" + a, 8), HasSubstr("malformed"));
  EXPECT_THAT(refusal("", 0), HasSubstr("must begin"));

  const auto length = [](uint64_t length, uint64_t file_bytes) {
    std::array<std::byte, 8> begin;
    for (size_t i = 0; i < 8; ++i) begin[i] = static_cast<std::byte>(length >> 8 * i);
    return error_of([&] { tensor_header_bytes(begin, file_bytes); });
  };
  EXPECT_EQ(length(92, 100), "no error");
  EXPECT_THAT(length(93, 100), HasSubstr("93 bytes in a file of 100"));
  EXPECT_THAT(length(kMaxHeaderBytes + 1, uint64_t{1} << 40), HasSubstr("at most 100000000"));
  EXPECT_THAT(length(~uint64_t{0}, 100), HasSubstr("in a file of 100"));
  EXPECT_THAT(length(0, 3), "no error");  // refused when its 8 bytes are read
}

TEST(Safetensors, WritesNoHeaderThatOthersRefuse) {
  const auto refusal = [](const std::vector<TensorInfo>& tensors) {
    return error_of([&] { make_tensor_header(tensors, {}); });
  };
  EXPECT_THAT(refusal({{"__metadata__", TensorType::kF32, {1}}}), HasSubstr("use that name"));
  EXPECT_THAT(refusal({{"a", TensorType::kF32, {1}}, {"a", TensorType::kF32, {1}}}),
              HasSubstr("twice"));
  EXPECT_THAT(refusal({{"", TensorType::kF32, {1}}}), HasSubstr("1 to 4096 bytes"));
  EXPECT_THAT(refusal({{"\xff", TensorType::kF32, {1}}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(refusal({{"a", TensorType::kF64, {uint64_t{1} << 61}}}), HasSubstr("too many"));
}

TEST(Manifest, ComesBackAsItWas) {
  Manifest manifest = Content{.round = 12, .epoch = 3}.manifest();
  manifest.files = {{"parameters.safetensors", (1 << 20) + 1, {7, 0xffffffff}},
                    {"rank-3/%2E%2E", 0, {}}};
  EXPECT_EQ(parse_manifest(manifest_text(manifest)), manifest);
}

// Puts other text into a manifest, with a checksum that fits it.
std::string changed(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const std::string covered = text.substr(std::string_view(R"({"checksum":"00000000",)").size());
  return fmt::format(R"({{"checksum":"{:08x}",)", crc32c(0, as_bytes(covered))) + covered;
}

TEST(Manifest, RefusesWhatDoesNotFit) {
  Manifest manifest = Content{.round = 12}.manifest();
  manifest.files = {{"parameters.safetensors", (1 << 20) + 1, {7, 8}}, {"rank-3/a", 1, {9}}};
  const std::string text = manifest_text(manifest);
  const auto refusal = [&](std::string_view from, std::string_view to) {
    return error_of([&] { parse_manifest(changed(text, from, to)); });
  };
  EXPECT_EQ(refusal("rank-3/a", "rank-3/b"), "no error");
  const auto version = [](uint32_t number) { return fmt::format("\"version\":{}", number); };
  EXPECT_THAT(refusal(version(kManifestVersion), version(kManifestVersion + 1)),
              HasSubstr("a newer phub wrote it"));
  EXPECT_THAT(refusal(version(kManifestVersion), version(0)), HasSubstr("positive"));
  EXPECT_THAT(refusal("rank-3/a", "../../a"), HasSubstr("not the name of a file"));
  EXPECT_THAT(refusal("rank-3/a", "parameters.safetensors"), HasSubstr("twice"));
  EXPECT_THAT(refusal("[7,8]", "[7]"), HasSubstr("it needs 2"));
  EXPECT_THAT(refusal("1048577", "18446744073709551615"), HasSubstr("it needs 17592186044416"));
  EXPECT_THAT(refusal("\"round\":12", "\"round\":12,\"round\":13"), HasSubstr("given twice"));
  EXPECT_THAT(refusal("\"round\":12,", ""), HasSubstr("\"round\" is missing"));
  EXPECT_THAT(refusal("[10,7]", "[10,8]"), HasSubstr("the product of [10, 8]"));
  EXPECT_THAT(refusal("\"epoch\":1", "\"epoch\":0"), HasSubstr("epoch"));
  EXPECT_THAT(refusal("\"world_size\":2", "\"world_size\":99999"), HasSubstr("world_size"));
  EXPECT_THAT(refusal("}\n", "}"), HasSubstr("the end is missing"));
  EXPECT_THAT(error_of([&] { parse_manifest(text.substr(0, 15)); }), HasSubstr("missing"));
  EXPECT_THAT(error_of([&] { parse_manifest(""); }), HasSubstr("not in the form"));
  std::string flipped = text;
  flipped[text.size() / 2] ^= 1;
  EXPECT_THAT(error_of([&] { parse_manifest(flipped); }), HasSubstr("it was damaged"));
}

}  // namespace checkpoint_format_test
}  // namespace phub::testing
