// Holds transport/README.md ("Control port") and the code together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
#include "transport/control/shard_fields.h"

namespace phub {
namespace readme_test {

using ::testing::ContainsRegex;

using ::testing::HasSubstr;

std::string page() {
  std::ifstream file(PHUB_SOURCE_DIR "/transport/README.md");
  std::stringstream text;
  text << file.rdbuf();
  const std::string all = text.str();
  const size_t begin = all.find("\n## Control port");
  EXPECT_NE(begin, all.npos);
  return all.substr(begin, all.find("\n## ", begin + 1) - begin);
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

std::string reencode_hyper(const std::string& text) {
  const auto [who, values] = parse_hyper(text);
  return hyper_json(who, values);
}
std::string reencode_branch(const std::string& text) {
  const auto [who, change] = parse_branch_request(text);
  return branch_json(who, change);
}

std::string reencode_error(const std::string& text) {
  const Error error = parse_error(text);
  return error_json(error.code(), error.what());
}

using Reencode = std::function<std::string(const std::string&)>;
template <class Message>
Reencode again(Message (*parse)(std::string_view)) {
  return [parse](const std::string& text) { return to_json(parse(text)); };
}

const std::map<std::string, Reencode> kReencode = {
    {"JoinRequest", again(parse_join_request)},
    {"JoinReply", again(parse_join_reply)},
    {"Credential", again(parse_credential)},
    {"RackNews", again(parse_rack_news)},
    {"Pulse", again(parse_pulse)},
    {"HyperRequest", reencode_hyper},
    {"HyperReply", again(parse_hyper_reply)},
    {"BranchRequest", reencode_branch},
    {"BranchReply", again(parse_branch_reply)},
    {"LossRequest", again(parse_loss_request)},
    {"LossPage", again(parse_loss_page)},
    {"StateRequest", again(parse_state_request)},
    {"StateReply", again(parse_state_reply)},
    {"CheckpointRequest", again(parse_checkpoint_request)},
    {"CheckpointReply", again(parse_checkpoint_reply)},
    {"ShardHello", again(parse_shard_hello)},
    {"ShardWelcome", again(parse_shard_welcome)},
    {"ShardMail", again(parse_shard_mail)},
    {"ShardOrders", again(parse_shard_orders)},
    {"LogPage", again(parse_log_page)},
    {"ServerStatus", again(parse_status)},
    {"Problem", reencode_error},
};

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
  for (const auto& [type, reencode] : kReencode) EXPECT_GT(seen[type], 0) << type;
}

TEST(Readme, EveryRouteIsThere) {
  const std::string text = page();
  for (const RouteInfo& route : http_routes()) {
    EXPECT_THAT(text, HasSubstr(fmt::format("| `{}` | `{}` |", route.method, route.pattern)));
  }
}

// Collects what a message is made of, and what that is made of.
struct Names {
  template <class T, class M>
  void required(std::string_view name, M T::*, json::Bounds = {}) {
    names.insert(name);
    collect<M>();
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
  all.collect<JoinRequest>();
  all.collect<JoinReply>();
  all.collect<Credential>();
  all.collect<RackNews>();
  all.collect<Pulse>();
  all.collect<HyperRequest>();
  all.collect<HyperReply>();
  all.collect<BranchRequest>();
  all.collect<BranchReply>();
  all.collect<LossRequest>();
  all.collect<LossPage>();
  all.collect<StateRequest>();
  all.collect<StateReply>();
  all.collect<CheckpointRequest>();
  all.collect<CheckpointReply>();
  all.collect<ShardHello>();
  all.collect<ShardWelcome>();
  all.collect<ShardMail>();
  all.collect<ShardOrders>();
  all.collect<LogPage>();
  all.collect<ServerStatus>();
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
