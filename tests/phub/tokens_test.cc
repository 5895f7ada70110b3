// The tokens file: what it may hold, who may read it, and the comparisons that a token goes
// through.
#include "phub/control/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <random>

#include "phub/control/access.h"
#include "tests/seeds.h"
#include "tests/temporary_directory.h"
#include "tests/worker/expect_error.h"

namespace phub {
namespace tokens_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kHash(64, 'a');

std::string entry(const std::string& name, const std::string& rest = "",
                  const std::string& hash = kHash) {
  return "[[token]]\nname = \"" + name + "\"\nrole = \"train\"\nsha256 = \"" + hash + "\"\n" +
         rest + "\n";
}

std::string error_of(const std::function<void()>& act) {
  return testing::error_of(ErrorCode::kInvalid, act);
}

TEST(Sha256, IsTheOneOfTheStandard) {  // FIPS 180-2, appendix B
  EXPECT_EQ(hex_of(sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex_of(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST(SameDigest, EveryBitCounts) {
  const Digest digest = sha256("x");
  EXPECT_TRUE(same_digest(digest, digest));
  for (size_t i = 0; i < digest.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      Digest other = digest;
      other[i] = static_cast<uint8_t>(other[i] ^ 1 << bit);
      EXPECT_FALSE(same_digest(digest, other)) << i << ", " << bit;
    }
  }
}

TEST(MakeToken, IsNewEveryTime) {
  const std::string one = make_token(), two = make_token();
  EXPECT_THAT(one, ::testing::MatchesRegex("phub-[0-9a-f]{64}"));
  EXPECT_NE(one, two);
}

// The definition, word by word.
bool matches_slowly(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*') {
    return matches_slowly(pattern.substr(1), name) ||
           (!name.empty() && matches_slowly(pattern, name.substr(1)));
  }
  return !name.empty() && (pattern[0] == '?' || pattern[0] == name[0]) &&
         matches_slowly(pattern.substr(1), name.substr(1));
}

TEST(Matches, IsWhatTheDefinitionSays) {
  EXPECT_TRUE(matches("alice-*", "alice-mnist"));
  EXPECT_TRUE(matches("*", "x"));
  EXPECT_FALSE(matches("alice-*", "alice"));
  EXPECT_FALSE(matches("alice-*", "xalice-1"));
  EXPECT_FALSE(matches("alice", "alice2"));
  const uint64_t seed = testing::fresh_seeds(1).first;
  std::mt19937_64 random(seed);
  const auto word = [&](std::string_view letters, size_t most) {
    std::string text(random() % (most + 1), ' ');
    for (char& c : text) c = letters[random() % letters.size()];
    return text;
  };
  for (int i = 0; i < 100'000; ++i) {
    const std::string pattern = word("ab*?", 7), name = word("ab", 9);
    ASSERT_EQ(matches(pattern, name), matches_slowly(pattern, name))
        << "seed " << seed << ": '" << pattern << "' and '" << name << "'";
  }
  // What would take exponential time is quick.
  std::string stars;
  for (int i = 0; i < 120; ++i) stars += "*a";
  EXPECT_FALSE(matches(stars + "b", std::string(255, 'a')));
}

TEST(ParseTokens, ReadsEveryField) {
  const std::vector<Token> tokens = parse_tokens(
      "# people\n" + entry("alice", "jobs = [\"alice-*\", \"shared\"]", std::string(64, '1')) +
          "[[token]]\nname = 'root@ops'\nrole = 'admin'\nexpires = 2027-06-30T12:30:05Z\n"
          "sha256 = '" +
          std::string(62, '0') + "Ff'\n" +
          "[[token]]\nname = 'watch'\nrole = 'observe'\njobs = '?'\nexpires = 2000-01-01\n"
          "sha256 = '" +
          std::string(64, '2') + "'\n" +
          entry("offset", "expires = 1970-01-01T02:00:00+01:30", std::string(64, '3')),
      "t");
  ASSERT_EQ(tokens.size(), 4u);
  EXPECT_EQ(tokens[0].name, "alice");
  EXPECT_EQ(tokens[0].role, Role::kTrain);
  EXPECT_THAT(tokens[0].jobs, ElementsAre("alice-*", "shared"));
  EXPECT_EQ(hex_of(tokens[0].digest), std::string(64, '1'));
  EXPECT_FALSE(tokens[0].expires_s);
  EXPECT_TRUE(tokens[0].covers("shared"));
  EXPECT_FALSE(tokens[0].covers("shared2"));
  EXPECT_EQ(tokens[1].role, Role::kAdmin);
  EXPECT_THAT(tokens[1].jobs, ElementsAre("*"));
  EXPECT_EQ(hex_of(tokens[1].digest), std::string(62, '0') + "ff");
  EXPECT_EQ(tokens[1].expires_s, 1814358605);  // date -u -d 2027-06-30T12:30:05Z +%s
  EXPECT_EQ(tokens[2].role, Role::kObserve);
  EXPECT_EQ(tokens[2].expires_s, 946684800);
  EXPECT_EQ(tokens[3].expires_s, 1800);
  EXPECT_FALSE(tokens[3].expired(1799));
  EXPECT_TRUE(tokens[3].expired(1800));
  EXPECT_TRUE(parse_tokens("", "t").empty());
}

TEST(ParseTokens, ReadsQuotas) {
  const std::vector<Token> tokens =
      parse_tokens(entry("all",
                         "quota = {jobs = 0, ranks = 64, connections = 512, keys = 10000, "
                         "memory = '1.5G', checkpoints = 7, cores = 2}",
                         std::string(64, '1')) +
                       entry("some", "quota = {ranks = 3}", std::string(64, '2')) +
                       entry("none", "", std::string(64, '3')),
                   "t");
  EXPECT_EQ(tokens[0].quota, (Quota{0, 64, 512, 10'000, uint64_t{3} << 29, 7, 2}));
  EXPECT_EQ(tokens[1].quota, (Quota{.ranks = 3}));
  EXPECT_EQ(tokens[2].quota, Quota{});
  EXPECT_EQ(Quota{}.jobs, Quota::kNone);
}

TEST(ParseTokens, SaysWhatIsWrongAndWhere) {
  std::string many = entry("a", "jobs = [" + std::string());
  for (int i = 0; i < 257; ++i) many += "\"x\", ";
  many += "]";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"x = 1", "t:1:5: 'x' is not expected; each token begins with [[token]]"},
      {"[token]\nname = 'a'", "is not expected"},
      {"[[token", "t:1:"},
      {"[[token]]\nname = 'a'\n", "t:1:1: a token needs 'role'"},
      {"[[token]]\nrole = 'train'\n", "a token needs 'name'"},
      {"[[token]]\nname = 'a'\nrole = 'train'\n", "a token needs 'sha256'"},
      {entry("a", "rights = 1"), "t:5:10: a token has no 'rights'; there are name"},
      {entry(""), "name must be 1 to 64"},
      {entry("a b"), "name must be"},
      {entry("a\\u001b[31m"), "got 'a\\u001b[31m'"},
      {entry(std::string(65, 'a')), "name must be"},
      {entry("a") + entry("a", "", std::string(64, 'b')), "t:7:8: 'a' is there twice"},
      {entry("a") + entry("b"), "another entry has this token"},
      {"[[token]]\nname = 'a'\nrole = 'Train'\nsha256 = '" + kHash + "'",
       "role must be observe, train or admin, got 'Train'"},
      {entry("a", "", "phub-secret"), "sha256 must be 64 hexadecimal digits"},
      {entry("a", "", std::string(63, 'a') + "g"), "sha256 must be"},
      {entry("a", "", std::string(66, 'a')), "sha256 must be"},
      {entry("a", "jobs = []"), "jobs must be 1 to 256"},
      {many, "jobs must be 1 to 256"},
      {entry("a", "jobs = ''"), "jobs: a pattern is 1 to 255"},
      {entry("a", "jobs = '[a-z]'"), "not '[a-z]'"},
      {entry("a", "jobs = [1]"), "jobs must be a string"},
      {entry("a", "expires = 7"), "t:5:11: expires must be a date or a time"},
      {entry("a", "expires = 12:00:00"), "expires must be"},
      {entry("a", "expires = 2027-02-30"), "t:5:"},
      {entry("a", "quota = 7"), "t:5:9: quota must be a table such as {jobs = 4}"},
      {entry("a", "quota = {cpus = 7}"),
       "a quota has no 'cpus'; there are jobs, ranks, connections"},
      {entry("a", "quota = {jobs = -1}"), "jobs must be a number, or 0"},
      {entry("a", "quota = {jobs = '4'}"), "jobs must be a number"},
      {entry("a", "quota = {memory = '4X'}"), "memory must be a number of bytes such as 512M"},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_THAT(error_of([&, &text = text] { parse_tokens(text, "t"); }), HasSubstr(expected))
        << text.substr(0, 200);
  }
  EXPECT_THAT(error_of([] { parse_tokens(entry("a", "", "phub-secret"), "t"); }),
              ::testing::Not(HasSubstr("secret")));
}

class TokensFile : public ::testing::Test {
 protected:
  TokensFile() { write(entry("a")); }
  void write(const std::string& text, mode_t mode = 0600) {
    std::ofstream(path_) << text;
    chmod(path_.c_str(), mode);
  }
  const TemporaryDirectory directory_;
  const std::string folder_ = directory_.path(), path_ = folder_ + "/tokens.toml";
};

TEST_F(TokensFile, IsForItsOwnerOnly) {
  for (const mode_t mode : {0600, 0400, 0700, 0640, 0440}) {
    chmod(path_.c_str(), mode);
    EXPECT_EQ(load_tokens(path_).size(), 1u) << mode;
  }
  for (const mode_t mode : {0604, 0660, 0620, 0602, 0644, 0641, 0666}) {
    chmod(path_.c_str(), mode);
    EXPECT_THAT(error_of([&] { load_tokens(path_); }), HasSubstr("run 'chmod 600 " + path_))
        << mode;
  }
  EXPECT_THAT(error_of([&] { load_tokens(folder_); }), HasSubstr("is not a file"));
  EXPECT_THAT(error_of([&] { load_tokens("/dev/null"); }), HasSubstr("is not a file"));
  EXPECT_THAT(error_of([&] { load_tokens(folder_ + "/absent"); }), HasSubstr("No such file"));
  if (geteuid() == 0) {
    chmod(path_.c_str(), 0600);
    EXPECT_EQ(chown(path_.c_str(), 12345, 12345), 0);
    EXPECT_THAT(error_of([&] { load_tokens(path_); }), HasSubstr("belongs to user 12345"));
  }
}

TEST_F(TokensFile, AWrongOneChangesNothing) {
  Access access(path_);
  write(entry("a") + "oops");
  EXPECT_THAT(error_of([&] { access.reload(); }), HasSubstr("tokens.toml:"));
  EXPECT_EQ(access.why_not({.name = "a", .id = kHash}, "j"), "");
  write(entry("b", "", std::string(64, 'b')));
  access.reload();
  EXPECT_EQ(access.why_not({.name = "a", .id = kHash}, "j"), "the token 'a' was revoked");
}

}  // namespace tokens_test
}  // namespace phub
