// Tables as keys of a job, and the requirements of a cache on a job. (dense() and keys_of() are in
// cache.h.)
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/control/job_spec.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/rows.h"

namespace phub::geeps {

// Throws Error(kInvalid), which names the table: an empty or duplicate name, no rows, empty rows, a
// duplicate key, more elements than a job may have.
void check(std::span<const TableSpec> tables);

// Covers the table's row_floats, and its keys in their order.
uint64_t digest_of(const TableSpec& table);

// The pieces of a table: TableSpec::piece_bytes of rows or, so that the last chunk of each is full,
// up to a quarter less.
RowSplit split_of(const TableSpec& table);

// The key of a piece is named "layer1[0:512] #c8f5a3d2e1907b64": the table's name, the piece's
// rows, the table's digest. That of a table of one piece is "layer1 #c8f5a3d2e1907b64". A server
// compares names when a worker joins, so workers whose rows differ cannot meet in a job.
std::vector<std::string> key_names(const TableSpec& table);
std::string table_name(std::string_view key_name);  // without a digest, if it has one

// See Exchange::slack().
std::optional<uint32_t> slack_of(const JobSpec& spec);

// By key: floats of all the pairs that a rank may send; 0: its gradient is sent as it is.
std::vector<size_t> floats_of_factors(std::span<const KeySpec> keys);

}  // namespace phub::geeps
