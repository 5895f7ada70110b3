#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/zerocompute/report.h"

namespace phub {
namespace zerocompute_report_test {

using ::testing::HasSubstr;

ReportRow sample() {
  ReportRow row{.model = "resnet50",
                .transport = "shm",
                .optimizer = "nesterov",
                .dtype = "f32",
                .format = "f32",
                .work = "all",
                .workers = 4,
                .warmup = 3};
  row.result.elements = 25'000'000;
  row.result.bytes = 100'000'000;
  row.result.keys = 161;
  row.result.chunks = 3000;
  row.result.rounds = 50;
  row.result.us = {.min = 15000, .p50 = 20000, .p99 = 30000, .max = 31000, .total = 1'000'000};
  row.result.exchanges_per_s = 50;
  row.result.limit_us = 18000;
  row.chunk_elements = 8192;
  row.result.measured = {.workers = 4, .round_us = 20000, .memory_us = 18000};
  return row;
}

TEST(ReportTest, Rates) {
  const ReportRow row = sample();
  EXPECT_DOUBLE_EQ(worker_gbps(row), 40);
  EXPECT_DOUBLE_EQ(server_gbps(row), 160);
  EXPECT_DOUBLE_EQ(percent_of_limit(row), 90);
}

// What programs rely on: the names and types of the fields.
TEST(ReportTest, JsonSchema) {
  const std::vector<ReportRow> rows = {sample()};
  const nlohmann::json out = nlohmann::json::parse(to_json(rows).dump());
  ASSERT_EQ(out.at("rows").size(), 1u);
  const nlohmann::json& row = out["rows"][0];
  for (const char* name : {"model", "transport", "optimizer", "dtype", "work"}) {
    EXPECT_TRUE(row.at(name).is_string()) << name;
  }
  for (const char* name : {"workers", "bytes", "elements", "keys", "chunks", "rounds", "warmup",
                           "wrong", "checked", "bytes_copied", "sleeps"}) {
    EXPECT_TRUE(row.at(name).is_number_unsigned()) << name;
  }
  for (const char* name : {"exchanges_per_s", "min_us", "p50_us", "p99_us", "max_us", "worker_gbps",
                           "server_gbps", "limit_us", "percent_of_limit"}) {
    EXPECT_TRUE(row.at(name).is_number_float()) << name;
  }
  EXPECT_EQ(row["p50_us"], 20000);
  EXPECT_EQ(row["bytes"], 100'000'000);
}

TEST(ReportTest, WithoutLimitThereIsNone) {
  ReportRow row = sample();
  row.result.limit_us = 0;
  EXPECT_FALSE(to_json({&row, 1})["rows"][0].contains("percent_of_limit"));
}

TEST(ReportTest, TheVerdictIsThereForPeopleAndPrograms) {
  std::vector<ReportRow> rows = {sample(), sample()};
  rows[1].workers = 8;
  const std::string text = verdict_text(rows);
  EXPECT_THAT(text, HasSubstr("resnet50           4   32 KiB  memory bandwidth "));
  EXPECT_THAT(text, HasSubstr("resnet50           8 "));
  const std::string advice_line = "  memory bandwidth: " + std::string(advice(Bound::kMemory));
  const size_t at = text.find(advice_line);
  EXPECT_NE(at, text.npos);
  EXPECT_EQ(text.find(advice_line, at + 1), text.npos) << "once for all rows";

  const nlohmann::json row = to_json(rows)["rows"][0];
  EXPECT_EQ(row["verdict"]["bound"], "memory");
  EXPECT_EQ(row["verdict"]["shares"]["memory"], 0.9);
  EXPECT_FALSE(row.contains("core_busy")) << "was not measured";
}

TEST(ReportTest, JobsBesideEachOtherHaveNoVerdict) {
  ReportRow row = sample();
  row.jobs = 2;
  EXPECT_EQ(verdict_text({&row, 1}), "");
  EXPECT_FALSE(to_json({&row, 1})["rows"][0].contains("verdict"));
}

TEST(ReportTest, TableColumnsLineUp) {
  const std::string header = table_header();
  const std::string first_line = header.substr(0, header.find('\n'));
  const std::string row = table_row(sample());
  EXPECT_THAT(row, HasSubstr("nesterov"));
  EXPECT_THAT(row, HasSubstr(" 90.0 "));
  // µ takes two bytes, and four columns have it.
  EXPECT_EQ(first_line.size() - 4, row.size());
}

}  // namespace zerocompute_report_test
}  // namespace phub
