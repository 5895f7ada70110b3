// The rows of a process, which all of its threads share: the job that has their state, the updates
// of each thread until the next clock, and how these go out.
//
// A thread's updates of a row lie either at a place of its own (thread_rows.h), or in a hash map
// that all threads share, under locks. The same thread's updates of the same row are never in both.
//
// Any thread may call state(), read() and update(); the other functions, only one thread while the
// others wait. In clock() those that wait help.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "worker/iterstore/meeting.h"
#include "worker/iterstore/pattern_watch.h"
#include "worker/iterstore/row_plan.h"
#include "worker/iterstore/saving.h"
#include "worker/worker.h"

namespace phub::iterstore {

class ThreadRows;

class SharedRows {
 public:
  // Joins the job, and begins with these states, which are those of rank 0. `use` is this
  // process's, for the interest in narrow tables; `now` is its first clock. `early`: keys are
  // pushed when no thread holds them any more. With `saving` the box saves the job; if it goes
  // on from a checkpoint, the states are those of that instead, but for rows that no rank accesses.
  SharedRows(const WorkerOptions& store, const std::string& name, std::span<const Table> tables,
             RowPlan plan, Use use, States states, uint64_t now = 1, bool early = false,
             Saving* saving = nullptr);
  ~SharedRows();

  const RowPlan& plan() const { return plan_; }
  const Use& use() const { return use_; }
  // The clock whose updates are being made; from 1.
  uint64_t now() const { return now_; }
  WorkerStats stats() const { return worker_->stats(); }

  bool saves() const { return worker_->saves(); }  // the box saves its job
  // The number of clocks after which the job goes on; nullopt: it begins.
  std::optional<uint64_t> goes_on_after() const { return goes_on_after_; }
  std::optional<std::span<const std::byte>> restored(std::string_view name) const {
    return worker_->restored(name);
  }
  // Saves this rank's state after so many clocks of the store, if it is time (saving.h). REQUIRES:
  // no thread updates.
  void save_if_due(uint64_t clocks) {
    if (saving_ != nullptr) saving_->save_if_due(*worker_, pushed_, clocks);
  }
  // Makes a round without updates where the question whether somebody strays was one of its own, so
  // that all keys are in the same round, as saving needs it. All ranks call it.
  void end_question();
  // The job goes on later, from its checkpoint, instead of ending well.
  void abandon() noexcept;

  // The places of the threads, in their order. REQUIRES: nothing was updated since the last clock.
  void set_threads(std::vector<const ThreadRows*> threads);

  // A row's state after the last clock. Waits for its batch.
  const std::byte* state(const RowPlace& place) {
    Key& key = keys_[place.key];
    if (key.here.load(std::memory_order_acquire) != now_) await(place.key);
    return key.state + place.row * key.row_bytes;
  }
  // False: the table is narrow, and no thread of this process has recorded such an access.
  bool allows(uint32_t table, uint64_t row, Access access) const {
    if (!plan_.is_narrow(table)) return true;
    const RowUse& use = use_.rows[table][row];
    return use.accesses > 0 && (access == Access::kRead || use.updated);
  }
  // REQUIRES: a read is allowed.
  RowPlace place(uint32_t table, uint64_t row) const { return *plan_.place(table, row); }

  // These two are for rows for which the thread has no place. REQUIRES: it is allowed. update()
  // returns false, and does nothing: the row's key was pushed already.
  void read(uint32_t thread, uint32_t table, uint64_t row, std::byte* into);
  bool update(uint32_t thread, uint32_t table, uint64_t row, const std::byte* by);

  // Keys that are pushed early. A thread that does not hold a key (thread_rows.h) accesses it, and
  // its place of a row of it, with this lock, and may not update a row of one that was pushed.
  // state() is that before this clock's updates also if it was.
  bool pushes_early() const { return early_; }
  std::unique_lock<std::mutex> lock(uint32_t key) { return std::unique_lock(keys_[key].pushing); }
  bool is_pushed(uint32_t key) const { return keys_[key].pushed_at == now_; }
  // A thread holds the key no more. If it was the last, and something was updated, it is pushed.
  void let_go(uint32_t key);
  uint64_t pushed_early() const { return pushed_early_; }
  void hold();  // threads hold what comes before their next clock. REQUIRES: called after clock()

  // Combines and pushes what was updated, batch after batch, and `mine`, what this rank says with
  // this clock. The threads that have met share the rows. Returns what all ranks said with the
  // clock before, zeros if this is the job's first; out of lock-step, with some clocks before.
  Tally clock(const Tally& mine, Meeting& threads);
  // What all ranks said with the last clock, unless that was returned already. Waits for all.
  Tally tally_of_all();
  bool is_clocked() const;  // nothing was updated since
  // Whether a rank strays: a thread of it waits for a row of a narrow table that it may not access.
  // Or it waits to update a row of a key that was pushed. All ranks ask each other before they do
  // something together, if there is such a table or keys are pushed early: until then every state
  // is as it was after the last clock, for all of them, or can be retracted.
  bool anyone_strays(bool mine);
  // Takes back what was pushed before the clock: states() returns what was before. The job is of no
  // use afterwards. REQUIRES: all ranks call it, between the same clocks.
  void retract();
  // Updates of this clock that were made in the job before. REQUIRES: rows have the same places.
  void take_updates(SharedRows& before);

  // Returns the whole state of all tables, on all ranks; all ranks call it. `name` is that of a job
  // that does it.
  States states(const std::string& name);

 private:
  struct Source {  // a thread's updates of a row
    const uint64_t* updated_at;
    const std::byte* update;
  };
  struct Row {  // a row with places in some threads
    uint64_t row = 0;
    uint32_t first_source = 0, sources = 0;
    bool sent = false;  // the key's memory has other than the identity
  };
  struct Key {
    const Table* table = nullptr;
    uint64_t row_bytes = 0;
    bool exchanged = true;  // this rank reads or writes some of it
    const std::byte* state = nullptr;
    // A sparse key's updates, which others have in the worker's memory; and what is sent of them.
    std::vector<std::byte> own_updates;
    std::vector<int64_t> sent_rows;
    std::vector<float> sent_words;
    std::atomic<uint64_t> here = 0;  // state is that before this clock's updates
    // Out of lock-step: what may be read while the latest push is under way. Empty: nothing.
    std::vector<std::byte> ahead;
    std::mutex awaiting;
    uint64_t taken_back = 0;  // the clock in which its memory was the threads' again
    size_t first_piece = 0;
    uint64_t piece_rows = 0;             // of each piece, but for the last
    std::atomic<size_t> to_combine = 0;  // pieces, in this clock
    std::atomic<bool> updated = false;   // one of its pieces was
    // Pushed early:
    std::atomic<uint32_t> holders = 0;
    std::mutex pushing;       // guards what follows, here and state, against who does not hold it
    uint64_t pushed_at = 0;   // the clock
    uint64_t dynamic_at = 0;  // the clock in which the map has updates of it
    std::vector<std::byte> before;  // the state before, if it was pushed or retracted
  };
  struct Part {  // a thread's updates of a row in the map
    uint32_t thread = 0;
    uint64_t updated_at = 0;
    std::vector<std::byte> update;
  };
  struct DynamicRow {
    RowPlace at;
    uint32_t table = 0;
    uint64_t row = 0;
    std::vector<Part> parts;
  };
  struct Piece {  // consecutive rows of a key, which one thread combines
    size_t key = 0;
    uint64_t first = 0, end = 0;
    std::vector<Row> rows;  // those with places
    std::vector<Source> sources;
    std::vector<const DynamicRow*> dynamic;  // updated in this clock
    std::vector<uint64_t> sent_dynamic;  // rows where the key's memory has other than the identity
  };
  struct Stripe {
    std::mutex mutex;
    std::unordered_map<uint64_t, DynamicRow> rows;
  };
  static constexpr size_t kStripes = 64;

  void await(size_t key);
  void settle();
  void push_nothing();  // a round of all keys
  void go_on();
  bool reads_ahead() const { return reads_ahead_ && pushed_ >= ahead_from_; }
  Stripe& stripe_of(uint32_t table, uint64_t row);
  void cut(size_t key);  // into pieces
  Piece& piece_of(const RowPlace& place) {
    const Key& key = keys_[place.key];
    return pieces_[key.first_piece + place.row / key.piece_rows];
  }
  void deal_dynamic();  // the rows in the map that were updated, to their pieces
  void take_back(size_t key);
  bool combine(Piece& piece);
  std::byte* updates_of(size_t key) {
    std::vector<std::byte>& own = keys_[key].own_updates;
    return own.empty() ? worker_->gradient_bytes(key).data() : own.data();
  }
  void push_updated_rows(size_t key);
  void look_ahead(const Piece& piece, bool updated);
  void combine_and_push(Piece& piece);
  void combine_dynamic(const DynamicRow& row, std::byte* to) const;

  const std::span<const Table> tables_;
  const RowPlan plan_;
  const Use use_;
  const WorkerOptions options_;
  States rest_;  // narrow tables' rows that nobody accesses, and others as they were
  const bool reads_ahead_;
  const bool early_;
  const bool asks_;  // whether somebody strays
  bool retracted_ = false;
  Saving* const saving_;  // null: the job is not saved
  const std::unique_ptr<Worker> worker_;
  uint64_t pushed_;          // the latest round of all keys
  uint64_t ahead_from_ = 0;  // reads_ahead() from this round on
  std::optional<uint64_t> goes_on_after_;
  uint64_t now_;
  Tally last_tally_;   // the sum over all clocks, as far as it is known
  int64_t asked_ = 0;  // the number of questions whether a rank strays
  std::deque<Key> keys_;
  std::vector<Piece> pieces_;  // of all keys, in their order
  std::vector<const ThreadRows*> threads_;
  std::array<Stripe, kStripes> stripes_;
  std::atomic<uint64_t> pushed_early_ = 0;
};

}  // namespace phub::iterstore
