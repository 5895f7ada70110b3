#include "worker/iterstore/shared_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/iterstore/one_round.h"
#include "worker/iterstore/thread_rows.h"

namespace phub::iterstore {
namespace {

// Those of tables have a '/'.
constexpr const char* kClockKey = "clock";
constexpr const char* kStrayKey = "stray";             // the latest time somebody did; if ranks ask
constexpr const char* kStrayEarlyKey = "stray-early";  // the same, of ranks that push early

constexpr uint64_t kPieceWords = 8192;  // of a piece, about; at most a chunk

// Every rank pushes the clock's key with each clock: so none is further than one ahead, even if
// they share no rows, and each has something to push.
WorkerOptions options_of_rows(const WorkerOptions& store, const std::string& name,
                              std::span<const Table> tables, const RowPlan& plan, const Use& use,
                              bool early, Saving* saving) {
  std::vector<KeySpec> keys = key_specs(plan, tables);
  keys.push_back({.name = kClockKey,
                  .elements = sizeof(Tally) / sizeof(uint32_t),
                  .operation = "add",
                  .value_type = "i64"});
  if (plan.has_narrow() || early) {
    keys.push_back({.name = early ? kStrayEarlyKey : kStrayKey,
                    .elements = 2,
                    .priority = kParts + 1,  // what was pushed early does not delay it
                    .operation = "max",
                    .value_type = "i64"});
  }
  WorkerOptions options = options_of_job(store, name, std::move(keys));
  options.spec.initial = "broadcast";
  options.spec.rank_hosts = plan.rank_hosts();
  // The last clock of the slack is under way (look_ahead()): the box allows the others.
  if (options.spec.consistency == "ssp" && options.spec.slack > 0) --options.spec.slack;
  options.interest = interest_of(plan, tables, use, store.spec.chunk_elements);
  if (saving != nullptr) saving->add_to(options, plan.fingerprint());
  return options;
}

// The rows of a key, in its order.
std::vector<std::byte> rows_of(const RowPlan& plan, const RowPlan::Key& key, uint64_t row_bytes,
                               std::span<const std::byte> table) {
  std::vector<std::byte> rows(key.rows * row_bytes);
  for (uint64_t i = 0; i < key.rows; ++i) {
    std::memcpy(rows.data() + i * row_bytes,
                table.data() + plan.row_at(key.table, key.first + i) * row_bytes, row_bytes);
  }
  return rows;
}

}  // namespace

SharedRows::SharedRows(const WorkerOptions& store, const std::string& name,
                       std::span<const Table> tables, RowPlan plan, Use use, States states,
                       uint64_t now, bool early, Saving* saving)
    : tables_(tables),
      plan_(std::move(plan)),
      use_(std::move(use)),
      options_(options_of_rows(store, name, tables, plan_, use_, early, saving)),
      rest_(std::move(states)),
      reads_ahead_(store.spec.consistency == "async" ||
                   (store.spec.consistency == "ssp" && store.spec.slack > 0)),
      early_(early),
      asks_(plan_.has_narrow() || early),
      saving_(saving),
      worker_(Saving::join(options_)),
      pushed_(worker_->first_round() - 1),
      now_(now) {
  if (saving_ == nullptr) check_is_new(*worker_);
  if (worker_->saves()) worker_->save_by_call(true);
  std::vector<std::vector<std::byte>> initial;
  for (const RowPlan::Key& of : plan_.keys()) {
    Key& key = keys_.emplace_back();
    key.table = &tables_[of.table];
    key.row_bytes = key.table->row_bytes();
    cut(keys_.size() - 1);
    if (!worker_->initial_counts()) continue;
    initial.push_back(rows_of(plan_, of, key.row_bytes, rest_[of.table]));
  }
  initial.emplace_back(sizeof(Tally));
  if (asks_) initial.emplace_back(sizeof(int64_t));
  std::vector<const float*> initial_of;
  for (const auto& rows : initial) {
    initial_of.push_back(reinterpret_cast<const float*>(rows.data()));
  }
  worker_->broadcast_keys(initial_of);
  if (pushed_ > 0) go_on();
  for (size_t k = 0; k < keys_.size(); ++k) {
    const uint64_t bytes = plan_.keys()[k].rows * keys_[k].row_bytes;
    if (plan_.keys()[k].sparse) keys_[k].own_updates.resize(bytes);
    kernels::fill_with_identity(keys_[k].table->fold, updates_of(k), bytes / sizeof(uint32_t));
  }
  const std::vector<bool> exchanged = interest_in_keys(options_.interest, options_.spec.keys);
  for (size_t k = 0; k < keys_.size(); ++k) keys_[k].exchanged = exchanged[k];
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!plan_.is_narrow(static_cast<uint32_t>(t))) rest_[t] = {};
  }
}

// What is counted in the job's own keys goes on from what they have. Out of lock-step the rows may
// have updates of this rank that it is about to make again, and which the box then drops: until
// they are over, no result is foretold.
void SharedRows::go_on() {
  goes_on_after_ = saving_->clocks_of(*worker_);
  std::memcpy(&last_tally_, worker_->parameter_bytes(keys_.size()).data(), sizeof last_tally_);
  if (asks_) {
    std::memcpy(&asked_, worker_->parameter_bytes(keys_.size() + 1).data(), sizeof asked_);
  }
  const bool has_bound = options_.spec.consistency == "ssp";
  ahead_from_ = has_bound ? pushed_ + options_.spec.slack + 2 : ~uint64_t{0};
}

SharedRows::~SharedRows() = default;

void SharedRows::cut(size_t k) {
  Key& key = keys_[k];
  const uint64_t words = std::min<uint64_t>(options_.spec.chunk_elements, kPieceWords);
  key.first_piece = pieces_.size();
  key.piece_rows = std::max<uint64_t>(words / key.table->row_words(), 1);
  const uint64_t rows = plan_.keys()[k].rows;
  for (uint64_t first = 0; first < rows; first += key.piece_rows) {
    Piece& piece = pieces_.emplace_back();
    piece.key = k;
    piece.first = first;
    piece.end = std::min(first + key.piece_rows, rows);
  }
}

void SharedRows::set_threads(std::vector<const ThreadRows*> threads) {
  threads_ = std::move(threads);
  std::vector<std::vector<const Place*>> by_key(keys_.size());
  for (const ThreadRows* thread : threads_) {
    for (const Place& place : thread->places()) by_key[place.at.key].push_back(&place);
  }
  for (size_t k = 0; k < keys_.size(); ++k) {
    std::ranges::stable_sort(by_key[k], {}, [](const Place* place) { return place->at.row; });
    for (const Place* place : by_key[k]) {
      Piece& piece = piece_of(place->at);
      if (piece.rows.empty() || piece.rows.back().row != place->at.row) {
        piece.rows.push_back(
            {.row = place->at.row, .first_source = static_cast<uint32_t>(piece.sources.size())});
      }
      ++piece.rows.back().sources;
      piece.sources.push_back({&place->updated_at, place->update});
    }
  }
  hold();
}

void SharedRows::hold() {
  if (!early_) return;
  for (uint32_t k = 0; k < keys_.size(); ++k) {
    const auto holds = [k](const ThreadRows* thread) { return thread->holds(k); };
    keys_[k].holders = static_cast<uint32_t>(std::ranges::count_if(threads_, holds));
  }
}

// Its result of the clock before may still be under way, which nobody waits for; with updates in
// the map, or with none, it is pushed with the clock. (Whoever only reads may call finish() without
// one.)
void SharedRows::let_go(uint32_t k) {
  Key& key = keys_[k];
  if (key.holders.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const std::lock_guard lock(key.pushing);
  if (!key.exchanged || key.dynamic_at == now_ || !worker_->test(k)) return;
  await(k);
  bool updated = false;
  const uint64_t rows = plan_.keys()[k].rows;
  for (uint64_t row = 0; row < rows; row += key.piece_rows) {
    Piece& piece = piece_of({.key = k, .row = row});
    piece.dynamic.clear();
    updated |= combine(piece);
  }
  if (!updated) return;
  key.before.assign(key.state, key.state + rows * key.row_bytes);
  key.state = key.before.data();
  key.pushed_at = now_;
  worker_->push(k);
  ++pushed_early_;
}

void SharedRows::await(size_t k) {
  Key& key = keys_[k];
  const std::lock_guard one(key.awaiting);
  if (key.here.load(std::memory_order_relaxed) == now_) return;
  if (!key.ahead.empty() && !worker_->test(k)) {
    key.state = key.ahead.data();
  } else {
    worker_->wait(k);
    key.state = worker_->parameter_bytes(k).data();
  }
  key.here.store(now_, std::memory_order_release);
}

// After a clock's push its result travels while the next updates are made. What is read meanwhile
// is the result before, with this process's updates of the clock: of the others it has all but one
// clock of what the result will have. REQUIRES: that result is here; the updates are combined.
void SharedRows::look_ahead(const Piece& piece, bool updated) {
  Key& key = keys_[piece.key];
  const uint64_t at = piece.first * key.row_bytes, bytes = piece.end * key.row_bytes - at;
  std::memcpy(key.ahead.data() + at, worker_->parameter_bytes(piece.key).data() + at, bytes);
  if (!updated) return;
  kernels::fold(key.table->fold, updates_of(piece.key) + at, key.ahead.data() + at,
                bytes / sizeof(uint32_t));
}

SharedRows::Stripe& SharedRows::stripe_of(uint32_t table, uint64_t row) {
  return stripes_[(row ^ table) % kStripes];
}

void SharedRows::read(uint32_t thread, uint32_t table, uint64_t row, std::byte* into) {
  const RowPlace at = place(table, row);
  const Table& of = tables_[table];
  {
    const auto guard = early_ ? lock(at.key) : std::unique_lock<std::mutex>();
    std::memcpy(into, state(at), of.row_bytes());
  }
  Stripe& stripe = stripe_of(table, row);
  const std::lock_guard lock(stripe.mutex);
  const auto known = stripe.rows.find(row_id(table, row));
  if (known == stripe.rows.end()) return;
  for (const Part& part : known->second.parts) {
    if (part.thread != thread || part.updated_at != now_) continue;
    kernels::fold(of.fold, part.update.data(), into, of.row_words());
  }
}

bool SharedRows::update(uint32_t thread, uint32_t table, uint64_t row, const std::byte* by) {
  const RowPlace at = place(table, row);
  const Table& of = tables_[table];
  const auto guard = early_ ? lock(at.key) : std::unique_lock<std::mutex>();
  if (early_ && is_pushed(at.key)) return false;
  if (early_) keys_[at.key].dynamic_at = now_;
  Stripe& stripe = stripe_of(table, row);
  const std::lock_guard lock(stripe.mutex);
  DynamicRow& entry = stripe.rows[row_id(table, row)];
  if (entry.parts.empty()) {
    entry.at = at;
    entry.table = table;
    entry.row = row;
  }
  auto part = std::ranges::find(entry.parts, thread, &Part::thread);
  if (part == entry.parts.end()) {
    entry.parts.push_back({.thread = thread, .update = std::vector<std::byte>(of.row_bytes())});
    part = entry.parts.end() - 1;
  }
  if (part->updated_at == now_) {
    kernels::fold(of.fold, by, part->update.data(), of.row_words());
  } else {
    std::memcpy(part->update.data(), by, of.row_bytes());
    part->updated_at = now_;
  }
  return true;
}

void SharedRows::deal_dynamic() {
  for (Piece& piece : pieces_) piece.dynamic.clear();
  for (Stripe& stripe : stripes_) {
    const std::lock_guard lock(stripe.mutex);
    for (const auto& [id, row] : stripe.rows) {
      const auto is_new = [this](const Part& part) { return part.updated_at == now_; };
      if (std::ranges::any_of(row.parts, is_new)) piece_of(row.at).dynamic.push_back(&row);
    }
  }
}

// Of all threads, in their order. REQUIRES: one in the map has updated it.
void SharedRows::combine_dynamic(const DynamicRow& row, std::byte* to) const {
  const Table& table = tables_[row.table];
  bool any = false;
  const auto add = [&](const std::byte* update) {
    if (any) {
      kernels::fold(table.fold, update, to, table.row_words());
    } else {
      std::memcpy(to, update, table.row_bytes());
    }
    any = true;
  };
  for (uint32_t t = 0; t < threads_.size(); ++t) {
    const Place* place = threads_[t]->peek(row.table, row.row);
    if (place != nullptr && place->updated_at == now_) add(place->update);
    for (const Part& part : row.parts) {
      if (part.thread == t && part.updated_at == now_) add(part.update.data());
    }
  }
}

// Writes what was updated to the key's memory; false: nothing was. Elsewhere there is the identity.
bool SharedRows::combine(Piece& piece) {
  const Key& key = keys_[piece.key];
  const Table& table = *key.table;
  std::byte* const updates = updates_of(piece.key);
  const auto clear = [&](uint64_t row) {
    kernels::fill_with_identity(table.fold, updates + row * key.row_bytes, table.row_words());
  };
  for (const uint64_t row : piece.sent_dynamic) clear(row);
  piece.sent_dynamic.clear();
  bool any = false;
  const std::span<const Source> sources = piece.sources;  // not read anew after each row
  const uint64_t now = now_;
  for (Row& row : piece.rows) {
    std::byte* const to = updates + row.row * key.row_bytes;
    bool updated = false;
    for (uint32_t s = row.first_source; s < row.first_source + row.sources; ++s) {
      if (*sources[s].updated_at != now) continue;
      if (updated) {
        kernels::fold(table.fold, sources[s].update, to, table.row_words());
      } else {
        std::memcpy(to, sources[s].update, key.row_bytes);
      }
      updated = true;
    }
    if (!updated && row.sent) clear(row.row);
    row.sent = updated;
    any |= updated;
  }
  for (const DynamicRow* row : piece.dynamic) {  // again, if it has places as well
    combine_dynamic(*row, updates + row->at.row * key.row_bytes);
    piece.sent_dynamic.push_back(row->at.row);
  }
  return any || !piece.dynamic.empty();
}

// What was pushed before is in the key's memory until its result is here.
void SharedRows::take_back(size_t k) {
  Key& key = keys_[k];
  const std::lock_guard one(key.awaiting);
  if (key.taken_back == now_) return;
  worker_->wait(k);
  key.taken_back = now_;
}

// Any thread. Whoever combines the last piece of a key pushes it.
void SharedRows::combine_and_push(Piece& piece) {
  Key& key = keys_[piece.key];
  if (!key.exchanged || key.pushed_at == now_) return;
  take_back(piece.key);
  const bool updated = combine(piece);
  if (reads_ahead()) look_ahead(piece, updated);
  if (updated) key.updated.store(true, std::memory_order_relaxed);
  if (key.to_combine.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const bool any = key.updated.load(std::memory_order_relaxed);
  if (any && plan_.keys()[piece.key].sparse) return push_updated_rows(piece.key);
  worker_->push(piece.key, {.null = !any});
}

// REQUIRES: all pieces of the key are combined.
void SharedRows::push_updated_rows(size_t k) {
  Key& key = keys_[k];
  std::vector<int64_t>& rows = key.sent_rows;
  rows.clear();
  for (size_t p = key.first_piece; p < pieces_.size() && pieces_[p].key == k; ++p) {
    for (const Row& row : pieces_[p].rows) {
      if (row.sent) rows.push_back(static_cast<int64_t>(row.row));
    }
    for (const uint64_t row : pieces_[p].sent_dynamic) rows.push_back(static_cast<int64_t>(row));
  }
  std::ranges::sort(rows);  // a row that has places, too, is there twice
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  key.sent_words.resize(rows.size() * key.table->row_words());
  std::byte* to = reinterpret_cast<std::byte*>(key.sent_words.data());
  for (const int64_t row : rows) {
    std::memcpy(to, key.own_updates.data() + static_cast<uint64_t>(row) * key.row_bytes,
                key.row_bytes);
    to += key.row_bytes;
  }
  worker_->push_rows(k, {.indices = rows, .elements = key.sent_words});
}

Tally SharedRows::tally_of_all() {
  worker_->wait(keys_.size());
  Tally all;
  std::memcpy(&all, worker_->parameter_bytes(keys_.size()).data(), sizeof all);
  return all - std::exchange(last_tally_, all);
}

Tally SharedRows::clock(const Tally& mine, Meeting& threads) {
  deal_dynamic();
  for (size_t k = 0; k < keys_.size(); ++k) {
    Key& key = keys_[k];
    key.to_combine = (plan_.keys()[k].rows - 1) / key.piece_rows + 1;
    key.updated = false;
    if (reads_ahead()) key.ahead.resize(plan_.keys()[k].rows * key.row_bytes);
  }
  threads.share(pieces_.size(), [this](size_t p) { combine_and_push(pieces_[p]); });
  const Tally before = tally_of_all();
  std::memcpy(worker_->gradient_bytes(keys_.size()).data(), &mine, sizeof mine);
  worker_->push(keys_.size());
  ++pushed_;
  ++now_;
  return before;
}

bool SharedRows::is_clocked() const {
  for (const ThreadRows* thread : threads_) {
    for (const Place& place : thread->places()) {
      if (place.updated_at == now_) return false;
    }
  }
  return std::ranges::all_of(stripes_, [this](const Stripe& stripe) {
    return std::ranges::all_of(stripe.rows, [this](const auto& row) {
      return std::ranges::all_of(row.second.parts,
                                 [this](const Part& part) { return part.updated_at != now_; });
    });
  });
}

bool SharedRows::anyone_strays(bool mine) {
  if (!asks_) return false;
  const size_t key = keys_.size() + 1;
  const int64_t by = mine ? ++asked_ : asked_++;
  std::memcpy(worker_->gradient_bytes(key).data(), &by, sizeof by);
  worker_->push(key);
  worker_->wait(key);
  int64_t latest = 0;
  std::memcpy(&latest, worker_->parameter_bytes(key).data(), sizeof latest);
  return latest == asked_;
}

void SharedRows::take_updates(SharedRows& before) {
  for (size_t s = 0; s < kStripes; ++s) stripes_[s].rows = std::move(before.stripes_[s].rows);
}

}  // namespace phub::iterstore
