#include "phub/notes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace phub {
namespace notes_test {

using ::testing::ElementsAre;
using ::testing::SizeIs;

// A peer that is refused a million times is not a million lines.
TEST(Notes, FewLinesASecondAndTheOthersCounted) {
  std::vector<std::string> lines;
  Notes notes([&](const std::string& line) { lines.push_back(line); });
  for (int i = 0; i < 1000; ++i) notes.add(5000, "refused");
  EXPECT_THAT(lines, SizeIs(Notes::kBurst));
  lines.clear();
  notes.add(5000 + Notes::kMsPerLine, "one more");
  notes.add(5000 + Notes::kMsPerLine, "too many");
  EXPECT_THAT(lines, ElementsAre("980 lines were left out here", "one more"));
  lines.clear();
  for (int i = 0; i < 1000; ++i) notes.add(5000 + 1000 * Notes::kMsPerLine, "later");
  EXPECT_THAT(lines, SizeIs(Notes::kBurst + 1));
  EXPECT_EQ(lines[0], "1 lines were left out here");
}

TEST(Notes, NobodyNeedsToListen) { Notes(nullptr).add(1, "a line"); }

}  // namespace notes_test
}  // namespace phub
