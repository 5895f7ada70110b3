// Holds the documents of transport/control/ and the code together.
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "phub/control/port.h"
#include "phub/control/router.h"
#include "phub/core/core.h"
#include "transport/control/message_fields.h"
#include "transport/control/messages_json.h"
#include "transport/control/rules.h"
#include "transport/control/shard_fields.h"

namespace phub {
namespace readme_test {

using ::testing::ContainsRegex;

using ::testing::HasSubstr;

// All documents of the folder, one after another.
std::string page() {
  std::stringstream text;
  for (const auto& entry :
       std::filesystem::directory_iterator(PHUB_SOURCE_DIR "/transport/control")) {
    if (entry.path().extension() == ".md") text << std::ifstream(entry.path()).rdbuf() << '\n';
  }
  return text.str();
}

struct Example {
  std::string type;
  std::string text;
};
std::vector<Example> examples() {
  const std::string text = page();
  const std::string fence = "```json ";
  std::vector<Example> out;
  for (size_t at = text.find(fence); at != text.npos; at = text.find(fence, at + 1)) {
    const size_t line = text.find('\n', at);
    out.push_back({text.substr(at + fence.size(), line - at - fence.size()),
                   text.substr(line + 1, text.find("\n```", line) - line - 1)});
  }
  return out;
}

using Reencode = std::string (*)(std::string_view);
template <class Message>
std::string again(std::string_view text) {
  return to_json(from_json<Message>(text));
}
const std::map<std::string, Reencode> kReencode = {
#define PHUB_MESSAGE(Message, what) {#Message, again<Message>},
#include "transport/control/messages.def"
#undef PHUB_MESSAGE
};
// They are parts of others.
const std::set<std::string> kShownElsewhere = {"JobSpec", "Offer", "LogRecord", "JobStatus"};

TEST(Readme, ExamplesComeBackAsTheyAre) {
  std::map<std::string, int> seen;
  for (const Example& example : examples()) {
    SCOPED_TRACE(example.text);
    ++seen[example.type];
    const auto reencode = kReencode.find(example.type);
    ASSERT_NE(reencode, kReencode.end()) << "no codec for " << example.type;
    // As JSON, so that white space, and 0 beside 0.0, make no difference.
    EXPECT_EQ(nlohmann::json::parse(reencode->second(example.text)),
              nlohmann::json::parse(example.text));
  }
  for (const auto& [type, reencode] : kReencode) {
    EXPECT_TRUE(seen[type] > 0 || kShownElsewhere.contains(type)) << type;
  }
}

TEST(Readme, EveryRouteIsThere) {
  const std::string text = page();
  for (const RouteInfo& route : http_routes()) {
    EXPECT_THAT(text, HasSubstr(fmt::format("| `{}` | `{}` |", route.method, route.pattern)));
  }
}

TEST(Readme, OptionsThatDoNotGoTogetherAreThere) {
  const auto names = [](Features features) {
    std::vector<std::string_view> all;
    for (size_t i = 0; i < kFeatures; ++i) {
      if (const auto one = static_cast<Feature>(i); features.has(one)) all.push_back(name_of(one));
    }
    return fmt::format("{}", fmt::join(all, ", "));
  };
  std::string table;
  for (const Rule& rule : rules()) {
    table += fmt::format("| {} | {} | {} |\n", names(rule.of), names(rule.without), rule.why);
  }
  EXPECT_THAT(page(), HasSubstr("| | | why |\n| --- | --- | --- |\n" + table + "\n"));
}

// Collects what a message is made of, and what that is made of.
struct Names {
  template <class T, class M>
  void required(std::string_view name, M T::*, json::Bounds = {}) {
    names.insert(name);
    collect<json::PlainOf<M>>();
  }
  template <class T, class M>
  void optional(std::string_view name, M T::*member, json::Bounds = {}) {
    required(name, member);
  }
  template <class M>
  void collect() {
    if constexpr (json::IsList<M>::value) {
      collect<typename M::value_type>();
    } else if constexpr (json::Struct<M>) {
      fields(*this, static_cast<const M*>(nullptr));
    }
  }
  std::set<std::string_view> names;
};

TEST(Readme, EveryFieldIsThere) {
  Names all;
#define PHUB_MESSAGE(Message, what) all.collect<Message>();
#include "transport/control/messages.def"
#undef PHUB_MESSAGE
  EXPECT_GT(all.names.size(), 200u);
  const std::string text = page();
  for (const std::string_view name : all.names) {
    EXPECT_THAT(text, HasSubstr(fmt::format("`{}`", name)));
  }
  for (const std::string_view word : kWords<LogRecord::Kind>) {
    EXPECT_THAT(text, HasSubstr(fmt::format("`{}`", word)));
  }
  for (const std::string_view word : kWords<BranchAction>) {
    EXPECT_THAT(text, HasSubstr(fmt::format("`{}`", word)));
  }
}

TEST(Readme, ErrorCodesHaveTheStatusThatThePageSays) {
  const std::string text = page();
  for (int i = 0; i <= static_cast<int>(ErrorCode::kInternal); ++i) {
    const auto code = static_cast<ErrorCode>(i);
    EXPECT_THAT(text, HasSubstr(fmt::format("| `{}` | {}", name_of(code),
                                            error_response(code, "").status)));
  }
}

TEST(Readme, LimitsAndDefaultsAreThoseOfTheCode) {
  const std::string text = page();
  const JobSpec spec;
  const HttpOptions options;
  for (const std::string& line : {
           fmt::format("| `lease_ms` | {} |", spec.lease_ms),
           fmt::format("| `progress_limit_ms` | {} |", spec.progress_limit_ms),
           fmt::format("| `wait_limit_ms` | {} |", spec.wait_limit_ms),
           fmt::format("| `join_limit_ms` | {} |", spec.join_limit_ms),
           fmt::format("| `chunk_elements` | {} |", spec.chunk_elements),
           fmt::format("| `optimizer` | \"{}\" |", spec.optimizer),
           fmt::format("| `gradient_dtype` | \"{}\" |", spec.gradient_dtype),
           fmt::format("| `parameter_dtype` | \"{}\" |", spec.parameter_dtype),
           fmt::format("| `reduction` | \"{}\" |", spec.reduction),
           fmt::format("| `work` | \"{}\" |", spec.work),
           fmt::format("| `initial` | \"{}\" |", spec.initial),
           fmt::format("| `on_loss` | \"{}\" |", spec.on_loss),
           fmt::format("| `on_nonfinite` | \"{}\" |", spec.on_nonfinite),
           fmt::format("| header | {} KiB |", options.max_header_bytes >> 10),
           fmt::format("| body of a join | {} MiB |", kMaxJoinBytes >> 20),
           fmt::format("| {} MiB, after its ticket was checked; {} KiB |", kStatePieceBytes >> 20,
                       kMaxStateRequestBytes >> 10),
           fmt::format("| body of anything else | {} KiB |", kMaxBodyBytes >> 10),
           fmt::format("to its last | {} s,", options.request_timeout_ms / 1000),
           fmt::format("on a connection | {} s,", options.idle_timeout_ms / 1000),
           fmt::format("| connections | {} |", options.max_connections),
           fmt::format("of a job | {}, {}, 2⁴⁰ |", kMaxKeys, kMaxRanks),
           fmt::format("| {}, {} |", kMaxNameBytes, kMaxWordBytes),
           fmt::format("| jobs | {} |", Core::kMaxJobs),
           fmt::format("| entries of a schedule, hyperparameters in one of them | {}, {} |",
                       kMaxScheduleEntries, kMaxHyperValues),
           fmt::format("| groups of keys, these times entries of a schedule | {}, {} |",
                       kMaxHyperGroups, kMaxGroupEntries),
           fmt::format("| `version` | {} |", kProtocolVersion),
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

// A field whose values are words: its row lists all of them.
template <class E>
void expect_words(const std::string& text, std::string_view field) {
  const size_t begin = text.find(fmt::format("| `{}` |", field));
  ASSERT_NE(begin, text.npos) << field;
  const std::string row = text.substr(begin, text.find('\n', begin) - begin);
  for (const std::string_view word : kWords<E>) {
    EXPECT_THAT(row, ContainsRegex(fmt::format("[ ]{}[ ,:]", word))) << field;
  }
}

TEST(Readme, NamesEveryWordOfEveryChoice) {
  const std::string text = page();
  expect_words<Consistency>(text, "consistency");
  expect_words<Reduction>(text, "reduction");
  expect_words<Work>(text, "work");
  expect_words<Initial>(text, "initial");
  expect_words<OnLoss>(text, "on_loss");
  expect_words<OnNonFinite>(text, "on_nonfinite");
}

}  // namespace readme_test
}  // namespace phub
