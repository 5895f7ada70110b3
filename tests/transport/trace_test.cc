// Traces: what is kept, and that what is written is JSON that a viewer takes.
#include "transport/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/file_size_limit.h"
#include "tests/worker/expect_error.h"
#include "transport/error.h"

namespace phub {
namespace trace_test {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Trace : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  json read() const { return json::parse(std::ifstream(path_)); }
  // Those that are not about names.
  std::vector<json> events() const {
    std::vector<json> found;
    const json file = read();
    for (const json& event : file["traceEvents"]) {
      if (event["ph"] != "M") found.push_back(event);
    }
    return found;
  }
  const std::string path_ = ::testing::TempDir() + "trace_test." + std::to_string(getpid());
};

std::vector<uint64_t> rounds_of(const TraceLog& log) {
  std::vector<uint64_t> rounds;
  log.for_each([&](const TraceEvent& event) { rounds.push_back(event.round); });
  return rounds;
}

TEST_F(Trace, ALogKeepsTheLastEvents) {
  TraceLog log(3);
  EXPECT_THAT(rounds_of(log), ElementsAre());
  for (uint64_t round = 1; round <= 2; ++round) log.add({.round = round});
  EXPECT_THAT(rounds_of(log), ElementsAre(1, 2));
  EXPECT_EQ(log.forgotten(), 0u);
  for (uint64_t round = 3; round <= 8; ++round) log.add({.round = round});
  EXPECT_THAT(rounds_of(log), ElementsAre(6, 7, 8));
  EXPECT_EQ(log.forgotten(), 5u);
}

TEST_F(Trace, ASpanLastsAsLongAsItsScope) {
  TraceLog log(4);
  const uint64_t before = trace_now_ns();
  {
    const TraceSpan span(&log, {.name = "outer", .round = 1});
    const TraceSpan inner(&log, {.name = "inner", .round = 2});
    const TraceSpan off(nullptr, {.name = "off", .round = 3});
  }
  const uint64_t after = trace_now_ns();
  EXPECT_THAT(rounds_of(log), ElementsAre(2, 1));
  log.for_each([&](const TraceEvent& event) {
    EXPECT_GE(event.begin_ns, before);
    EXPECT_LE(event.begin_ns + event.duration_ns, after);
  });
}

TEST_F(Trace, EveryKindIsWrittenAsChromeSaysIt) {
  TraceLog log(8);
  log.add({.name = "sum", .begin_ns = 5'000'500, .duration_ns = 1'250, .round = 7, .subject = 3});
  log.add({.name = "arrival", .round = 8, .rank = 2, .kind = TraceEvent::Kind::kMoment});
  log.add({.name = "wait",
           .begin_ns = 1000,
           .duration_ns = 500,
           .thread = 4,
           .kind = TraceEvent::Kind::kOverlapping});
  TraceWriter writer(path_, "box");
  writer.name_thread(4, "core 4");
  writer.write(log,
               {.subject = [](const TraceEvent& e) { return "key " + std::to_string(e.subject); },
                .job = [](const TraceEvent&) { return "mnist"; }});
  writer.close();

  const std::vector<json> all = events();
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0]["ph"], "X");
  EXPECT_DOUBLE_EQ(all[0]["ts"], 5000.5);
  EXPECT_DOUBLE_EQ(all[0]["dur"], 1.25);
  EXPECT_EQ(all[0]["args"], (json{{"round", 7}, {"job", "mnist"}, {"of", "key 3"}}));
  EXPECT_EQ(all[1]["ph"], "i");
  EXPECT_EQ(all[1]["args"], (json{{"round", 8}, {"rank", 2}, {"job", "mnist"}}));
  EXPECT_EQ(all[2]["ph"], "b");
  EXPECT_EQ(all[3]["ph"], "e");
  EXPECT_EQ(all[2]["id"], all[3]["id"]);
  EXPECT_DOUBLE_EQ(all[3]["ts"], 1.5);
  EXPECT_EQ(all[3]["tid"], 4);
  EXPECT_EQ(all[0]["pid"], getpid());
  const json names = read()["traceEvents"];
  EXPECT_EQ(names[0]["args"]["name"], "box");
  EXPECT_EQ(names[1]["args"]["name"], "core 4");
  EXPECT_EQ(names[1]["tid"], 4);
}

TEST_F(Trace, NamesFromOutsideCannotBreakTheFile) {
  TraceLog log(1);
  log.add({.name = "sum", .subject = 0});
  TraceWriter writer(path_, "\"},{\"\n");
  writer.write(log, {.subject = [](const TraceEvent&) { return "\xff\\\"\x01"; }, .job = {}});
  writer.close();
  EXPECT_EQ(read()["traceEvents"].size(), 2u);
  EXPECT_EQ(events()[0]["args"]["of"], "\xEF\xBF\xBD\\\"\x01");
}

TEST_F(Trace, WhatWasForgottenIsSaid) {
  TraceLog log(1);
  for (int i = 0; i < 4; ++i) log.add({});
  TraceWriter writer(path_, "box");
  writer.write(log, {});
  writer.close();
  EXPECT_EQ(read()["otherData"]["events_forgotten"], 3);
}

TEST_F(Trace, AFileThatCannotBeIsAnErrorAtOnce) {
  testing::expect_error(ErrorCode::kInvalid, "/nowhere/trace.json",
                        [] { const TraceWriter writer("/nowhere/trace.json", "box"); });
}

// Also in a program that does not ignore the signal.
TEST_F(Trace, AFileThatMayNotGrowIsAnError) {
  TraceLog log(1000);
  for (int i = 0; i < 1000; ++i) log.add({.name = "sum"});
  const FileSizeLimit limit(4096);
  TraceWriter writer(path_, "box");
  writer.write(log, {});
  EXPECT_THROW(writer.close(), Error);
}

TEST_F(Trace, AFullDiskIsAnError) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  TraceLog log(1000);
  for (int i = 0; i < 1000; ++i) log.add({.name = "sum"});
  TraceWriter writer("/dev/full", "box");
  writer.write(log, {});
  EXPECT_THROW(writer.close(), Error);
}

}  // namespace trace_test
}  // namespace phub
