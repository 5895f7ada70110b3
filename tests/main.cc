// The tests of a program. With --of=worker/rows_test (more with commas) those of these files alone:
// in the builds with sanitizers a folder's tests are one program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>

namespace {

// Whether the test is in one of these files: "worker/rows_test,worker/gated_test".
bool is_in(std::string_view source, std::string_view files) {
  while (!files.empty()) {
    const std::size_t end = std::min(files.find(','), files.size());
    if (source.ends_with("tests/" + std::string(files.substr(0, end)) + ".cc")) return true;
    files.remove_prefix(std::min(end + 1, files.size()));
  }
  return false;
}

std::string filter_of(std::string_view files) {
  std::string filter;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      if (is_in(test.file(), files))
        filter.append(suite.name()).append(".").append(test.name()).append(":");
    }
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  constexpr std::string_view kOf = "--of=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (!argument.starts_with(kOf)) {
      std::fprintf(stderr,
                   "unknown argument '%s'; --of=FOLDER/FILE,… runs the tests of these files\n",
                   argv[i]);
      return 2;
    }
    const std::string filter = filter_of(argument.substr(kOf.size()));
    if (filter.empty()) {
      std::fprintf(stderr, "no test is in %s\n", argv[i] + kOf.size());
      return 2;
    }
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
