// The page that is embedded in the binary; tests/scripts/page_test shows it to a browser.
#include "phub/control/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace phub {
namespace page_test {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Page, HasItsThreeFiles) {
  EXPECT_EQ(page_files().size(), 3u);
  EXPECT_THAT(page_file("/").text, ::testing::StartsWith("<!doctype html>"));
  EXPECT_THAT(page_file("/page.js").text, HasSubstr("poll();\n"));
  EXPECT_THAT(page_file("/page.css").text, HasSubstr("prefers-color-scheme: dark"));
}

TEST(Page, ShowsItsOwnFilesAndNothingOfOthers) {
  for (const PageFile& file : page_files()) {
    EXPECT_THAT(file.text, Not(HasSubstr("https://"))) << file.path;
    EXPECT_THAT(file.text, Not(HasSubstr("@import"))) << file.path;
  }
  const std::string_view html = page_file("/").text;
  EXPECT_THAT(html, HasSubstr("<script src=\"page.js\"></script>"));
  EXPECT_THAT(html, Not(HasSubstr("<style")));
  EXPECT_THAT(html, Not(HasSubstr("style=")));
  EXPECT_THAT(html, Not(HasSubstr("onclick")));
}

// Names come from strangers.
TEST(Page, MakesNoMarkupOfText) {
  const std::string_view script = page_file("/page.js").text;
  for (const char* way : {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                          "new Function", "DOMParser", "srcdoc"}) {
    EXPECT_THAT(script, Not(HasSubstr(way)));
  }
}

}  // namespace page_test
}  // namespace phub
