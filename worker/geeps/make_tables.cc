#include "worker/geeps/make_tables.h"

#include <algorithm>
#include <memory>
#include <span>

#include "transport/error.h"
#include "worker/geeps/exchange.h"
#include "worker/geeps/tables.h"

namespace phub::geeps {
namespace {

void add_pieces(Device& device, Table& table) {
  for (uint32_t i = 0; i < table.split.pieces(); ++i) {
    const auto [begin, end] = table.split.range_of(i);
    Piece& piece = table.pieces.emplace_back();
    piece.first_row = begin;
    piece.row_count = end - begin;
    for (auto* event : {&piece.refreshed, &piece.fetched, &piece.logged, &piece.saved}) {
      *event = device.make_event();
    }
  }
}

void check_samples(const Exchange& exchange, const Table& table) {
  const TableSpec& spec = table.spec;
  const uint32_t samples = exchange.samples(table.pieces.front().key);
  if (spec.samples > samples || (spec.samples == 0) != (samples == 0)) {
    fail(ErrorCode::kInvalid,
         "table '{}' has {} samples, and its key takes {} of this device: a job's keys are those "
         "of keys_of() for the same tables and devices",
         spec.name, spec.samples, samples);
  }
}

// The pieces are the exchange's keys from `key` on.
void connect(Device& device, Exchange& exchange, Table& table, size_t key) {
  const TableSpec& spec = table.spec;
  for (Piece& piece : table.pieces) {
    piece.key = key++;
    piece.loose_log.assign(piece.row_count, HostLog::kOld);
    const uint64_t elements = uint64_t{piece.row_count} * table.row_floats;
    if (piece.key < exchange.keys() && exchange.elements(piece.key) == elements) continue;
    fail(ErrorCode::kInvalid,
         "rows {} to {} of '{}' are not key {} of the exchange, with {} elements", piece.first_row,
         piece.first_row + piece.row_count - 1, spec.name, piece.key, elements);
  }
  check_samples(exchange, table);
  table.factors = DeviceMemory(
      device, spec.samples * (spec.keys.size() + spec.row_floats) * sizeof(float), spec.name);
  table.kept_twice = spec.max_staleness > exchange.slack().value_or(spec.max_staleness);
  if (table.kept_twice) {
    const size_t bytes = table.floats() * sizeof(float);
    table.own_rows = HostMemory(device, bytes, spec.name);
    table.own_log = HostMemory(device, bytes, spec.name);
  }
  for (Piece& piece : table.pieces) {
    const std::span<const float> parameters = exchange.parameters(piece.key);
    piece.rows = table.kept_twice ? table.own_rows_of(piece) : parameters.data();
    if (table.kept_twice) std::ranges::copy(parameters, table.own_rows_of(piece));
    piece.log = table.kept_twice ? table.own_log.floats().data() + table.first_float_of(piece)
                                 : exchange.gradient(piece.key).data();
  }
}

}  // namespace

std::vector<Table> make_tables(Device& device, Exchange& exchange, uint32_t partitions,
                               const std::vector<TableSpec>& specs) {
  std::vector<Table> tables;
  size_t keys = 0;
  for (const TableSpec& spec : specs) {
    Table& table = tables.emplace_back(spec);
    table.split = split_of(spec);
    table.first_partition = static_cast<uint32_t>(tables.size() - 1) % partitions;
    if (spec.local) {  // no key: there is something for each partition
      const uint32_t share = (table.split.rows + partitions - 1) / partitions;
      table.split.rows_per_piece = std::min(table.split.rows_per_piece, share);
    }
    for (auto* event : {&table.gathered, &table.clocked}) *event = device.make_event();
    add_pieces(device, table);
    if (!spec.local) {
      connect(device, exchange, table, keys);
      keys += table.pieces.size();
      continue;
    }
    table.own_rows = HostMemory(device, table.floats() * sizeof(float), spec.name);
    for (Piece& piece : table.pieces) piece.rows = table.own_rows_of(piece);
    if (spec.by_branch) {
      table.branches = std::make_unique<BranchRows>(table.own_rows.floats(), spec.row_floats);
    }
  }
  if (keys != exchange.keys()) {
    fail(ErrorCode::kInvalid,
         "tables of parameters with {} pieces in all, but the exchange has {} keys", keys,
         exchange.keys());
  }
  return tables;
}

}  // namespace phub::geeps
