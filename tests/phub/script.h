// What tests that are scripts have in common: commands on lines of their own, or between bars; a
// line that begins with '#' is a comment.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace phub::testing {

// The rest of a command, word by word.
class Words {
 public:
  explicit Words(const std::string& text) : in_(text) {}
  std::string word() {
    std::string out;
    in_ >> out;
    return out;
  }
  template <class T = uint64_t>
  T number() {  // 0 if there is none
    T out = 0;
    in_ >> out;
    in_.clear();
    return out;
  }
  uint32_t rank() { return number<uint32_t>(); }
  uint32_t incarnation() {  // behind the rank: ".2"
    in_.ignore(1);
    return number<uint32_t>();
  }
  template <class T = uint32_t>
  std::vector<T> numbers() {  // as many as there are
    std::vector<T> out;
    for (T n = 0; in_ >> n;) out.push_back(n);
    in_.clear();
    return out;
  }
  std::vector<std::string> words() {  // all that are left
    std::vector<std::string> out;
    for (std::string next; in_ >> next;) out.push_back(next);
    return out;
  }
  std::string rest() {
    std::string out;
    std::getline(in_ >> std::ws, out);
    return out;
  }

 private:
  std::istringstream in_;
};

// "...TEXT" is somewhere in it, "TEXT..." begins it; else it is the whole.
inline void expect_text(const std::string& said, std::string want) {
  constexpr std::string_view kMore = "...";
  if (want.starts_with(kMore)) {
    EXPECT_THAT(said, ::testing::HasSubstr(want.substr(kMore.size())));
  } else if (want.ends_with(kMore)) {
    EXPECT_THAT(said, ::testing::StartsWith(want.substr(0, want.size() - kMore.size())));
  } else {
    EXPECT_EQ(said, want);
  }
}

// For each of the words once, which stands for every '$', with a player of its own: its command()
// gets command by command, then its end() is called.
template <typename Player>
void play_script(std::string_view script, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    SCOPED_TRACE(words.size() > 1 ? "$ is " + word : "");
    std::string text(script);
    for (size_t at; (at = text.find('$')) != text.npos;) text.replace(at, 1, word);
    Player player;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const size_t begin = line.find_first_not_of(' ');
      if (begin != line.npos && line[begin] == '#') continue;
      for (size_t bar; !line.empty(); line = bar == line.npos ? "" : line.substr(bar + 3)) {
        bar = line.find(" | ");
        if (line.find_first_not_of(' ') != line.npos) player.command(line.substr(0, bar));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    player.end();
  }
}

}  // namespace phub::testing
