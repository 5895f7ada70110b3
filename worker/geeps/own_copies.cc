#include "worker/geeps/own_copies.h"

#include <memory>

namespace phub::geeps {

OwnCopies::OwnCopies(Device& device, Mover& mover, DeviceWork& work)
    : mover_(mover),
      work_(work),
      lane_{.kind = Lane::Kind::kFetch, .stream = device.make_stream("geeps"), .rows = {}} {
  lane_.rows = std::make_unique<HostRows>(device, *lane_.stream);
}

void OwnCopies::await() { lane_.stream->synchronize(); }

std::vector<bool> OwnCopies::save_dirty() {
  if (work_.in_stream()) work_.stream()->synchronize();
  std::vector<bool> unclocked;
  for (uint32_t table = 0; table < mover_.tables.size(); ++table) {
    std::vector<uint32_t> used_logs;
    if (mover_.schedule) {
      for (const uint32_t entry : mover_.schedule->table_entries[table]) {
        if (mover_.schedule->entries[entry].log_used) used_logs.push_back(entry);
      }
    }
    unclocked.push_back(mover_.tables[table].unclocked);
    if (!unclocked.back()) continue;
    StagedBuffers staged(mover_.staging);
    for (uint32_t piece = 0; piece < mover_.tables[table].pieces.size(); ++piece) {
      mover_.work.complete_log(*lane_.rows, table, piece, used_logs, staged);
    }
  }
  store_dirty([](const Table&) { return true; });
  return unclocked;
}

void OwnCopies::store_dirty(const Tables& of) {
  if (!mover_.schedule) return;
  for (PlacedEntry& entry : mover_.schedule->entries) {
    const Table& table = mover_.tables[entry.table];
    if (!entry.dirty || !of(table)) continue;
    StagedBuffers staged(mover_.staging);
    for (const EntryPart& part : entry.parts) {
      const Piece& piece = table.pieces[part.piece];
      table.keep_rows(piece, part.runs);
      lane_.rows->store({entry.rows, part.stretch, staged}, table.own_rows_of(piece), part.runs,
                        table.row_floats);
    }
    entry.dirty = false;
  }
  lane_.stream->synchronize();
}

void OwnCopies::settle(const Tables& of) {
  if (work_.in_stream()) work_.stream()->synchronize();
  store_dirty(of);
  for (const Table& table : mover_.tables) {
    if (!of(table)) continue;
    for (const Piece& piece : table.pieces) piece.saved->wait();
  }
}

void OwnCopies::load_pinned(const std::vector<bool>& unclocked) {
  for (PlacedEntry& entry : mover_.schedule->entries) {
    const Table& table = mover_.tables[entry.table];
    const bool has_log = unclocked[entry.table] && entry.log != nullptr;
    entry.log_used = has_log;
    for (EntryPart& part : entry.parts) {
      if (unclocked[entry.table] && !has_log) part.host_log = HostLog::kUsed;
      if (!entry.pinned) continue;
      const Piece& piece = table.pieces[part.piece];
      lane_.rows->fetch(entry.rows, piece.rows, nullptr, part.runs, table.row_floats);
      if (!has_log) continue;
      lane_.rows->fetch(entry.log, piece.log, nullptr, part.runs, table.row_floats);
    }
  }
  for (uint32_t i = 0; i < mover_.tables.size(); ++i) {
    Table& table = mover_.tables[i];
    if (!unclocked[i]) continue;
    for (Piece& piece : table.pieces) {
      for (uint32_t row = 0; row < piece.row_count; ++row) {
        if (mover_.schedule->entry_of_row[i][piece.first_row + row] == kNoEntry) {
          piece.loose_log[row] = HostLog::kUsed;
        }
      }
    }
  }
  lane_.stream->synchronize();
}

void OwnCopies::load_pinned_of(const Tables& of) {
  for (const PlacedEntry& entry : mover_.schedule->entries) {
    const Table& table = mover_.tables[entry.table];
    if (!entry.pinned || !of(table)) continue;
    for (const EntryPart& part : entry.parts) {
      lane_.rows->fetch(entry.rows, table.pieces[part.piece].rows, nullptr, part.runs,
                        table.row_floats);
    }
  }
  lane_.stream->synchronize();
}

}  // namespace phub::geeps
