#include "transport/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/error.h"

namespace phub {
namespace {

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

TEST(Printable, HidesControlCharactersAndCuts) {
  EXPECT_EQ(printable("a\x1b[1m\n"), "a?[1m?");
  EXPECT_LT(printable(std::string(1000, 'x')).size(), 120u);
}

}  // namespace
}  // namespace phub
