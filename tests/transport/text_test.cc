#include "transport/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/seeds.h"
#include "transport/error.h"
#include "transport/variables.h"

namespace phub {
namespace text_test {

TEST(HostPort, Forms) {
  const auto parsed = [](std::string_view text) {
    const HostPort address = parse_host_port(text);
    return address.host + "|" + std::to_string(address.port);
  };
  EXPECT_EQ(parsed("127.0.0.1:7717"), "127.0.0.1|7717");
  EXPECT_EQ(parsed("box.example:0"), "box.example|0");
  EXPECT_EQ(parsed("[::1]:65535"), "::1|65535");
  EXPECT_EQ(parsed(":80"), "|80");
  EXPECT_EQ(parsed("*:80"), "|80");
  for (const char* text :
       {"", "x", "x:", "x:65536", "x:-1", "x:+1", "x:1 ", "x:8o", "::1:80", "[::1:80", "::1]:80",
        "[]:80", "a b:1", "a/b:1", "user@x:1", "x:99999999"}) {
    EXPECT_THROW(parse_host_port(text), Error) << text;
  }
  EXPECT_EQ(format_host_port("::1", 5), "[::1]:5");
  EXPECT_EQ(format_host_port("10.0.0.1", 5), "10.0.0.1:5");
}

TEST(Nearest, FindsMisspeltWordsOnly) {
  const std::vector<std::string_view> words = {"listen", "cores", "memory_limit"};
  EXPECT_EQ(nearest("lissten", words), "listen");
  EXPECT_EQ(nearest("core", words), "cores");
  EXPECT_EQ(nearest("memry_limt", words), "memory_limit");
  EXPECT_EQ(nearest("password", words), "");
  EXPECT_EQ(nearest("", words), "");
  EXPECT_EQ(nearest(std::string(100000, 'x'), words), "");
}

TEST(Variables, OnlyThoseThatResembleAKnownOneAreMisspelt) {
  const auto lines = [](std::vector<const char*> environment) {
    environment.push_back(nullptr);
    return misspelt_variables(environment.data());
  };
  EXPECT_THAT(lines({"PHUB_WORLDSIZE=4", "PHUB_RANK=0", "PHUB_TRANSPROT=tcp", "PHUB_CHECKPOINT="}),
              ::testing::ElementsAre(
                  "PHUB_WORLDSIZE is set, and phub does not read it: PHUB_WORLD_SIZE?",
                  "PHUB_TRANSPROT is set, and phub does not read it: PHUB_TRANSPORT?",
                  "PHUB_CHECKPOINT is set, and phub does not read it: PHUB_CHECKPOINTS?"));
  // A user's own, and those that Kubernetes sets for a service called phub.
  EXPECT_THAT(lines({"PHUB_MODEL=resnet50", "WORLDSIZE=4", "PHUB_SERVICE_HOST=10.0.0.1", "PHUB_",
                     "PHUB_SERVICE_PORT=7717", "PHUB_PORT_7717_TCP_ADDR=10.0.0.1", "PHUB_PORT=x"}),
              ::testing::IsEmpty());
}

TEST(Escaped, ShowsWhatATerminalWouldObey) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"conv1.weight", "conv1.weight"},
      {"größe/слой/层/🙂", "größe/слой/层/🙂"},
      {"a\x1b[1m\n", "a\\u001b[1m\\u000a"},
      {std::string("\0\x1f\x7f", 3), "\\u0000\\u001f\\u007f"},
      {"\xc2\x80\xc2\x9b"
       "31m\xc2\x9f\xc2\xa0",
       "\\u0080\\u009b31m\\u009f\xc2\xa0"},                             // C1
      {"\xe2\x80\xaetxt.exe\xe2\x80\xac", "\\u202etxt.exe\\u202c"},     // override
      {"\xe2\x81\xa6x\xe2\x81\xa9\xd8\x9c", "\\u2066x\\u2069\\u061c"},  // isolates, mark
      {"a\xe2\x80\x8b"
       "b\xef\xbb\xbf",
       "a\\u200bb\\ufeff"},                                 // without width
      {"\xe2\x80\xa8\xf3\xa0\x81\x81", "\\u2028\\ue0041"},  // separator, tag
      // Not UTF-8: a lone byte, a torn character, one that is too long, a surrogate, too high.
      {"\x9b"
       "31m",
       "\\x9b31m"},
      {"\xe2\x80", "\\xe2\\x80"},
      {"\xc0\x9b", "\\xc0\\x9b"},
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},
      {"\xff", "\\xff"},
  };
  for (const auto& [text, shown] : cases) EXPECT_EQ(escaped(text), shown);
}

TEST(Escaped, LeavesNoControlCharacterWhateverComes) {
  const uint64_t seed = testing::fresh_seeds(1).first;
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20'000; ++i) {
    std::string text(random() % 12, ' ');
    for (char& c : text) c = static_cast<char>(random());
    const std::string shown = escaped(text);
    for (const unsigned char c : shown) ASSERT_TRUE(c >= 0x20 && c != 0x7f) << "seed " << seed;
    ASSERT_EQ(escaped(shown), shown) << "seed " << seed;
  }
}

TEST(Printable, IsOneShortLine) {
  EXPECT_EQ(printable("a\nb"), "a\\u000ab");
  EXPECT_EQ(printable(std::string(1000, 'x')), std::string(80, 'x') + "… (1000 bytes)");
  EXPECT_EQ(printable(std::string(79, 'x') + "ö" + "y"), std::string(79, 'x') + "… (82 bytes)");
  EXPECT_EQ(printable(std::string(100, '\x80')).substr(0, 8), "\\x80\\x80");
}

}  // namespace text_test
}  // namespace phub
