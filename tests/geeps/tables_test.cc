#include "worker/geeps/tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "tests/worker/expect_error.h"

namespace phub::geeps {
namespace tables_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What keys_of() says against these tables, as error_of() has it.
std::string refusal(const std::vector<TableSpec>& tables) {
  return phub::testing::error_of([&] { keys_of(tables); });
}

TEST(Tables, DenseKeysAreNumbersFromZero) {
  EXPECT_THAT(dense(4), ElementsAre(0, 1, 2, 3));
  EXPECT_TRUE(dense(0).empty());
  EXPECT_THROW(dense(std::numeric_limits<uint64_t>::max()), Error);
}

TEST(Tables, KeysAreTheTablesOfParametersInTheirOrder) {
  const std::vector<TableSpec> tables = {
      {"b", 3, {9, 4}}, {"hidden", 128, dense(5), true}, {"a", 128, dense(10)}};
  const std::vector<KeySpec> keys = keys_of(tables);
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(table_name(keys[0].name), "b");
  EXPECT_EQ(keys[0].elements, 6u);
  EXPECT_EQ(table_name(keys[1].name), "a");
  EXPECT_EQ(keys[1].elements, 1280u);
}

TEST(Tables, NamesTellDifferentRowsApart) {
  const std::vector<TableSpec> tables = {{"t", 6, {0, 1}},    {"t", 6, {1, 0}}, {"t", 6, {0, 2}},
                                         {"t", 3, dense(4)},  {"t", 4, {0, 1}}, {"t", 6, {0}},
                                         {"t", 6, {0, 1, 2}}, {"u", 6, {0, 1}}};
  std::set<std::string> names;
  for (const TableSpec& table : tables) names.insert(key_names(table).front());
  EXPECT_EQ(names.size(), tables.size());
  EXPECT_EQ(key_names({"t", 6, {0, 1}}), key_names({"t", 6, dense(2)}));
  // FNV-1a, computed apart: a job outlives a release of the library.
  EXPECT_THAT(key_names({"t", 6, {0, 1}}), ElementsAre("t #158826567a790422"));
}

TEST(Tables, APieceIsAKeyThatIsNamedByItsRows) {
  const TableSpec table{.name = "t", .row_floats = 6, .keys = dense(7), .piece_bytes = 3 * 24 + 23};
  const std::vector<KeySpec> keys = keys_of(std::span(&table, 1));
  ASSERT_EQ(keys.size(), 3u);
  const auto digest = key_names({"t", 6, dense(7)}).front().substr(1);
  EXPECT_THAT(key_names(table),
              ElementsAre("t[0:3]" + digest, "t[3:6]" + digest, "t[6:7]" + digest));
  EXPECT_EQ(keys[1].elements, 18u);
  EXPECT_THAT(keys[2].shape, ElementsAre(1, 6));
  EXPECT_EQ(table_name(keys[0].name), "t[0:3]");
}

TEST(Tables, RowsOfKeysAreThoseOfPieces) {
  const std::vector<TableSpec> tables = {
      {.name = "a", .row_floats = 2, .keys = dense(5), .piece_bytes = 16},
      {.name = "local", .row_floats = 2, .keys = dense(5), .local = true, .piece_bytes = 8},
      {.name = "b", .row_floats = 2, .keys = dense(3), .piece_bytes = 0}};
  const std::vector<RowsOfKey> rows = rows_of_keys(tables);
  const std::vector<KeySpec> keys = keys_of(tables);
  ASSERT_EQ(rows.size(), 4u);
  ASSERT_EQ(keys.size(), rows.size());
  const uint32_t want[][3] = {{0, 0, 2}, {0, 2, 2}, {0, 4, 1}, {2, 0, 3}};
  for (size_t key = 0; key < rows.size(); ++key) {
    EXPECT_EQ(rows[key].table, want[key][0]);
    EXPECT_EQ(rows[key].first_row, want[key][1]);
    EXPECT_EQ(rows[key].rows, want[key][2]);
    EXPECT_EQ(keys[key].elements, 2 * rows[key].rows);
  }
  const std::vector<TableSpec> none = {{.name = "a", .row_floats = 0, .keys = dense(1)}};
  EXPECT_THROW(rows_of_keys(none), Error);
}

TEST(Tables, MorePiecesThanAJobHasKeysAreRefused) {
  std::vector<TableSpec> tables = {
      {.name = "many", .row_floats = 1, .keys = dense((1 << 20) + 1), .piece_bytes = 1}};
  EXPECT_THAT(refusal(tables), AllOf(HasSubstr("'many'"), HasSubstr("piece_bytes")));
  tables[0].local = true;
  EXPECT_THAT(refusal(tables), HasSubstr("piece_bytes"));
  tables[0].piece_bytes = 8;
  EXPECT_EQ(keys_of(tables).size(), 0u);
}

TEST(Tables, NamesOfPiecesHaveRoomForTheirRows) {
  std::vector<TableSpec> tables = {
      {.name = std::string(237, 'n'), .row_floats = 1, .keys = dense(2)}};
  EXPECT_EQ(keys_of(tables).front().name.size(), 255u);
  tables[0].piece_bytes = 4;
  EXPECT_THAT(refusal(tables), HasSubstr("at most 214"));
  tables[0].name.resize(214);
  EXPECT_EQ(keys_of(tables).size(), 2u);
}

TEST(Tables, PiecesHaveWholeRowsAndIfTheyCanFullChunks) {
  const auto rows_of_piece = [](uint32_t row_floats, uint64_t rows, uint64_t bytes) {
    return split_of(
               {.name = "t", .row_floats = row_floats, .keys = dense(rows), .piece_bytes = bytes})
        .rows_per_piece;
  };
  constexpr uint64_t kMiB = 1 << 20;
  EXPECT_EQ(rows_of_piece(1024, 1000, kMiB), 256u);
  EXPECT_EQ(rows_of_piece(96, 10000, kMiB), 2560u);     // of 2730: of 256 rows each 3 chunks
  EXPECT_EQ(rows_of_piece(17, 1 << 20, kMiB), 15420u);  // 8192 rows would be half of it
  EXPECT_EQ(rows_of_piece(785, 10000, kMiB), 333u);     // 8192 rows would fill chunks
  EXPECT_EQ(rows_of_piece(500'000, 7, kMiB), 1u);       // a row is larger
  EXPECT_EQ(rows_of_piece(1024, 100, kMiB), 100u);      // smaller than a piece
  EXPECT_EQ(rows_of_piece(1024, 1000, 0), 1000u);       // 0: one piece
  EXPECT_EQ(split_of({.name = "t", .row_floats = 1024, .keys = dense(1000), .samples = 3}).pieces(),
            1u);
}

TEST(Tables, OnlyADigestIsTakenFromAName) {
  EXPECT_EQ(table_name("layer #0123456789abcdef"), "layer");
  EXPECT_EQ(table_name("layer #1 #0123456789abcdef"), "layer #1");
  for (const char* name : {"layer", "", "layer #1", "layer #0123456789abcdeg",
                           "layer#0123456789abcdef", " #0123456789abcdef"}) {
    EXPECT_EQ(table_name(name), name);
  }
}

TEST(Tables, WhatIsWrongIsNamed) {
  EXPECT_THAT(refusal({{"", 1, dense(1)}}), HasSubstr("table 0 has no name"));
  EXPECT_THAT(refusal({{std::string(240, 'x'), 1, dense(1)}}), HasSubstr("240 bytes"));
  EXPECT_THAT(refusal({{"t", 1, dense(1)}, {"u", 1, dense(1)}, {"t", 2, dense(1), true}}),
              HasSubstr("table 't' is there twice"));
  EXPECT_THAT(refusal({{"t", 0, dense(1)}}), AllOf(HasSubstr("'t'"), HasSubstr("row_floats is 0")));
  EXPECT_THAT(refusal({{"t", 1, {}}}), HasSubstr("table 't' has no rows"));
  EXPECT_THAT(refusal({{"t", 1, {5, 9, 1, 9}}}),
              AllOf(HasSubstr("'t'"), HasSubstr("key 9 is there twice")));
  EXPECT_THAT(refusal({{"t", 1, {5, 5}}}), HasSubstr("key 5 is there twice"));
  EXPECT_THAT(refusal({{"t", std::numeric_limits<uint32_t>::max(), dense(1000)}}),
              AllOf(HasSubstr("'t'"), HasSubstr("1000 rows of 4294967295 floats")));
  EXPECT_EQ(refusal({{"t", 1, {std::numeric_limits<uint64_t>::max(), 0}}}), "none");
}

}  // namespace tables_test
}  // namespace phub::geeps
