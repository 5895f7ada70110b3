#include "worker/geeps/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "transport/error.h"

namespace phub::geeps {
namespace {

constexpr size_t kDigestDigits = 16;
constexpr std::string_view kBeforeDigest = " #";
constexpr size_t kSuffixBytes = kBeforeDigest.size() + kDigestDigits;
constexpr size_t kRangeBytes = 23;         // of a piece's rows: brackets, a colon, two numbers
constexpr uint32_t kChunkElements = 8192;  // those of a job that does not say otherwise
constexpr size_t kMostRows = 1ull << 31;

// FNV-1a over the bytes of 64-bit numbers, the lowest first.
class Digest {
 public:
  void add(uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
      value_ = (value_ ^ ((number >> shift) & 0xff)) * 0x100000001b3u;
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

void check_keys(const TableSpec& table) {
  const std::vector<uint64_t>& keys = table.keys;
  if (std::adjacent_find(keys.begin(), keys.end(), std::greater_equal<>()) == keys.end()) return;
  std::vector<uint64_t> sorted = keys;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    fail(ErrorCode::kInvalid, "table '{}': key {} is there twice", table.name, *twice);
  }
}

void check_samples(const TableSpec& table) {
  const char* const problem = table.local               ? "is local data"
                              : table.read_my_writes    ? "reads its writes"
                              : table.max_staleness > 0 ? "is read with a staleness"
                                                        : nullptr;
  if (problem == nullptr) return;
  fail(ErrorCode::kInvalid, "table '{}' {}: its updates cannot be factors (samples)", table.name,
       problem);
}

[[noreturn]] void fail_name(size_t number, const TableSpec& table, size_t suffix) {
  fail(ErrorCode::kInvalid, "table {}: its name has {} bytes, at most {} are allowed", number,
       table.name.size(), kMaxNameBytes - suffix);
}

void check_pieces(size_t number, const TableSpec& table) {
  if (table.keys.size() > kMostRows) {
    fail(ErrorCode::kInvalid, "table '{}': {} rows, at most {} are allowed", table.name,
         table.keys.size(), kMostRows);
  }
  const uint32_t pieces = split_of(table).pieces();
  if (pieces > kMaxKeys) {
    fail(ErrorCode::kInvalid,
         "table '{}': {} pieces of {} bytes (piece_bytes), and a job has at most {} keys",
         table.name, pieces, table.piece_bytes, kMaxKeys);
  }
  if (pieces > 1 && !table.local &&
      table.name.size() > kMaxNameBytes - kRangeBytes - kSuffixBytes) {
    fail_name(number, table, kRangeBytes + kSuffixBytes);
  }
}

}  // namespace

void check(std::span<const TableSpec> tables) {
  std::unordered_set<std::string_view> names;
  for (size_t i = 0; i < tables.size(); ++i) {
    const TableSpec& table = tables[i];
    if (table.name.empty()) fail(ErrorCode::kInvalid, "table {} has no name", i);
    if (table.name.size() > kMaxNameBytes - kSuffixBytes) fail_name(i, table, kSuffixBytes);
    if (!names.insert(table.name).second) {
      fail(ErrorCode::kInvalid, "table '{}' is there twice", table.name);
    }
    if (table.row_floats == 0) {
      fail(ErrorCode::kInvalid, "table '{}': row_floats is 0", table.name);
    }
    if (table.keys.empty()) fail(ErrorCode::kInvalid, "table '{}' has no rows", table.name);
    if (table.keys.size() > kMaxElements / table.row_floats) {
      fail(ErrorCode::kInvalid, "table '{}': {} rows of {} floats are more than {} elements",
           table.name, table.keys.size(), table.row_floats, kMaxElements);
    }
    if (table.scratch && !table.local) {
      fail(ErrorCode::kInvalid, "table '{}' of parameters is scratch: only local data can be",
           table.name);
    }
    if (table.by_branch && (!table.local || table.scratch)) {
      fail(ErrorCode::kInvalid,
           "table '{}' is by branch and {}: only local data that is kept can be", table.name,
           table.local ? "scratch" : "holds parameters");
    }
    if (table.samples > 0) check_samples(table);
    check_pieces(i, table);
    check_keys(table);
  }
}

std::vector<uint64_t> dense(uint64_t rows) {
  if (rows > kMaxElements) {
    fail(ErrorCode::kInvalid, "dense: {} rows are more than {} elements", rows, kMaxElements);
  }
  std::vector<uint64_t> keys(rows);
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

std::vector<RowsOfKey> rows_of_keys(std::span<const TableSpec> tables) {
  check(tables);
  std::vector<RowsOfKey> keys;
  for (uint32_t i = 0; i < tables.size(); ++i) {
    if (tables[i].local) continue;
    const RowSplit split = split_of(tables[i]);
    for (uint32_t piece = 0; piece < split.pieces(); ++piece) {
      const auto [begin, end] = split.range_of(piece);
      keys.push_back({.table = i, .first_row = begin, .rows = end - begin});
    }
  }
  return keys;
}

std::vector<KeySpec> keys_of(std::span<const TableSpec> tables, uint32_t devices) {
  std::vector<KeySpec> keys;
  std::vector<std::string> names;  // those of a table
  for (const auto& [number, first_row, rows] : rows_of_keys(tables)) {
    const TableSpec& table = tables[number];
    if (first_row == 0) names = key_names(table);
    keys.push_back({.name = names[split_of(table).piece_of(first_row)],
                    .elements = uint64_t{rows} * table.row_floats,
                    .shape = {rows, table.row_floats}});
    if (table.samples == 0) continue;
    if (table.samples > kMaxRankLimit / devices) {
      fail(ErrorCode::kInvalid, "table '{}': {} samples of {} devices are more than {}", table.name,
           table.samples, devices, kMaxRankLimit);
    }
    set_rank_limit(keys.back(), table.samples * devices);
  }
  return keys;
}

uint64_t digest_of(const TableSpec& table) {
  Digest digest;
  digest.add(table.row_floats);
  for (const uint64_t key : table.keys) digest.add(key);
  return digest.value();
}

RowSplit split_of(const TableSpec& table) {
  const auto rows = static_cast<uint32_t>(table.keys.size());
  if (table.piece_bytes == 0 || table.samples > 0) return {.rows = rows, .rows_per_piece = rows};
  const uint64_t floats = table.piece_bytes / sizeof(float);
  const uint64_t in_piece = std::clamp<uint64_t>(floats / table.row_floats, 1, rows);
  const uint64_t whole_chunks =
      kChunkElements / std::gcd(kChunkElements, table.row_floats);  // rows
  const uint64_t rest = in_piece < rows ? in_piece % whole_chunks : 0;
  const bool rounds = 4 * rest <= in_piece;
  return {.rows = rows, .rows_per_piece = static_cast<uint32_t>(in_piece - (rounds ? rest : 0))};
}

std::vector<std::string> key_names(const TableSpec& table) {
  const std::string digest =
      fmt::format("{}{:0{}x}", kBeforeDigest, digest_of(table), kDigestDigits);
  const RowSplit split = split_of(table);
  if (split.pieces() == 1) return {table.name + digest};
  std::vector<std::string> names;
  for (uint32_t piece = 0; piece < split.pieces(); ++piece) {
    const auto [begin, end] = split.range_of(piece);
    names.push_back(fmt::format("{}[{}:{}]{}", table.name, begin, end, digest));
  }
  return names;
}

std::string table_name(std::string_view key_name) {
  if (key_name.size() > kSuffixBytes) {
    const std::string_view suffix = key_name.substr(key_name.size() - kSuffixBytes);
    const bool digest = suffix.starts_with(kBeforeDigest) &&
                        suffix.find_first_not_of("0123456789abcdef", kBeforeDigest.size()) ==
                            std::string_view::npos;
    if (digest) key_name.remove_suffix(kSuffixBytes);
  }
  return std::string(key_name);
}

std::optional<uint32_t> slack_of(const JobSpec& spec) {
  if (spec.consistency == "bsp") return 0;
  if (spec.consistency == "ssp") return spec.slack;
  return std::nullopt;
}

std::vector<size_t> floats_of_factors(std::span<const KeySpec> keys) {
  std::vector<size_t> floats;
  for (const KeySpec& key : keys) {
    floats.push_back(is_factors(key) ? key.rank_limit * (key.shape[0] + key.shape[1]) : 0);
  }
  return floats;
}

}  // namespace phub::geeps
